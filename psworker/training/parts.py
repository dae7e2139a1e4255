"""The slices of a table that each process of a group pushes and pulls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pscore.errors import ConfigError
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Rule
from psworker.connection.membership.session import Session
from psworker.group.routes import Routes
from psworker.group.worker_group import WorkerGroup
from psworker.model.flat import FlatModel
from psworker.model.sharded import ShardedModel
from psworker.replica.replica import Replica


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Returns the local rank that owns each slice: each rank has a contiguous part.

    The parts are as equal as whole slices allow.

    Args:
        numels: Elements of each slice, in the order of the flat vector.
    """
    total, before, ranks = sum(numels), 0, []
    for numel in numels:
        middle = before + numel / 2  # The owner of a slice's middle has the slice.
        ranks.append(min(size - 1, int(middle * size / total)))
        before += numel
    return ranks


def own_slices(
    layout: Layout, group: WorkerGroup, routes: Routes | None
) -> tuple[list[int], Layout]:
    """Returns the slices that this process pushes and pulls, and where they lie in its memory.

    Args:
        routes: The parts of a sharded model; None: each process has the whole model.
    """
    if routes is not None:
        return routes.own, routes.memory
    ranks = owners([spec.numel for spec in layout.slices], group.size)
    return [index for index, rank in enumerate(ranks) if rank == group.rank], layout


def refuse_in_group(rule: Rule, optimizer: Optimizer, group: WorkerGroup) -> None:
    """Refuses modes and optimizers that several processes of one worker do not run.

    Raises:
        ConfigError: The mode is decentralised, or the shards do not run the optimizer.
    """
    if group.is_alone:
        return
    if rule.gossip:
        what = f"in mode {rule} workers send their weights to each other"
    elif rule.schedule is not None and rule.schedule.number > 1:
        what = f"{rule.name}.fragments is {rule.schedule.number}: their rounds end in turn"
    elif rule.schedule is not None and rule.schedule.least:
        what = f"{rule.name}.steps_min is not 0: each would have a speed of its own"
    elif not optimizer.holds_weights:
        what = "the shards do not run this optimizer, so each worker would"
    else:
        return
    raise ConfigError(
        f"{what}, which the {group.size} processes of a local group cannot do together; pass "
        "local_group=None to DistributedOptimizer"
    )


class Parts:
    """The parts of one table in the processes of a group; of one process it is the whole table.

    Attributes:
        owners: Local rank of the process that pushes and pulls each slice.
        own: The slices of this process.
        uploads: Whether this process uploads the first weights.
        may_upload: Whether it does so if all workers of lower ranks have left.
        uploaded: The slices that it uploads then; maybe none.
    """

    def __init__(self, layout: Layout, flat: FlatModel, replica: Replica, session: Session) -> None:
        """Divides a table.

        Args:
            replica: The replica of this process, with the slices of `own_slices`.
        """
        group = session.group
        lengths = [spec.numel for spec in layout.slices]
        self.owners = owners(lengths, group.size)
        self.own = replica.own
        self.may_upload = group.is_leader
        self.uploaded: Sequence[int] = range(len(lengths))
        if isinstance(flat, ShardedModel):
            self.owners = flat.routes.owners
            self.may_upload, self.uploaded = True, self.own
        self.uploads = self.may_upload and session.rank == 0
        self._layout = layout
        self._flat = flat
        self._replica = replica
        self._group = group

    def first_push(self) -> int:
        """Returns the newest step that a slice of any process expects next, at a begin."""
        return int(self._group.largest(self._replica.clocks.first_push()))

    @property
    def next_push(self) -> float:
        """Step of the next push in this process's slices; infinite where it has none."""
        return self._replica.clocks.next_of_all() if self.own else math.inf

    def agree(self, pushes: Sequence[float] | None = None) -> None:
        """Makes every process of the group continue with the same push.

        Args:
            pushes: `next_push` of each process; None: they are gathered here.
        """
        if self._group.is_alone:
            return
        if pushes is None:
            self._replica.clocks.limit = None
            pushes = [given for (given,) in self._group.gather([self.next_push])]
        self._replica.clocks.limit = int(min(pushes))

    def gather(self) -> None:
        """Brings the slices of the group's other processes into the flat weights.

        Raises:
            GroupError: A process of the group has ended.
        """
        if self._group.is_alone or self._flat.is_sharded:  # Then `scatter_weights` does it.
            return
        weights, slices = self._flat.weights, self._layout.slices
        self._group.share([weights[spec.start : spec.stop] for spec in slices], self.owners)
        self._replica.round.follow(self._replica.own)
