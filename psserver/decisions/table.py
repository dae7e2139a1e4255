"""One table of a job on one shard: the declaration, and this shard's slices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pscore.content import Stepping
from pscore.errors import ConfigError, RemoteProtocolError
from pscore.partition import Layout
from pscore.rules.base import Rule, require_sizes, require_slices
from pscore.table_names import LEFT_FOR_GOOD
from pscore.table_spec import TableSpec
from pscore.timing.memory import num_arrays
from pscore.types import SliceSpec
from psserver.decisions.membership import Membership, first_of
from psserver.decisions.participants import ChangeId, TableParticipants
from psserver.decisions.slice_clock import SliceClock

GROUPS_MAX = 1024
NAMED_MAX = 4  # Workers named in one message.


@dataclass(slots=True, kw_only=True)
class Table:
    """Tensors under one rule, and this shard's slices of them."""

    index: int  # In its job. Invariant: never changes.
    spec: TableSpec  # The declaration. Invariant: its rule is that of every clock.
    layout: Layout  # All slices of the table, on all shards.
    optimizer: Stepping
    specs: dict[int, SliceSpec]  # This shard's slices, by index.
    clocks: dict[int, SliceClock]  # Invariant: one for each of `specs`.
    participants: TableParticipants  # The workers that its steps wait for.
    # The newest change of the mode that each worker has made, by rank.
    changed: dict[int, ChangeId] = field(default_factory=dict)
    epoch: int = 0  # Changes of the mode so far. Invariant: 0 exactly if there is no `former`.
    former: Rule | None = None  # The mode before the last change.
    is_kept: bool = False  # Whether the table outlives the process.

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of this shard's slices."""
        return self.spec.content.weights_nbytes(list(self.specs.values()), self.layout)

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory that these slices need."""
        return self.memory_under(self.spec.rule)

    def memory_under(self, rule: Rule) -> int:
        """Returns the bytes of memory that the slices would need under another mode."""
        num, estimated = len(self.optimizer.state_names), not self.spec.pull_compressor.is_raw
        arrays = num_arrays(rule, num, is_kept=self.is_kept, is_estimated=estimated)
        parts = list(self.specs.values())
        return self.spec.content.memory_nbytes(parts, self.layout, self.optimizer, arrays)

    @property
    def step(self) -> int:
        """The newest step of any slice: an update, or in an asynchronous mode a worker's push."""
        if self.spec.rule.by_step:
            steps = [clock.version for clock in self.clocks.values()]
        else:
            of_all = [clock.counted.values() for clock in self.clocks.values()]
            steps = [counted.clock for each in of_all for counted in each]
        return max(0, *steps, 0)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds that have ended of each fragment, if there are several; -1: none is here."""
        schedule = self.spec.rule.schedule
        if schedule is None or schedule.number == 1:
            return ()
        ended: dict[int, int] = {}
        fragments = schedule.assign([part.numel for part in self.layout.slices])
        for index, clock in self.clocks.items():
            fragment = fragments[index]
            ended[fragment] = min(clock.version, ended.get(fragment, clock.version))
        return tuple(ended.get(fragment, -1) for fragment in range(schedule.number))

    @property
    def minibatches(self) -> int:
        """The first minibatch that some slice has not counted, of pushes that name theirs."""
        return min((clock.minibatches.clock for clock in self.clocks.values()), default=0)

    @property
    def has_weights(self) -> bool:
        """Whether all slices have weights."""
        return all(clock.version >= 0 for clock in self.clocks.values())

    @property
    def has_pushes(self) -> bool:
        """Whether some slice has counted a push."""
        counted = [one for clock in self.clocks.values() for one in clock.counted.values()]
        return any(one.num_counted for one in counted)

    @property
    def beginning(self) -> set[int]:
        """Ranks of workers that wait to begin behind an open step (`SliceState.beginning`)."""
        return set().union(*(clock.beginning for clock in self.clocks.values()))

    @property
    def was_left(self) -> bool:
        """Whether workers have left it for the table that follows it."""
        changes = self.participants.aside.values()
        return any(change[1:2] == (LEFT_FOR_GOOD,) for change in changes)

    def begin_again(self, *, is_changing: bool) -> None:
        """Begins another life of the job, whose workers were all lost.

        Args:
            is_changing: Whether they were changing the job just then: they have not left for good
                a table whose follower may not have all of its state.
        """
        if is_changing or not self.was_left:
            self.participants.aside.clear()
        for clock in self.clocks.values():
            clock.begin_again(closes=self.optimizer.assigns)

    def waiting_for(self, index: int, membership: Membership, where: str) -> str:
        """Returns what an unanswered pull of a slice waits for, as text."""
        clock = self.clock(index)
        if clock.version < 0:
            return (
                f"the initial weights of {where}, from {membership.describe(first_of(membership))}"
            )
        if clock.is_short:
            return f"{membership.shortage()}, at {where}"
        step, ranks = clock.missing()
        who = ", ".join(membership.describe(rank) for rank in ranks[:NAMED_MAX])
        more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
        return f"step {step} of {who or 'nobody'}{more}, at {where}{self._quorum(clock)}"

    def _quorum(self, clock: SliceClock) -> str:
        """Returns how far the open round of a slice is, as text; empty without a quorum."""
        if self.spec.rule.window_s is None:
            return ""
        left_s, num_in = clock.window.left_s(max(clock.version, 0)), len(clock.ranks_in())
        if left_s is None:
            return f" ({num_in} in, which is no quorum)"
        return f" ({num_in} in, the window is over in {left_s:.2f} s)"

    def unlike(self, membership: Membership) -> str:
        """Returns which workers have pushed unlike hyper-parameters; empty: none has."""
        found = (clock.unlike for clock in self.clocks.values() if clock.unlike)
        if (pair := next(found, None)) is None:
            return ""
        one, other = pair
        assert one.hyper is not None
        assert other.hyper is not None
        group, column = np.argwhere(one.hyper != other.hyper)[0]
        name = self.optimizer.hyper_names[column]
        return (
            f"{membership.describe(other.worker)} made step {one.step} with "
            f"{name}={other.hyper[group, column]:g} in parameter group {group}, and "
            f"{membership.describe(one.worker)} with {name}={one.hyper[group, column]:g}: give all "
            "workers the same arguments and schedule"
        )

    def check_invariants(self) -> None:
        """Asserts what the comments at the fields say, for tests and the simulator."""
        assert self.clocks.keys() == self.specs.keys()
        assert (self.epoch == 0) == (self.former is None)
        for clock in self.clocks.values():
            assert clock.rule == self.spec.rule
            clock.check_invariants()

    def clock(self, index: int) -> SliceClock:
        """Returns the clock of a slice.

        Raises:
            RemoteProtocolError: The slice lives on another shard, or nowhere.
        """
        if index not in self.clocks:
            owned = f"{len(self.layout.slices)} slices in all, {len(self.clocks)} of them here"
            raise RemoteProtocolError(
                f"slice {index} of {self.spec.name!r} is not on this shard ({owned})"
            )
        return self.clocks[index]


def make_table(
    spec: TableSpec, index: int, shard: int, membership: Membership, *, is_kept: bool
) -> Table:
    """Returns a shard's part of a declared table.

    Args:
        index: Index of the table in its job.

    Raises:
        ConfigError: The declaration is not one that a shard can serve.
    """
    optimizer = spec.content.optimizer(spec.optimizer)
    spec.content.require_rule(spec.rule)
    if not 1 <= spec.num_groups <= GROUPS_MAX:
        raise ConfigError(f"{spec.num_groups} parameter groups, must be 1..{GROUPS_MAX}")
    if any(not 0 <= tensor.group < spec.num_groups for tensor in spec.tensors):
        raise ConfigError(f"a tensor is in a group beyond the {spec.num_groups} declared")
    layout = spec.layout()
    specs = {part.index: part for part in layout.of_shard(shard)}
    require_sizes(spec.rule, membership.num_workers, membership.min_workers)
    require_slices(spec.rule, len(layout.slices))
    participants = TableParticipants(membership)
    return Table(
        index=index,
        spec=spec,
        layout=layout,
        optimizer=optimizer,
        specs=specs,
        participants=participants,
        clocks={index: SliceClock(spec.rule, participants) for index in specs},
        is_kept=is_kept,
    )
