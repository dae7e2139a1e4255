"""What one table of a job is on a shard: the declaration, and this shard's slices."""

from __future__ import annotations

from dataclasses import dataclass, field

from pscore.errors import RemoteProtocolError
from pscore.estimate import ESTIMATE_ARRAYS
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import SliceSpec
from psserver.decisions.participants import ChangeId, TableParticipants
from psserver.decisions.slice_clock import SliceClock

SUMS_MAX = 2  # Open sums of a slice that are provided for; more are rare and do not last.


@dataclass(slots=True, kw_only=True)
class Table:
    """Tensors under one rule, and this shard's slices of them."""

    index: int
    spec: TableSpec
    layout: Layout
    optimizer: Optimizer
    specs: dict[int, SliceSpec]
    clocks: dict[int, SliceClock]
    participants: TableParticipants
    # The newest change of the mode that each worker has made, by rank.
    changed: dict[int, ChangeId] = field(default_factory=dict)
    epoch: int = 0  # Changes so far.
    former: Rule | None = None  # Before the last one.
    is_kept: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of this shard's slices."""
        return sum(4 * spec.numel for spec in self.specs.values())

    @property
    def memory_nbytes(self) -> int:
        """Bytes that they take."""
        return self.memory_under(self.spec.rule)

    def memory_under(self, rule: Rule) -> int:
        """Returns those, if the table had that mode."""
        num, estimated = len(self.optimizer.state_names), not self.spec.pull_compressor.is_raw
        return self.nbytes * num_arrays(rule, num, is_kept=self.is_kept, is_estimated=estimated)

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
    def has_weights(self) -> bool:
        """Whether all slices have weights."""
        return all(clock.version >= 0 for clock in self.clocks.values())

    def begin_again(self) -> None:
        """Begins another life of the job, whose workers were all lost."""
        self.participants.aside.clear()
        for clock in self.clocks.values():
            clock.begin_again()

    def clock(self, index: int) -> SliceClock:
        """Returns the clock of a slice.

        Raises:
            RemoteProtocolError: The slice lives on another shard, or nowhere.
        """
        if index not in self.clocks:
            owned = f"{len(self.layout.slices)} slices in all, {len(self.clocks)} of them here"
            raise RemoteProtocolError(f"slice {index} of {self.spec.name!r} is not here ({owned})")
        return self.clocks[index]


def num_changing(rule: Rule, num_state: int, *, is_kept: bool) -> int:
    """Returns the arrays, each as long as the weights, that a table needs for state and sums.

    Args:
        rule: The table's mode: each open step has a sum.
        num_state: Arrays of the optimizer's state.
        is_kept: Whether the table outlives the process: then no array is written in place.
    """
    sums = min(rule.steps_open(), SUMS_MAX) if rule.by_step else 1
    return (num_state + sums) * (2 if is_kept else 1)


def num_arrays(rule: Rule, num_state: int, *, is_kept: bool, is_estimated: bool) -> int:
    """Returns all arrays, each as long as the weights, that a table needs.

    Args:
        rule: The table's mode.
        num_state: Arrays of the optimizer's state.
        is_kept: Whether the table outlives the process.
        is_estimated: Whether pulls are compressed.
    """
    estimates = ESTIMATE_ARRAYS if is_estimated else 0
    return 2 + num_changing(rule, num_state, is_kept=is_kept) + estimates
