"""How long a worker continues where it does not reach another worker or the first shard."""

from __future__ import annotations


def silence_limit_s(own: int, other: int, lease_s: float, limit_s: float) -> float:
    """Returns the seconds without an answer of worker `other` after which worker `own` ends.

    Of two workers that do not reach each other, the one of the higher rank ends first. The other
    one learns that: a worker that has ended is known as lost a lease later, and to all at their
    heartbeats.

    Args:
        own: Rank of this worker, which depends on the answer.
        other: Rank of the silent worker.
        limit_s: Longest wait of a call, PACELINE_TIMEOUT_S.
    """
    first_s = lease_s + limit_s
    return first_s if own > other else 2 * (first_s + lease_s)


def has_no_end(waited_s: float, silent_s: float, lease_s: float, limit_s: float) -> bool:
    """Returns whether a wait for another worker must fail: nobody would tell that it is gone.

    Args:
        silent_s: Seconds since the first shard, which tells who is lost, has answered.
        limit_s: Longest wait of a call, PACELINE_TIMEOUT_S.
    """
    return min(waited_s, silent_s) >= lease_s + limit_s


def is_cut_off(silent_s: float, lease_s: float, num_reached: int, min_workers: int) -> bool:
    """Returns whether a worker must wait for the first shard before its next step.

    The shard has been silent for a lease, so it may have declared this worker lost. If it is only
    down, the workers continue among themselves; but a part of an elastic job with fewer workers
    than its least stops, as it would where the shard is reached.

    Args:
        silent_s: Seconds since the first shard has answered.
        num_reached: Number of other workers to which there is a connection.
        min_workers: Least number of workers of the job; 0: it is not elastic.
    """
    return silent_s > lease_s and num_reached + 1 < min_workers
