"""Frozen values made under the engine's lock and read without it: status, metrics and answers.

Socket threads change clocks, members and counters while the event loop answers. So nothing outside
of the lock reads a state machine: the engine copies what is shown, and its readers see the shard at
one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pscore.content import Content
from pscore.types import Origin
from psserver.decisions.directory import Meeting, Peer, PeerReport
from psserver.decisions.shard import Job, Shard
from psserver.decisions.table import Table
from psserver.decisions.worker_reports import NO_PACE, ReportedPace, StageReport
from psserver.engine.counters import Counters
from psserver.engine.waits import Waits


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
    uneven: str  # The worker that leaves out steps of others; empty if none does.
    epochs: dict[int, int]  # Epoch of the directory of each table whose workers meet.
    fastest_step_s: float  # Of a step of the fastest worker without its waits; 0: not known.


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


def figures_of(shard: Shard, counters: Counters, view: ShardView) -> Figures:
    """Returns a copy of the numbers; called under the lock."""
    live = {job.name: len(job.membership.live()) for job in shard.jobs.values()}
    counters.keep({name for name, count in live.items() if count})
    return Figures(counters=counters.copy(), live=live, shard=view)


def view_of(
    job: Job,
    waits: Waits,
    now_s: float,
    saves: Saves,
    exposed: Mapping[int, int],
    held: Mapping[int, Mapping[str, int]],
) -> JobView:
    """Returns a job as it is at this moment; called under the lock.

    Args:
        saves: Its checkpoints.
        exposed: By table: number of slices that a journal should hold, and does not.
        held: By table: counts of the things that it holds beside weights, by name.
    """
    return JobView(
        **asdict(job.counters),
        name=job.name,
        num_workers=job.membership.num_workers,
        min_workers=job.membership.min_workers,
        workers=_workers(job, waits, now_s),
        tables=tuple(
            _table(table, waits, exposed.get(table.index, 0), held.get(table.index, {}))
            for table in job.tables.values()
        ),
        waiting_for=tuple(waits.others()),
        state=job.state.value,
        step=job.step,
        memory_nbytes=job.memory_nbytes,
        open_steps=max(
            (len(c.open_steps) for table in job.tables.values() for c in table.clocks.values()),
            default=0,
        ),
        num_lost=job.membership.num_lost,
        num_away=job.membership.num_away,
        has_checkpoint=saves.has_any,
        checkpoint_age_s=now_s - saves.since_s,
        rounds=_rounds(job),
        chosen=job.choice.text,
    )


def _rounds(job: Job) -> tuple[RoundView, ...]:
    found = []
    for name, table in job.tables.items():
        if table.spec.rule.window_s is not None and table.clocks:
            clock = max(table.clocks.values(), key=lambda clock: clock.version)
            found.append(
                RoundView(
                    table=name,
                    num_in=len(clock.ranks_in()),
                    window_s=clock.window.length_s,
                    num_late=max(clock.window.num_late for clock in table.clocks.values()),
                )
            )
    return tuple(found)


def _workers(job: Job, waits: Waits, now_s: float) -> tuple[WorkerView, ...]:
    staleness: dict[int, int] = {}
    for table in job.tables.values():
        for clock in table.clocks.values():
            for rank, updates in clock.staleness.items():
                if updates > staleness.get(rank, 0):
                    staleness[rank] = updates
    return tuple(
        WorkerView(
            rank=member.rank,
            host=member.host,
            pid=member.pid,
            step=job.steps.get(member.rank, 0),
            staleness=staleness.get(member.rank, 0),
            state=member.presence.value,
            silent_s=now_s - member.heard_s,
            reported=dict(member.reported),
            peers=member.peers,
            pace=member.pace,
            waited_for_s=waits.waited_for_s.get(member.rank, 0.0),
            data_plane=member.data_plane,
            stage=member.stage,
            reached=member.reached,
        )
        for _, member in sorted(job.membership.members.items())
    )


def _table(table: Table, waits: Waits, num_exposed: int, held: Mapping[str, int]) -> TableView:
    versions = [clock.version for clock in table.clocks.values()] or [-1]
    return TableView(
        name=table.spec.name,
        mode=str(table.spec.rule),
        compressor=str(table.spec.compressor),
        optimizer=table.spec.optimizer,
        num_slices=len(table.specs),
        nbytes=table.nbytes,
        version_min=min(versions),
        version_max=max(versions),
        waiting_for=waits.of_table(table),
        fingerprint=table.layout.fingerprint,
        rounds=table.rounds,
        minibatches=table.minibatches,
        num_exposed=num_exposed,
        held=held,
        lead=table.spec.origin.clock - table.spec.origin.step,
        on_workers=table.spec.is_held,
    )
