"""Frozen values made under the engine's lock and read without it: status, metrics and answers.

Socket threads change clocks, members and counters while the event loop answers. So nothing outside
of the lock reads a state machine: the engine copies what is shown, and its readers see the shard at
one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pscore.content import Content
from pscore.types import Origin
from psserver.decisions.directory import Meeting, Peer, PeerReport
from psserver.decisions.worker_reports import NO_PACE, ReportedPace, StageReport
from psserver.engine.counters import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The state of a job for a worker that has just joined."""

    rank: int
    num_workers: int
    lease_s: float
    rounds: dict[str, int]  # First round of the worker at each barrier.
    news: str
    progress: dict[str, int]  # Step of each table.
    life: int
    modes: dict[str, str]  # Mode of each table.
    former_modes: dict[str, str]  # Of each table whose mode was changed: that before.
    anew: bool  # Whether the former job of this name had ended.
    under_way: bool  # Whether others may have passed what its script calls before a step.


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinedTable:
    """A table for a worker that has just declared it."""

    index: int
    is_new: bool
    origin: Origin  # Steps at which its workers start to count.
    has_weights: bool
    content: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRequest:
    """Residuals that a worker has to send."""

    table: int
    step: int
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatView:
    """The state of a job for one of its workers."""

    waiting_for: str  # The longest wait of the job on this shard.
    residual_requests: tuple[ResidualRequest, ...]
    live: tuple[int, ...]  # Ranks.
    first: int  # Lowest rank that is here or still to come.
    uneven: str  # How workers differ, with a remedy; empty: they do not.
    epochs: dict[int, int]  # Epoch of the directory of each table whose workers meet.
    fastest_step_s: float  # Of a step of the fastest worker without its waits; 0: not known.
    others_ended: bool  # Whether a worker has ended by itself, in a job of a fixed number.


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetView:
    """The directory of a table for one of its peers."""

    epoch: int
    meetings: tuple[Meeting, ...]  # That the worker does not know, the oldest first.
    peers: tuple[Peer, ...]
    waiting_for: str  # Empty: the newest epoch has met.
    is_short: bool = False  # The job has fewer workers than its least.


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The checkpoints of a job, as far as this process has seen them."""

    has_any: bool  # Whether it has given its part of a whole one.
    since_s: float  # Time of the newest; without one, time at which this process got the job.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker of a job."""

    rank: int
    host: str
    pid: int
    step: int
    staleness: int
    state: str
    silent_s: float
    reported: dict[str, float]  # A copy: values of its training, by name.
    peers: tuple[PeerReport, ...] = ()  # Its last exchanges with peers.
    pace: ReportedPace = NO_PACE
    waited_for_s: float = 0.0  # Seconds in which the others waited for it: a mean over them.
    data_plane: str = ""  # Between it and this shard; empty: it has not said yet.
    stage: StageReport | None = None  # Its part in a pipeline.
    reached: tuple[int, ...] = ()  # By shard: its number if that answers it; else 0.


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """One table of a job."""

    name: str
    mode: str
    compressor: str
    optimizer: str
    num_slices: int
    nbytes: int
    version_min: int
    version_max: int
    waiting_for: str
    fingerprint: str
    rounds: tuple[int, ...] = ()  # One a fragment, if there are several; -1: none of it is here.
    minibatches: int = 0  # All before this one are counted, in each slice.
    num_exposed: int = 0  # Slices that the shard should journal, and has no space for.
    lead: int = 0  # Its version at step 0 of training, had it always had this mode.
    on_workers: bool = False  # They have all of it, for a shard that loses it.
    # Counts of things beside weights, by name.
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """The open round of a table whose rounds may close with a quorum, in its furthest slice."""

    table: str
    num_in: int  # Workers whose move is in.
    window_s: float
    num_late: int  # Moves that entered a later round than theirs, since the process began.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job."""

    name: str
    num_workers: int
    min_workers: int
    workers: tuple[WorkerView, ...]
    tables: tuple[TableView, ...]
    num_pushes: int
    num_updates: int
    pushed_nbytes: int
    pulled_nbytes: int
    waiting_for: tuple[str, ...]
    state: str
    step: int
    memory_nbytes: int
    raw_pushed_nbytes: int  # The pushed bytes, if none had been compressed.
    raw_pulled_nbytes: int
    open_steps: int  # Open steps of the slice with most.
    num_lost: int
    num_away: int  # Lost workers that the others miss.
    has_checkpoint: bool  # Whether this process has given its part of a whole one.
    checkpoint_age_s: float  # Since then, or since this process has the job.
    rounds: tuple[RoundView, ...] = ()  # Tables whose rounds have a quorum.
    chosen: str = ""  # The choice of its mode and the reason; empty: it was given, or is open.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesView:
    """Copies of checkpoints at a second place, as they were after the last attempt."""

    place: str
    problem: str  # Why the newest checkpoints are not there; empty: they are.
    count: int  # Checkpoints there.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """A shard and its jobs."""

    jobs: tuple[JobView, ...]
    lost: tuple[tuple[str, str], ...]  # Jobs whose numbers cannot be used, each with the reason.
    under_way_nbytes: int  # Bytes of pushes and answers that wait.
    num_recoveries: int  # Processes of this shard that have continued jobs from journals.
    num_mended: int  # Jobs that were set back because a shard had lost its part.
    copies: CopiesView | None  # None: nothing is copied from this shard's start.


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of the metrics page."""

    counters: Counters  # A copy.
    live: dict[str, int]  # Live workers, by the name of the job.
    shard: ShardView
