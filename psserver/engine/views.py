"""What a shard shows of itself: frozen values, made under the engine's lock and read without it.

Status and metrics are read on the event loop while socket threads change clocks, members and
counters. So nothing outside of the lock looks at a state machine: `Engine.status` and
`Engine.figures` copy what is shown, and their readers see one moment of the shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from psserver.decisions.shard import Job, Shard
from psserver.decisions.table import Table
from psserver.engine.counters import Tally
from psserver.engine.waits import Waits


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of the metrics page."""

    tally: Tally  # A copy.
    live: dict[str, int]  # Live workers, by the name of the job.


def figures_of(shard: Shard, tally: Tally) -> Figures:
    """Returns a copy of the numbers; called under the lock."""
    live = {job.name: len(job.membership.live()) for job in shard.jobs.values()}
    tally.keep({name for name, count in live.items() if count})
    return Figures(tally=tally.copy(), live=live)


def view_of(job: Job, waits: Waits, now_s: float) -> JobView:
    """Returns a job as it is at this moment; called under the lock."""
    counters = job.counters
    return JobView(
        name=job.name,
        num_workers=job.membership.num_workers,
        min_workers=job.membership.min_workers,
        workers=_workers(job, now_s),
        tables=tuple(_table(job, table, waits) for table in job.tables.values()),
        num_pushes=counters.num_pushes,
        num_updates=counters.num_updates,
        pushed_nbytes=counters.pushed_nbytes,
        pulled_nbytes=counters.pulled_nbytes,
        waiting_for=tuple(waits.others_of(job)),
        state=job.state.value,
        step=job.step,
        memory_nbytes=job.memory_nbytes,
    )


def _workers(job: Job, now_s: float) -> tuple[WorkerView, ...]:
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
        )
        for _, member in sorted(job.membership.members.items())
    )


def _table(job: Job, table: Table, waits: Waits) -> TableView:
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
        waiting_for=waits.of_table(job, table),
        fingerprint=table.layout.fingerprint,
    )
