"""Absences that a worker had announced: it takes part again, or all are ready for a change."""

from __future__ import annotations

from psserver.decisions import mode_switch
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
        job.recorder.note_table(job.job.table(index))
        for queue in job.tables[index].queues.values():
            queue.submit([CountBefore(minibatch)])


def may_change(engine: Engine, job: RunningJob, index: int, rank: int) -> bool:
    """Returns whether every worker has stepped aside for the change that one asks for."""
    with engine.lock:
        return not mode_switch.missing(job.job, job.job.table(index), rank)
