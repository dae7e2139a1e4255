"""Settings of a worker from its environment: our variables, torchrun's, DMLC's, and Slurm's.

| setting | ours | torchrun | DMLC |
|---|---|---|---|
| servers | PACELINE_SERVERS=host:port,... | | DMLC_PS_ROOT_URI, _PORT, DMLC_NUM_SERVER |
| rank | PACELINE_RANK | RANK | DMLC_WORKER_ID |
| workers | PACELINE_NUM_WORKERS | WORLD_SIZE | DMLC_NUM_WORKER |
| number of this local group, and of all | PACELINE_GROUP, PACELINE_NUM_GROUPS | | |
| minimum and maximum of an elastic job | PACELINE_MIN_WORKERS, PACELINE_MAX_WORKERS | | |
| job | PACELINE_JOB | TORCHELASTIC_RUN_ID | |
| restart | | TORCHELASTIC_RESTART_COUNT | |
| launch that all workers belong to | PACELINE_RUN_ID | | |
| seconds without an answer that are an error | PACELINE_TIMEOUT_S | | |
| data plane | PACELINE_DATA_PLANE=auto, local, tcp, grpc | | |
| CA of the shards (connects with TLS) | PACELINE_TLS_CA | | |
| our certificate and key, if shards require one | PACELINE_TLS_CERT, PACELINE_TLS_KEY | | |
| file with the token | PACELINE_TOKEN_FILE | | |
| file for timelines | PACELINE_TIMELINE=trace.json | | |
| plan of a pipeline | PACELINE_PIPELINE=plan.json | | |
| where to listen for other workers | PACELINE_PEER_HOST, PACELINE_PEER_PORTS=7100-7107 | | |

The first column wins. In a step of srun with several tasks, SLURM_PROCID, SLURM_STEP_NUM_TASKS and
SLURM_LOCALID come last, and the job is `slurm-` and SLURM_JOB_ID: a job that is requeued continues.
MASTER_PORT is never bound: it belongs to torch.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from pscore.net.credentials import Credentials, read_credentials
from pscore.observe.timeline import require_folder
from pscore.variables import require_known, require_name, whole_number
from psworker.job.place import DEFAULT_JOB

log = logging.getLogger("paceline")
RANKS = (
    "PACELINE_RANK",
    "PACELINE_NUM_WORKERS",
    "RANK",
    "WORLD_SIZE",
    "DMLC_WORKER_ID",
    "DMLC_NUM_WORKER",
)
TIMEOUT_S = 30.0
TIMEOUT_S_MAX = 86400.0
WHOLE = ((int,), "a whole number")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # Types of arguments, if not text.
    "servers": ((str, list, tuple), "text as host:port,host:port, or a list"),
    "rank": WHOLE,
    "num_workers": WHOLE,
    "min_workers": WHOLE,
    "max_workers": WHOLE,
    "timeout_s": ((int, float), "a number of seconds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Defaults for a worker."""

    servers: tuple[str, ...]  # Addresses in the order of the shards; empty if none is set.
    rank: int  # -1: the shards decide.
    num_workers: int  # Maximum of an elastic job.
    local_rank: int  # Rank among the workers of this machine.
    local_workers: int  # Workers on this machine.
    job: str  # Name of the job.
    restart: int  # How often the launcher has restarted this worker.
    run_id: str = ""  # Identity of the launch; empty: not known.
    data_plane: str  # `auto`, or the one data plane to use.
    min_workers: int = 0  # Minimum of an elastic job; 0: the job is not elastic.
    group: int = -1  # Number of this local group; -1: torch's ranks decide.
    num_groups: int = 0  # 0: torch's ranks decide.
    # Whether torchrun has started this process; hidden from libraries by psworker.integrations.
    is_torchrun: bool = field(default=False, compare=False)
    timeout_s: float = TIMEOUT_S  # Seconds without an answer that are an error.
    tls_ca: str = ""  # Path of the CA that signed the shards' certificates; empty: no TLS.
    tls_cert: str = ""  # Path of this worker's own certificate.
    tls_key: str = ""  # Path of its private key.
    token_file: str = ""  # Path of the token file; empty: no token is shown.
    timeline: str = ""  # A path (pscore/observe/timeline.py); empty: no timeline.
    pipeline: str = ""  # A path (psworker/pipeline/plan/plan_file.py); empty: no plan is given.
    peer_host: str = ""  # Listens here for other workers; empty: where it reaches the first shard.
    peer_ports: range = range(1)  # Takes the first that is free; 0: any.

    def __post_init__(self) -> None:
        """Checks values that arguments may have replaced.

        Raises:
            ConfigError: A value is out of its range.
        """
        require_name(self.job)
        if self.num_workers < 1:
            raise ConfigError(f"the number of workers is {self.num_workers}, must be 1 or more")
        if not -1 <= self.rank < self.num_workers:
            raise ConfigError(
                f"rank {self.rank} of {self.num_workers} workers, must be in "
                f"0..{self.num_workers - 1}; PACELINE_NUM_WORKERS is the number of all workers"
            )
        if not 0 <= self.min_workers <= self.num_workers:
            raise ConfigError(
                f"min_workers is {self.min_workers}, must be in 1..{self.num_workers}, the largest "
                "number of workers"
            )
        if (self.num_groups or self.group >= 0) and not 0 <= self.group < self.num_groups:
            raise ConfigError(
                f"PACELINE_GROUP is {self.group} and PACELINE_NUM_GROUPS {self.num_groups}: set "
                "both, and number the groups from 0"
            )
        if not 0.0 <= self.timeout_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"timeout_s (PACELINE_TIMEOUT_S) is {self.timeout_s!r}, must be in "
                f"0..{TIMEOUT_S_MAX:g} seconds"
            )

    def credentials(self) -> Credentials:
        """Returns token and certificates for connections to the shards.

        Raises:
            ConfigError: A file cannot be used.
        """
        named = {
            "PACELINE_TLS_CA": self.tls_ca,
            "PACELINE_TLS_CERT": self.tls_cert,
            "PACELINE_TLS_KEY": self.tls_key,
            "PACELINE_TOKEN_FILE": self.token_file,
        }
        return read_credentials(named, job=self.job)

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ, **given: Any) -> Environment:
        """Reads the variables.

        Args:
            given: Values of fields that come before the variables, and `max_workers`, which is
                `num_workers` of an elastic job; None: not given.

        Raises:
            ConfigError: A variable or a given value is wrong; names it.
        """
        require_known(variables)
        given = {name: value for name, value in given.items() if value is not None}
        _require_types(given)
        variables = variables if "max_workers" in given else _with_slurm(variables)
        place = _place(variables, given)
        rank, num_workers = place["rank"], place["num_workers"]
        role = variables.get("DMLC_ROLE") or "worker"
        if role != "worker":
            raise ConfigError(
                f"DMLC_ROLE is {role!r}, but this process is a worker; `psserver start` starts "
                "the servers, and there is no scheduler"
            )
        read: dict[str, Any] = {
            "servers": parse_addresses(variables.get("PACELINE_SERVERS", "")) or _dmlc(variables),
            "local_rank": _number(variables, max(rank, 0), "PACELINE_LOCAL_RANK", "LOCAL_RANK"),
            "local_workers": _number(
                variables, num_workers, "PACELINE_LOCAL_WORKERS", "LOCAL_WORLD_SIZE", least=1
            ),
            "job": variables.get("PACELINE_JOB") or _run_id(variables),
            "restart": _number(variables, 0, "TORCHELASTIC_RESTART_COUNT"),
            "run_id": variables.get("PACELINE_RUN_ID", ""),
            "data_plane": variables.get("PACELINE_DATA_PLANE") or "auto",
            "group": _number(variables, -1, "PACELINE_GROUP"),
            "num_groups": _number(variables, 0, "PACELINE_NUM_GROUPS", least=1),
            "is_torchrun": "TORCHELASTIC_RUN_ID" in variables,
            "timeout_s": _seconds(variables, TIMEOUT_S, "PACELINE_TIMEOUT_S"),
            "tls_ca": variables.get("PACELINE_TLS_CA", ""),
            "tls_cert": variables.get("PACELINE_TLS_CERT", ""),
            "tls_key": variables.get("PACELINE_TLS_KEY", ""),
            "token_file": variables.get("PACELINE_TOKEN_FILE", ""),
            "timeline": _timeline(variables, "PACELINE_TIMELINE"),
            "pipeline": variables.get("PACELINE_PIPELINE", ""),
            "peer_host": _host(variables, "PACELINE_PEER_HOST"),
            "peer_ports": _ports(variables, "PACELINE_PEER_PORTS"),
        }
        given.pop("max_workers", None)
        return cls(**read | given | place)


