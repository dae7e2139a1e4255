"""The plan of one shard process, and its reports: the seam between supervisor and daemon.

The plan travels as one JSON argument. The process reports one JSON line on its standard output,
`Ready` or `Refused`, and ends when its standard input does. This module imports nothing of size,
because both sides wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from pscore.errors import ConfigError
from pscore.json_text import count_of
from pscore.publish.possible import PUBLISH_EVERY_MAX
from psserver.access.files import Trust
from psserver.decisions.limits import KEEP_ENDED_S, KEEP_INTERRUPTED_S, Limits
from psserver.exits import Exit

FOLDER = "checkpoints"  # In the state directory.
ENDING = "ending"  # Line of a shard that a client has asked to end.
PUBLISH_MBIT_MAX = 1 << 20
KEEP_CHECKPOINTS_S = 7 * 86400.0


def with_own_port(addresses: Sequence[str], index: int, port: int) -> list[str]:
    """Returns the addresses of all shards; in that of shard `index`, port 0 becomes `port`."""
    whole = list(addresses)
    if whole and whole[index].endswith(":0"):
        whole[index] = f"{whole[index][:-1]}{port}"
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Two places of one shard: one process has it, the other one is its standby."""

    other: str  # Address of the other place.
    own: str  # Address of this place, as the other one reaches it; empty: name of the host, port.
    is_first: bool  # Whether a new shard begins here.
    register: str  # Place of claims; empty: a person decides which of the two has the shard.
    failover_s: float  # Seconds of silence after which the standby takes over.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Everything that one shard process has to know."""

    index: int  # 0-based number of the shard in its cluster.
    num_shards: int  # Shards of the cluster, on all machines.
    cluster: str  # Name that the shards of one cluster share.
    host: str  # Address to listen on.
    port: int  # Port of the control plane; 0: any free one.
    metrics_port: int | None  # None: no metrics page; 0: any free port.
    data_port: int = 0  # Port of the data sockets; 0: any free port.
    num_threads: int  # Threads for numeric work.
    lease_s: float  # Seconds of silence after which a worker is lost.
    grace_s: float  # Seconds that requests under way have at the end.
    log_format: str  # `text` or `json`.
    log_level: str  # Least severe level that is logged.
    log_file: str | None = None  # Standard error, if that is a file that is rotated.
    log_max_mb: int = 0  # MiB after which it is rotated; 0: never.
    state_dir: str | None = None  # Folder that outlives the shards; None: there is none.
    checkpoint_dir: str | None = None  # Folder of checkpoints that are loaded at the start.
    loading_s: float = 0.0  # Time that this may take, beyond that of a start without any.
    # Addresses of all shards, in order, if shard 0 sends the others their parts; else empty.
    addresses: list[str] = field(default_factory=list)
    mends: bool = False  # Whether this start restores jobs that another shard has lost.
    trust: Trust = field(default_factory=Trust)  # Certificates and tokens.
    journal_dir: str | None = None  # Where the journals are; None: nowhere.
    memory_mb: int | None = None  # For tables; None: all of the host.
    under_way_mb: int = 4096  # MiB of pushes and answers that wait.
    keep_ended_s: float = KEEP_ENDED_S  # Seconds that an ended job is kept.
    keep_interrupted_s: float = KEEP_INTERRUPTED_S  # Seconds that one without workers is kept.
    # Where timelines are written (pscore/observe/timeline.py); None: nowhere.
    timeline: str | None = None
    publish: str = ""  # Jobs whose weights are published: `night:every=4`, separated by commas.
    publish_mbit: int = 0  # Most Mbit/s to all readers; 0: as many as the link takes.
    beats: bool = False  # Whether the process writes a line to its supervisor at each tick.
    # Whether the process, asked to end, waits for the last checkpoint of the start of shard 0.
    awaits_last: bool = False
    pair: PairPlan | None = None  # The shard's two places; None: it has one.

    @property
    def limits(self) -> Limits:
        """Limits of the memory that the shard may use."""
        memory = None if self.memory_mb is None else self.memory_mb << 20
        return Limits(
            memory_nbytes=memory,
            is_kept=self.journal_dir is not None,
            under_way_nbytes=self.under_way_mb << 20,
            keep_ended_s=self.keep_ended_s,
            keep_interrupted_s=self.keep_interrupted_s,
        )

    def to_json(self) -> str:
        """Returns the plan as an argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ShardPlan:
        """Returns the plan that `to_json` wrote."""
        values = json.loads(text)
        pair = None if values["pair"] is None else PairPlan(**values["pair"])
        return ShardPlan(**{**values, "trust": Trust(**values["trust"]), "pair": pair})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """Everything that the process which takes scheduled checkpoints has to know."""

    addresses: list[str]  # Addresses of all shards, in order.
    folder: str  # Folder of the checkpoints.
    every_s: float  # Seconds from one checkpoint of a job to the next.
    token_file: str | None  # Token for everything; None: the shards ask for none.
    log_format: str  # `text` or `json`.
    log_level: str  # Least severe level that is logged.
    log_file: str | None = None  # The file of standard error, shared with the supervisor.
    log_max_mb: int = 0  # MiB after which the log file is rotated; 0: never.
    copies: str | None = None  # Second place of the checkpoints; None: there is none.
    keep_checkpoints_s: float = KEEP_CHECKPOINTS_S  # Seconds that those of ended jobs are kept.

    def to_json(self) -> str:
        """Returns the plan as an argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> SchedulePlan:
        """Returns the plan that `to_json` wrote."""
        return SchedulePlan(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The shard answers, and its health service says SERVING."""

    port: int
    metrics_port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The shard could not start, and this is why."""

    code: Exit
    message: str


Report = Ready | Refused


def report_to_json(report: Report) -> str:
    """Returns a report as one line."""
    return json.dumps(asdict(report))


def report_from_json(line: str) -> Report:
    """Returns the report that `report_to_json` wrote.

    Raises:
        ValueError: The line is not a report.
    """
    try:
        values = json.loads(line)
        if "code" in values:
            return Refused(code=Exit(values["code"]), message=str(values["message"]))
        return Ready(port=values["port"], metrics_port=values["metrics_port"])
    except (TypeError, KeyError) as problem:
        raise ValueError(f"not a report: {line!r}") from problem


def parse_every(texts: str) -> dict[str, int]:
    """Returns the K of each job, or of `*`, all jobs, in `--publish JOB:every=K,...`.

    Raises:
        ConfigError: It is not of that form.
    """
    found: dict[str, int] = {}
    for text in texts.split(",") if texts else ():
        job, _, option = text.rpartition(":")
        name, _, number = option.partition("=")
        if not job or name != "every" or not number.isdecimal():
            raise ConfigError(
                f"--publish (PACELINE_PUBLISH) is {text!r}, must be JOB:every=K, such as "
                "night:every=4"
            )
        what = f"every of {job!r} in --publish (PACELINE_PUBLISH)"
        found[job] = count_of(int(number), what, least=1, most=PUBLISH_EVERY_MAX)
    return found
