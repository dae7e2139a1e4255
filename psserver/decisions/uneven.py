"""Finds the worker that leaves out steps that others make, by their counts; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from psserver.decisions.membership import Membership


def report(membership: Membership, rank: int, left_out: Mapping[int, tuple[int, int, int]]) -> str:
    """Records how many steps a worker's script has left out, by table, and compares the workers.

    Counts are compared only when both workers are beyond the step in which the other's last
    changed: until then the one that is behind may still leave out the same step.

    Returns:
        A sentence about a worker that has left out steps that another has made; empty if none has.
    """
    membership.members[rank].left_out = dict(left_out)
    live = [membership.members[rank] for rank in membership.live()]
    for table in left_out:
        reports = [(*member.left_out[table], member) for member in live if table in member.left_out]
        if not reports:  # This worker was lost, and its heartbeat is older than that.
            continue
        _, least, least_since, other = min(reports, key=lambda one: one[1])
        steps, most, since, member = max(reports, key=lambda one: one[1])
        if most > least and steps > least_since and other.left_out[table][0] > since:
            many = "1 step" if most - least == 1 else f"{most - least} steps"
            return (
                f"{membership.describe(member.rank)} has left out {many} that "
                f"{membership.describe(other.rank)} has made, the last of them before the end of "
                f"step {since}: zero_grad() came twice without step() between"
            )
    return ""