def _require_types(given: Mapping[str, Any]) -> None:
    """Checks the values that arguments of `psworker.init` give."""
    for name, value in given.items():
        kind, what = KINDS.get(name, ((str,), "text"))
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is {value!r}, must be {what}")
    for name, least in (("rank", 0), ("min_workers", 1)):
        if given.get(name, least) < least:
            raise ConfigError(f"{name} is {given[name]}, must be {least} or more")


def _place(variables: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, int]:
    """Returns `rank`, `num_workers` and `min_workers`, from given values or the variables."""
    names = ("PACELINE_NUM_WORKERS", "WORLD_SIZE", "DMLC_NUM_WORKER")
    known = _number(variables, 1, *names, least=1)
    known = _number(variables, known, "PACELINE_MAX_WORKERS", least=1)
    num_workers = given.get("max_workers", given.get("num_workers", known))
    is_elastic = "max_workers" in given or bool(variables.get("PACELINE_MAX_WORKERS"))
    fewest = _number(variables, int(is_elastic), "PACELINE_MIN_WORKERS", least=1)
    min_workers = given.get("min_workers", fewest)
    names = ("PACELINE_RANK", "RANK", "DMLC_WORKER_ID")
    rank = given.get("rank", _number(variables, -1, *names, least=-1))
    if num_workers == 1 and not min_workers and rank == -1:
        rank = 0
    return {"rank": rank, "num_workers": num_workers, "min_workers": min_workers}


