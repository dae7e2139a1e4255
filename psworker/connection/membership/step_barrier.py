"""Rounds of barriers that have numbers of their own, those of the steps that follow them."""

from __future__ import annotations

from psworker.connection.membership.barrier_wait import wait_at_barrier
from psworker.connection.membership.session import Session


def agree_at(session: Session, name: str, number: int, value: float) -> tuple[float, int]:
    """Waits as `Session.agree` does, in a round that has a number of its own.

    A worker that comes when the others have passed that round does not wait.

    Args:
        session: This worker's part in the job.
        name: Name of the barrier.
        number: Number of the round, at least that of the one before.
        value: This worker's value, 0 or more; in a group its leader's counts.

    Returns:
        The largest value of the round, 0 if it is no longer known; and the number of the newest
        round at which a worker has arrived.

    Raises:
        PacelineError: This worker is no longer part of the job, or the shard does not answer.
    """

    def agree() -> list[float]:
        reply = wait_at_barrier(session.links[0], session.arrival(name, number, value))
        return [reply.value, reply.newest]

    largest, newest = session.group.led(agree)
    return float(largest), int(newest)


def pass_by(session: Session, name: str, number: int, value: float) -> None:
    """Arrives at a round of a barrier, as in `agree_at`, and does not wait; in a group the leader.

    Raises:
        PacelineError: This worker is no longer part of the job, or the shard does not answer.
    """
    if session.is_leader:
        first = session.links[0]
        first.call(first.control.Barrier, session.arrival(name, number, value))
