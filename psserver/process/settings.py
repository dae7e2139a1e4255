"""Settings of the server side: flags > environment > file > defaults, bounded, with their origin.

Each class is one section: `[server]` in the file, `PACELINE_...` in the environment. A wrong value
is refused with a message that names section, field, value and range.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from pscore.partition import SHARDS_MAX
from pscore.text import counted, is_loopback
from psserver.access.files import Trust, require_whole
from psserver.decisions.limits import KEEP_ENDED_S, KEEP_INTERRUPTED_S
from psserver.process.run_dir import require_path
from psserver.process.shard_plan import KEEP_CHECKPOINTS_S, PUBLISH_MBIT_MAX, PairPlan, parse_every

METRICS_OFFSET = 1000
PORT_MAX = 65535
MB_MAX = 1 << 30


def _config(prefix: str) -> SettingsConfigDict:
    return SettingsConfigDict(
        env_prefix=prefix,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class ServerSettings(BaseSettings):
    """Section `server`: the addresses and resources of the shards."""

    model_config = _config("PACELINE_")

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs TLS and tokens, or `--insecure`."""
    port: int = Field(default=7070, ge=0, le=PORT_MAX)
    """Port of shard 0; the other shards use the following ports. 0 takes free ports."""
    data_port: int | None = Field(default=None, ge=1, le=PORT_MAX)
    """Port of shard 0's data sockets, for firewalls; the other shards use the following ports. By
    default free ports, which the shards tell the workers. Workers that cannot reach the port use
    gRPC, which is slower."""
    shards: int = Field(default=1, ge=1, le=SHARDS_MAX)
    """Number of shard processes. About one for each two cores is enough."""
    shard_index: int | None = Field(default=None, ge=0, le=SHARDS_MAX - 1)
    """Start only the shard with this index, on `--port` itself: the others run on other machines or
    in other containers. Needs `--cluster`."""
    cluster: str | None = None
    """Name that the shards of one cluster share. By default a new one for each start."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Threads for the numeric work of each shard. By default cores divided by shards."""
    lease_s: float = Field(default=10.0, ge=0.5, le=3600.0)
    """Seconds of silence until a worker is declared lost. After a shorter time the other workers
    continue earlier."""
    grace_s: float = Field(default=10.0, ge=0.0, le=600.0)
    """Seconds that requests under way may take when the shards end."""
    state_dir: Path | None = None
    """Directory for the run file, logs, journals and scheduled checkpoints. By default one below
    $XDG_RUNTIME_DIR or the directory for temporary files, for the run file and logs alone."""
    checkpoint_s: float = Field(default=300.0, ge=0.0, le=86400.0)
    """Seconds between checkpoints of each job in `--state-dir`/checkpoints. If all machines
    crash, shards start from the newest. With a shorter time fewer steps are lost, and more is
    written. 0: no checkpoints."""
    checkpoint_copies: str | None = None
    """Second place for scheduled checkpoints: a folder of another host, or a URL such as
    `s3://bucket/night` if fsspec is installed. A start without checkpoints fetches the newest ones
    from there. By default none."""
    shard_addresses: str | None = None
    """Addresses of all shards, in order, `host:port,host:port`: shard 0 needs them to take
    checkpoints where each shard is started by itself, with `--shard-index`. Its own port may
    be 0."""
    standby_of: str | None = None
    """Address of the process whose standby this one is at first."""
    standby_at: str | None = None
    """Address of the process with `--standby-of` this one; after a move each is the other's."""
    own_address: str | None = None
    """Address of this process for the other one. By default name of the host and port."""
    standby_register: str | None = None
    """Register of both (docs/standby.md). By default a person decides."""
    failover_s: float = Field(default=3.0, ge=0.2, le=3600.0)
    """Seconds of silence after which the standby takes over."""
    memory_mb: int | None = Field(default=None, ge=1, le=MB_MAX)
    """Memory of each shard for the tables of all jobs, in MiB; a table that would take more is
    refused. By default the memory of the host."""
    keep_ended_s: float = Field(default=KEEP_ENDED_S, ge=0.0, le=1e9)
    """Seconds that the weights of an ended job are kept, for `psserver export` and other commands;
    less if other jobs need the memory. A job whose workers were all lost has not ended."""
    keep_interrupted_s: float = Field(default=KEEP_INTERRUPTED_S, ge=0.0, le=1e9)
    """Seconds that a job whose workers were all lost is kept, so that new workers can continue it;
    less if a new job needs one of the 64 places. The log names each that is freed."""
    keep_checkpoints_s: float = Field(default=KEEP_CHECKPOINTS_S, ge=0.0, le=1e9)
    """Seconds after which scheduled checkpoints of ended and of forgotten jobs are deleted. Those
    of other jobs stay."""
    under_way_mb: int = Field(default=4096, ge=64, le=MB_MAX)
    """Limit of the bytes under way in each shard, in MiB: pushes that wait for their turn, and
    answers that wait for slow readers. Beyond it a push is refused, and a reader disconnected."""
    durability: Literal["journal", "memory"] = "journal"
    """State of a shard after a kill. journal: everything that it has acknowledged, from files in
    `--state-dir` or in memory; costs the optimizer's state a second time. memory: the newest
    checkpoint alone, if there is one."""
    publish: str = ""
    """Jobs whose weights are published to readers: `night:every=4` publishes every fourth update of
    job `night` (every 4 s in an asynchronous mode), `*:every=1` each update of each job. Several
    are separated by commas."""
    publish_mbit: int = Field(default=0, ge=0, le=PUBLISH_MBIT_MAX)
    """Limit of the rate at which each shard sends to its readers on other hosts together, in
    Mbit/s: they have equal parts, and one alone has all of it. 0: no limit."""
    timeline: Path | None = None
    """File for the trace that each shard writes at its end: `trace.json` becomes
    `trace.shard0.json` and so on, for `psworker timeline`. By default no trace is recorded."""
    restart: bool = True
    """Whether a shard that dies is started again."""
    spare: bool = True
    """Whether a process that has loaded everything waits to take the place of a shard that dies, at
    once instead of after seconds. It takes the memory of a shard without jobs."""
    alive_file: Path | None = None
    """File whose time of change is set every 10 s while the shards work, for the liveness check of
    an engine: if it has not changed for two minutes, a shard hangs. By default none."""
    tls_cert: Path | None = None
    """Certificate of the shards, with `--tls-key`: all connections are TLS then."""
    tls_key: Path | None = None
    """Private key of `--tls-cert`, readable by its owner alone."""
    tls_client_ca: Path | None = None
    """CA of the clients: a client must show a certificate that it has signed."""
    token_file: Path | None = None
    """File with a token for everything, or lines `job token`; readable by its owner alone."""
    insecure: bool = False
    """Whether other machines may connect without TLS and token."""

    @property
    def trust(self) -> Trust:
        """Files that decide which peers may connect, as absolute paths."""

        def absolute(path: Path | None) -> str | None:
            return None if path is None else str(path.absolute())

        return Trust(
            cert=absolute(self.tls_cert),
            key=absolute(self.tls_key),
            client_ca=absolute(self.tls_client_ca),
            token_file=absolute(self.token_file),
        )

    @property
    def pair(self) -> PairPlan | None:
        """The two places of this shard; None: it has one."""
        other = self.standby_of or self.standby_at
        if other is None:
            return None
        return PairPlan(
            other=other,
            own=self.own_address or "",
            is_first=self.standby_of is None,
            register=self.standby_register or "",
            failover_s=self.failover_s,
        )

    @property
    def threads_each(self) -> int:
        """Threads of one shard."""
        return self.threads or max(1, (os.cpu_count() or 1) // len(self.indices))

    @property
    def other_addresses(self) -> list[str]:
        """Addresses of all shards, in order, at a shard 0 that is started by itself."""
        if self.shard_index != 0 or self.shard_addresses is None:
            return []
        return list(parse_addresses(self.shard_addresses, port_min=0))

    @property
    def takes_checkpoints(self) -> bool:
        """Whether this start takes scheduled checkpoints: the one that starts shard 0 does."""
        return bool(
            self.checkpoint_s
            and self.state_dir is not None
            and self.shard_index in (None, 0)
            and not self.why_no_checkpoints
        )

    @property
    def is_saved_elsewhere(self) -> bool:
        """Whether another start may take scheduled checkpoints of these shards: that of shard 0."""
        return bool(self.checkpoint_s and self.state_dir is not None and self.shard_index)

    @property
    def why_no_checkpoints(self) -> str:
        """Why the start of shard 0 cannot take scheduled checkpoints; empty if it can."""
        if self.state_dir is None:
            return "they have no directory: give --state-dir"
        if self.shard_index == 0 and self.shards > 1 and self.shard_addresses is None:
            return (
                "shard 0 does not know the addresses of the others: give --shard-addresses "
                "HOST:PORT,HOST:PORT"
            )
        if self.tls_cert is not None and not os.environ.get("PACELINE_TLS_CA"):
            return "they are read over TLS: set PACELINE_TLS_CA to the CA that signed --tls-cert"
        return ""

    @property
    def indices(self) -> range:
        """The shards to start here."""
        if self.shard_index is None:
            return range(self.shards)
        return range(self.shard_index, self.shard_index + 1)


class MetricsSettings(BaseSettings):
    """Section `metrics`: the page for Prometheus."""

    model_config = _config("PACELINE_METRICS_")

    port: int | None = Field(default=None, ge=0, le=PORT_MAX)
    """Port of shard 0's page; the other shards use the following ports. 0: no page. By default
    `--port` + 1000."""


class LogSettings(BaseSettings):
    """Section `log`: the messages on standard error."""

    model_config = _config("PACELINE_LOG_")

    format: Literal["text", "json"] = "text"
    """Format of log lines: `text` for people, `json` for programs."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written."""
    max_mb: int = Field(default=64, ge=0, le=MB_MAX)
    """Size in MiB at which the log file of a detached process is renamed to `NAME.log.1`, which
    replaces the previous one, and a new file is begun. 0: no limit."""


SECTIONS: dict[str, type[BaseSettings]] = {
    "server": ServerSettings,
    "metrics": MetricsSettings,
    "log": LogSettings,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All sections, and where each value came from."""

    server: ServerSettings
    metrics: MetricsSettings
    log: LogSettings
    origins: Mapping[str, str]  # "server.port" -> "flag --port".

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns name, value and origin of every setting."""
        return [
            (f"{section}.{field}", _shown(getattr(getattr(self, section), field)), origin)
            for name, origin in self.origins.items()
            for section, field in [name.split(".")]
        ]


def resolve(flags: Mapping[str, object] | None = None, file: Path | None = None) -> Settings:
    """Returns the settings from all sources.

    Args:
        flags: By name, `server.port`; None where a flag is not given.
        file: A TOML file with the sections as tables.

    Raises:
        ConfigError: A value is out of its range, unknown, or does not go with another.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    tables = _read(file)
    sections: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for section, kind in SECTIONS.items():
        from_flags = {n.split(".")[1]: v for n, v in given.items() if n.startswith(f"{section}.")}
        from_env = EnvSettingsSource(kind)()
        from_file = tables.pop(section, {})
        for field in kind.model_fields:
            variable = f"{kind.model_config['env_prefix']}{field.upper()}"
            origins[f"{section}.{field}"] = (
                f"flag --{flag_of(section, field)}"
                if field in from_flags
                else f"environment {variable}"
                if field in from_env
                else f"file {file}"
                if field in from_file
                else "default"
            )
        try:
            sections[section] = kind(**{**from_file, **from_env, **from_flags})
        except ValidationError as problem:
            raise ConfigError(_sentence(section, kind, problem, origins)) from problem
    if tables:
        listed = ", ".join(f"[{name}]" for name in SECTIONS)
        raise ConfigError(f"{file} has {sorted(tables)}, known are {listed}")
    settings = Settings(**sections, origins=origins)
    _check(settings)
    return settings


def metrics_ports(settings: Settings) -> list[int | None]:
    """Returns the port of each shard's metrics page: None for off, 0 for a free one."""
    num_shards, port = len(settings.server.indices), settings.server.port
    first = settings.metrics.port
    if first is None:
        first = port + METRICS_OFFSET if port else None
        if first is None:
            return [0] * num_shards
    return [first + index if first else None for index in range(num_shards)]


def _check(settings: Settings) -> None:
    """Raises a `ConfigError` if values do not go together."""
    server = settings.server
    for name in ServerSettings.model_fields:
        if isinstance(path := getattr(server, name), Path):
            require_path(f"server.{name}", path)
    require_whole(server.trust)
    missing = [
        flags
        for flags, value in (
            ("--tls-cert and --tls-key", server.tls_cert),
            ("--token-file", server.token_file),
        )
        if value is None
    ]
    if missing and not is_loopback(server.host) and not server.insecure:
        raise ConfigError(
            f"server.host is {server.host!r}: other machines could connect; give "
            f"{' and '.join(missing)} too (`psserver certs DIR --host NAME` makes the files), or "
            "--insecure if nobody else uses the network, or --host 127.0.0.1"
        )
    if server.insecure and settings.origins["server.insecure"].startswith("flag"):
        # A file or the environment may be that of several starts; a flag is for this one.
        reason = f"only this machine can reach {server.host}"
        if not missing:
            reason = "--tls-cert and --token-file are given"
        if is_loopback(server.host) or not missing:
            raise ConfigError(f"--insecure has no effect: {reason}; leave it out")
    server.trust.check()
    parse_every(server.publish)
    _check_part(server)
    _check_pair(server)
    _check_checkpoints(settings)
    for name, first in (
        ("server.port", server.port),
        ("server.data_port", server.data_port),
        ("metrics.port", settings.metrics.port),
    ):
        num_shards = len(server.indices)
        last = (first or 0) + num_shards - 1
        if last > PORT_MAX:
            raise ConfigError(
                f"{name} is {first} for {num_shards} shards, the last would have {last}, must be "
                f"at most {PORT_MAX}"
            )
    _check_apart(settings)
    last_metrics = server.port + METRICS_OFFSET + len(server.indices) - 1
    if settings.metrics.port is None and last_metrics > PORT_MAX:
        raise ConfigError(
            f"metrics.port is by default server.port + {METRICS_OFFSET} = {last_metrics}, must be "
            f"at most {PORT_MAX}; give --metrics-port, 0 is off"
        )


def _check_pair(server: ServerSettings) -> None:
    """Raises a `ConfigError` if the shard cannot have two places."""
    if (pair := server.pair) is None:
        if server.standby_register is not None:
            raise ConfigError("server.standby_register needs --standby-of or --standby-at")
        return
    if server.standby_of is not None and server.standby_at is not None:
        raise ConfigError(
            "server.standby_of and server.standby_at name two other places: the process that has "
            "the shard at first gets --standby-at, the other one --standby-of"
        )
    if server.shard_index is None:
        raise ConfigError("a standby is of one shard: give --shard-index")
    if server.state_dir is None or server.durability == "memory":
        raise ConfigError(
            "a shard with a standby needs journals that outlive its process, which tell it whether "
            "the standby has taken over: give --state-dir, without --durability memory"
        )
    for address in filter(None, (pair.other, pair.own)):
        if len(parse_addresses(address)) != 1:
            raise ConfigError(f"a standby has one address, and {address!r} names several")


def _check_checkpoints(settings: Settings) -> None:
    """Raises a `ConfigError` if checkpoints are asked for that cannot be taken."""
    server, origin = settings.server, settings.origins["server.checkpoint_s"]
    is_wanted = origin != "default" and server.checkpoint_s and server.shard_index in (None, 0)
    if is_wanted and (reason := server.why_no_checkpoints):
        raise ConfigError(
            f"server.checkpoint_s is {server.checkpoint_s:g} ({origin}), and {reason}"
        )
    wants_copies = server.checkpoint_copies is not None and server.shard_index in (None, 0)
    if wants_copies and not server.takes_checkpoints:
        reason = server.why_no_checkpoints or "--checkpoint-s 0 takes none"
        raise ConfigError(f"server.checkpoint_copies needs scheduled checkpoints, and {reason}")
    if server.shard_addresses is None:
        return
    if server.shard_index is None:
        raise ConfigError(
            "server.shard_addresses is for shards that are started one by one, with --shard-index"
        )
    try:
        addresses = parse_addresses(server.shard_addresses, port_min=0)
        parse_addresses(addresses[1:])
    except ConfigError as problem:
        raise ConfigError(f"server.shard_addresses: {problem}") from problem
    if len(addresses) != server.shards:
        raise ConfigError(
            f"server.shard_addresses has {len(addresses)} addresses for "
            f"{counted(server.shards, 'shard')}: --shards (PACELINE_SHARDS) is the number of all"
        )
    own = f"{server.host}:{server.port}"
    if own in addresses and addresses[server.shard_index] != own:
        raise ConfigError(
            f"server.shard_addresses has {own} at place {addresses.index(own)}, and that is shard "
            f"{server.shard_index}: give the addresses in the order of the shards"
        )


def _check_apart(settings: Settings) -> None:
    """Raises a `ConfigError` if two kinds of ports overlap."""
    server = settings.server
    taken: dict[int, str] = {}  # Kind by port.
    kinds = {
        "server.port": server.port,
        "server.data_port": server.data_port,
        "metrics.port": metrics_ports(settings)[0],
    }
    for name, first in kinds.items():
        for port in range(first, first + len(server.indices)) if first else ():
            if (other := taken.setdefault(port, name)) != name:
                raise ConfigError(
                    f"{name} and {other} both take port {port}: give one of them other ports"
                )


def _check_part(server: ServerSettings) -> None:
    """Raises a `ConfigError` if this is no part of a cluster."""
    if server.cluster is not None and not re.fullmatch(r"[\w.-]{1,64}", server.cluster):
        raise ConfigError(
            f"server.cluster is {server.cluster!r}, must be 1 to 64 letters, digits, '.', '_', '-'"
        )
    if server.shard_index is None:
        if server.shards > 1 and os.environ.get("PACELINE_SHARD_INDEX") == "":
            raise ConfigError(
                f"PACELINE_SHARD_INDEX is empty: all {server.shards} shards would start here; give "
                f"the number of this one, in 0..{server.shards - 1}, or unset the variable"
            )
        return
    if server.shard_index >= server.shards:
        raise ConfigError(
            f"server.shard_index is {server.shard_index}, must be in 0..{server.shards - 1} for "
            f"{server.shards} shards"
        )
    if server.cluster is None:
        raise ConfigError(
            f"server.shard_index is {server.shard_index} without server.cluster: give --cluster "
            "the same name at every shard"
        )


def _read(file: Path | None) -> dict[str, dict[str, object]]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # Editors write such marks.
    except OSError as problem:
        raise ConfigError(f"cannot read {file}: {problem.strerror}") from problem
    except ValueError as problem:
        raise ConfigError(f"{file} is not TOML: {problem}") from problem
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file} has {name!r} outside of a table such as [server]")
    return tables


def _sentence(
    section: str, kind: type[BaseSettings], problem: ValidationError, origins: Mapping[str, str]
) -> str:
    """Returns the first problem as `server.shards is 0, must be in 1..64`."""
    first = problem.errors()[0]
    field, value = str(first["loc"][0]), first["input"]
    name = f"{section}.{field}"
    if field not in kind.model_fields:
        known = ", ".join(kind.model_fields)
        return f"{name} is unknown; section {section} has {known}"
    hint = ""
    if isinstance(value, str) and value.startswith("tcp://"):
        hint = "; Kubernetes sets it for a service of this name: set enableServiceLinks to false"
    shown = value if isinstance(value, str) and value.isdecimal() else repr(value)
    return f"{name} is {shown} ({origins[name]}), must be {_wanted(kind, field, first)}{hint}"


def _wanted(kind: type[BaseSettings], field: str, error: Mapping[str, Any]) -> str:
    bounds = {
        key: getattr(item, key)
        for item in kind.model_fields[field].metadata
        for key in ("ge", "le")
        if hasattr(item, key)
    }
    if len(bounds) == 2:  # noqa: PLR2004
        return f"in {bounds['ge']:.12g}..{bounds['le']:.12g}"
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace("'", "")
    if error["type"].startswith("bool"):
        return "true or false"
    message = str(error["msg"])
    return message.removeprefix("Input should be ").partition(",")[0]


def flag_of(section: str, field: str) -> str:
    """Returns the flag of a setting, without dashes before it."""
    name = field.replace("_", "-")
    return name if section == "server" else f"{section}-{name}"


def _shown(value: object) -> str:
    return "auto" if value is None else str(value)