def _with_slurm(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables with those of an srun step as torchrun would name them.

    A batch script and an interactive shell have SLURM_PROCID too, but no step with several tasks.
    """
    is_placed = any(variables.get(name) for name in RANKS) or variables.get("PACELINE_MAX_WORKERS")
    if is_placed or _number(variables, 1, "SLURM_STEP_NUM_TASKS", least=1) == 1:
        return variables
    rank, local_rank = variables.get("SLURM_PROCID", ""), variables.get("SLURM_LOCALID", "")
    taken = {"RANK": rank, "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"]}
    job = f"slurm-{variables['SLURM_JOB_ID']}" if variables.get("SLURM_JOB_ID") else ""
    return {"LOCAL_RANK": local_rank, "PACELINE_JOB": job} | taken | _set(variables)


def _set(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are not empty: an empty one counts as not set."""
    return {name: value for name, value in variables.items() if value}


def _run_id(variables: Mapping[str, str]) -> str:
    run_id = variables.get("TORCHELASTIC_RUN_ID", "")
    return run_id if run_id and run_id != "none" else DEFAULT_JOB


def _number(variables: Mapping[str, str], default: int, *names: str, least: int = 0) -> int:
    for name in names:
        if variables.get(name):
            number = whole_number(variables, name, default, least)
            if name.startswith("DMLC_"):
                log.info("using %s=%s as %s", name, variables[name], names[0])
            return number
    return default


def _seconds(variables: Mapping[str, str], default: float, name: str) -> float:
    text = variables.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, must be a number of seconds") from None


def _timeline(variables: Mapping[str, str], name: str) -> str:
    """Returns the path of a timeline, in a folder that can be written to."""
    require_folder(path := variables.get(name, ""))
    return path


def _host(variables: Mapping[str, str], name: str) -> str:
    """Returns an address of this host; names are left to the resolver."""
    text = variables.get(name, "").strip("[]")
    if text in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{name} is {text!r}, must be an address at which other workers reach this one"
        )
    return text


def _ports(variables: Mapping[str, str], name: str) -> range:
    """Returns the ports that `7100` or `7100-7107` names; 0, any free one, if it is not set."""
    text = variables.get(name, "")
    if not text:
        return range(1)
    first, dash, last = text.partition("-")
    parts = (first, last if dash else first)
    ports = [int(part) if re.fullmatch("[0-9]{1,5}", part) else 0 for part in parts]
    if not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ConfigError(f"{name} is {text!r}, must be a port, or two with a dash: 7100-7107")
    return range(ports[0], ports[1] + 1)


def _dmlc(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the shards that the DMLC variables describe: consecutive ports on one host."""
    host, port = variables.get("DMLC_PS_ROOT_URI"), variables.get("DMLC_PS_ROOT_PORT")
    if not host or not port:
        return ()
    count = _number(variables, 1, "DMLC_NUM_SERVER", least=1)
    first = _number(variables, 0, "DMLC_PS_ROOT_PORT")
    addresses = tuple(f"{host}:{first + index}" for index in range(count))
    log.info("DMLC_PS_ROOT_URI and _PORT used as PACELINE_SERVERS=%s", ",".join(addresses))
    return parse_addresses(addresses)
