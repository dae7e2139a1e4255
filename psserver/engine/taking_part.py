"""Absences that workers have announced: one takes part again, or all have met for a change."""

from __future__ import annotations

from collections.abc import Iterable

from psserver.decisions import mode_switch
from psserver.decisions.membership import Member
from psserver.decisions.participants import ChangeId
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob
from psserver.engine.slice_queue import CountBefore


def come_back(
    engine: Engine, job: RunningJob, index: int, rank: int, change: ChangeId, minibatch: int
) -> None:
    """Records that a worker takes part again, and counts all minibatches before one.

    Args:
        change: Its incarnation, and the number under which it has stepped aside.
        minibatch: The first minibatch that is not in the weights.

    Raises:
        RemoteProtocolError: The number of the minibatch is out of range.
    """
    with engine.lock:
        mode_switch.come_back(job.job.table(index), rank, change, minibatch)
        job.job.barriers.holds = False  # Nobody changes the job any more.
        job.recorder.note_table(job.job.table(index))
        for queue in job.tables[index].queues.values():
            queue.submit([CountBefore(minibatch)])


def part_with_absent(
    engine: Engine, job: RunningJob, index: int, rank: int, change: ChangeId
) -> None:
    """Declares the workers lost that have not stepped aside for the change that one asks for.

    On the first shard all workers of the job have met behind their absence: the lease of another
    one is over there, only not here yet.

    Args:
        change: The incarnation of the worker that asks, and the number of its absence.
    """
    with engine.lock:
        table, members = job.job.table(index), job.job.membership.members
        if not engine.shard.index or table.participants.aside.get(rank, ())[:2] != change:
            return
        for absent in mode_switch.missing(job.job, table):
            if absent in members:
                own = members[absent].incarnation
                engine.leave(job.job.name, absent, own, "was lost on the first shard", failed=True)


def part_with_late(
    engine: Engine, job: RunningJob, name: str, rank: int, others: Iterable[int]
) -> None:
    """Declares workers lost that came late, and wait behind a change of the job for one of it.

    They join again once the workers of the change have met, and know all of it.

    Args:
        name: Name of the barrier at which the workers of the change meet.
        rank: One of those; the others wait for its step.
    """
    with engine.lock:
        barrier = job.job.barriers.by_name.get(name)
        for late in _later(job, rank, others):
            if barrier is None or late.rank not in barrier.arrived:
                reason = f"it began behind {name}, at which others wait"
                engine.leave(job.job.name, late.rank, late.incarnation, reason, failed=True)


def begin_without(
    engine: Engine, job: RunningJob, name: str, rank: int, others: Iterable[int]
) -> None:
    """Begins rounds of a tensor without workers that came late, and wait for one in them.

    Args:
        name: Name of the tensor's table.
        rank: The worker that waits for the tensor; the others wait for its step.
    """
    with engine.lock:
        tables = [job.job.tables[name]] if name in job.job.tables else []
        clocks = [clock for table in tables for clock in table.clocks.values()]
        for late in _later(job, rank, others):
            for clock in clocks:
                clock.excuse(late.rank)
        engine.requests.execute(job, engine.shard.recheck(job.job))


def _later(job: RunningJob, rank: int, others: Iterable[int]) -> list[Member]:
    """Returns those of some workers that came late, and after another one."""
    members = job.job.membership.members
    found = (members[other] for other in others if other in members)
    return [one for one in found if one.came_late and one.joined_s > members[rank].joined_s]
