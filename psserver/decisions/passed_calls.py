"""Workers that wait for each other at different places, as one of them has come late.

A worker that is started again calls what its script calls at its start: a barrier, a tensor that
all exchange. The others have passed that, and come there no more: they wait for its step. It leaves
its wait. And where the others wait at a barrier, a worker that joins now may begin with the step
behind it, and waits for their steps: they go on without it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from psserver.decisions.job import Job
from psserver.decisions.membership import Membership, Presence

EXCHANGE = "an exchange of models"


class Others(NamedTuple):
    """Workers for which one waits, and which may wait for it elsewhere."""

    # Tables and barriers at which they wait for it, but for new processes that joined after it.
    awaited_at: list[str]
    awaited_by: list[int]  # Ranks of those that wait for its step, and have joined after it.
    others_step: bool  # Whether any has made steps since it began to wait.


NOTHING = Others([], [], others_step=False)


def others_of(job: Job, rank: int, barriers: Collection[str]) -> Others:
    """Returns what the others do for which a worker waits.

    Only workers count that were heard since it began to wait: the request of a dead one may still
    be here.

    Args:
        barriers: Names of those at which workers wait now.
    """
    members, rest = job.membership.members, job.membership.resting.get(rank)
    if rest is None:
        return NOTHING
    others = {
        one for one in job.membership.live() if one != rank and members[one].heard_s > rest.since_s
    }
    steps, meetings = _waits_for_steps(job, rank), _waits_at_barriers(job, rank, barriers)
    late = {one for one in others if members[one].came_late}
    later = {one for one in late if members[one].joined_s > members[rank].joined_s}
    new = {one for one in later if not members[one].returns}  # Their scripts have just begun.
    return Others(
        awaited_at=[place for place, ranks in (steps | meetings).items() if ranks & (others - new)],
        awaited_by=sorted(later & set().union(*steps.values())),
        others_step=any(members[one].pace.num_steps > rest.num_steps.get(one, 0) for one in others),
    )


def have_ended(membership: Membership) -> bool:
    """Returns whether a worker has ended by itself, in a job whose workers do not come and go."""
    has_left = any(member.presence is Presence.LEFT for member in membership.members.values())
    return has_left and not membership.is_elastic


def _waits_for_steps(job: Job, rank: int) -> dict[str, set[int]]:
    """Returns the ranks that wait for a push or a model of a worker, by table."""
    found: dict[str, set[int]] = {}
    for table in job.tables.values():
        for clock in table.clocks.values():
            if clock.is_awaited and rank in clock.missing()[1]:
                found.setdefault(table.spec.name, set()).update(clock.waiting)
    members = job.membership.members.values()
    found[EXCHANGE] = {one.rank for one in members if rank in one.awaits}
    return found


def _waits_at_barriers(job: Job, rank: int, names: Collection[str]) -> dict[str, set[int]]:
    """Returns the ranks that wait for a worker at other barriers than it does, by barrier."""
    found = {name: job.barriers.by_name[name] for name in names}
    return {
        f"barrier {name!r}": set(barrier.arrived)
        for name, barrier in found.items()
        if not barrier.is_open and rank not in barrier.arrived
    }
