"""The change of a table's mode: the workers that have stepped aside, and its conditions."""

from __future__ import annotations

from dataclasses import replace

from pscore.errors import ConfigError, JobMismatchError, RemoteProtocolError
from pscore.json_text import COUNT_MAX
from pscore.rules.base import Rule, require_sizes, require_slices
from pscore.types import Origin
from psserver.decisions.job import Job
from psserver.decisions.participants import ChangeId
from psserver.decisions.table import Table


def set_aside(table: Table, rank: int, change: ChangeId) -> bool:
    """Records that a worker waits for a change; False for a repeated message that came late.

    Raises:
        RemoteProtocolError: Its step is out of range.
    """
    if change[-1] > COUNT_MAX:
        raise RemoteProtocolError(f"worker {rank} is at step {change[-1]}, beyond {COUNT_MAX}")
    known = table.changed.get(rank, ())
    if change[:1] == known[:1] and change <= known:
        return False
    table.participants.aside[rank] = change
    return True


def come_back(table: Table, rank: int, change: ChangeId, minibatch: int) -> None:
    """Records that a worker which had stepped aside takes part again, in the same mode.

    Args:
        change: Its incarnation, and the number under which it has stepped aside.
        minibatch: All minibatches before it are in the weights.

    Raises:
        RemoteProtocolError: The number of the minibatch is out of range.
    """
    if minibatch > COUNT_MAX:
        raise RemoteProtocolError(f"worker {rank} is at minibatch {minibatch}, beyond {COUNT_MAX}")
    if table.participants.aside.get(rank, ())[: len(change)] == change:
        table.changed[rank] = table.participants.aside.pop(rank)
        for clock in table.clocks.values():
            clock.welcome(rank)  # No step waits for it until it pulls.
            clock.minibatches.add_before(minibatch)


def missing(job: Job, table: Table) -> list[int]:
    """Returns the workers that have not stepped aside for a change of a table's mode."""
    return [who for who in job.membership.expected() if who not in table.participants.aside]


def is_done(job: Job, table: Table, rank: int, rule: Rule) -> bool:
    """Returns whether an earlier worker has made the change that this worker asks for.

    Raises:
        JobMismatchError: The earlier worker named another mode.
    """
    if rank in table.participants.aside:
        return False
    if str(rule) != str(table.spec.rule):
        raise JobMismatchError(
            f"job {job.name!r}: this worker changes the mode to {rule}, another one to "
            f"{table.spec.rule} in the job"
        )
    return True


def require_possible(job: Job, table: Table, rule: Rule) -> None:
    """Checks that a table can change to a mode.

    Raises:
        ConfigError: The mode's arguments do not fit the job, or its updates the optimizer.
    """
    if rule.outer_optimizer != table.spec.rule.outer_optimizer:
        raise ConfigError(
            f"{table.spec.rule} cannot become {rule} while it runs: the shards run another "
            "optimizer then"
        )
    table.spec.content.require_rule(rule)
    require_sizes(rule, job.membership.num_workers, job.membership.min_workers)
    require_slices(rule, len(table.layout.slices))


def require_met(job: Job, table: Table, rule: Rule) -> None:
    """Raises RemoteProtocolError unless all workers have stepped aside for a mode."""
    if others := missing(job, table):
        raise RemoteProtocolError(
            f"job {job.name!r}: the mode is to be changed to {rule}, but "
            f"{job.membership.describe(others[0])} has not stepped aside for it"
        )


def switch(table: Table, rule: Rule) -> None:
    """Records a change that its clocks have made; all workers continue from its newest version."""
    aside = table.participants.aside
    table.changed |= aside
    table.former, table.epoch = table.spec.rule, table.epoch + 1
    # All continue from the newest version, and from the largest step of any worker.
    clock = max((max(clock.version, 0) for clock in table.clocks.values()), default=0)
    step = max((step for *_, step in filter(None, aside.values())), default=0)
    table.spec = replace(table.spec, rule=rule, origin=Origin(clock, step))
    aside.clear()
