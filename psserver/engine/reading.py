"""Reads a shard for its status and its metrics: copies of one moment, made under the lock."""

from __future__ import annotations

from dataclasses import asdict

from psserver.decisions.shard import Job
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob, RunningTable
from psserver.engine.views import Figures, JobView, RoundView, ShardView, TableView, WorkerView
from psserver.engine.waits import Waits


def status(engine: Engine) -> ShardView:
    """Returns the shard and its jobs as they are at this moment."""
    with engine.lock:
        now_s = engine.now()
        return ShardView(
            jobs=tuple(_job(job, now_s) for job in engine.jobs.values()),
            lost=tuple(engine.shard.lifetimes.lost.values()),
            under_way_nbytes=engine.budget.nbytes - engine.budget.left,
            num_recoveries=engine.recovery.num_recoveries,
            num_mended=engine.num_mended,
            copies=engine.copies,
        )


def figures(engine: Engine) -> Figures:
    """Returns the numbers of the metrics page, all of one moment."""
    with engine.lock:
        engine.counters.settle()
        live = {job.name: len(job.membership.live()) for job in engine.shard.jobs.values()}
        engine.counters.keep({name for name, count in live.items() if count})
        return Figures(counters=engine.counters.copy(), live=live, shard=status(engine))


def _job(running: RunningJob, now_s: float) -> JobView:
    job, waits, saves = running.job, running.waits, running.saves
    exposed = running.exposed
    return JobView(
        **asdict(job.counters),
        name=job.name,
        num_workers=job.membership.num_workers,
        min_workers=job.membership.min_workers,
        workers=_workers(job, waits, now_s),
        tables=tuple(
            _table(table, waits, exposed.get(index, 0)) for index, table in running.tables.items()
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


def _table(running: RunningTable, waits: Waits, num_exposed: int) -> TableView:
    table = running.table
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
        held=running.count_held(),
        lead=table.spec.origin.clock - table.spec.origin.step,
        on_workers=table.spec.is_held,
    )
