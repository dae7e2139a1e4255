"""What one table of a job is on a shard: its declaration, and this shard's slices of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pscore.compressors import make_compressor
from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError, RemoteProtocolError
from pscore.estimate import ESTIMATE_ARRAYS, require_for_pulls
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout, first_difference
from pscore.rules import make_rule
from pscore.rules.base import Rule
from pscore.types import Origin, SliceSpec, TensorSpec
from psserver.decisions.slice_clock import SliceClock

RAW = NoCompression()
BEGIN = Origin()
COUNT_MAX = 1 << 48  # Of steps or pushes; nobody makes so many.
SUMS_MAX = 2  # Open sums of a slice that are provided for; more are rare and do not last.
# Incarnation of a worker, its number of a change of the mode, and its step of training then.
Change = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What a worker declares; every worker of the job must declare the same."""

    name: str
    tensors: tuple[TensorSpec, ...]
    num_shards: int
    rule: Rule
    compressor: Compressor
    optimizer: str
    num_groups: int
    pull_compressor: Compressor = RAW
    origin: Origin = BEGIN  # Not declared: it goes with the mode, which may change.

    def step_at(self, clock: int) -> int:
        """Returns the step of training of a worker that has pushed `clock` times."""
        return self.rule.step_after(self.origin.step, max(0, clock - self.origin.clock))

    def difference(self, theirs: TableSpec) -> str | None:
        """Returns a sentence about the first difference from the job's declaration, or None."""
        for what, mine, yours in (
            ("mode", str(self.rule), str(theirs.rule)),
            ("compression", str(self.compressor), str(theirs.compressor)),
            ("pull compression", str(self.pull_compressor), str(theirs.pull_compressor)),
            ("optimizer", self.optimizer, theirs.optimizer),
            ("number of parameter groups", str(self.num_groups), str(theirs.num_groups)),
        ):
            if mine != yours:
                return f"{what} is {mine} here and {yours} in the job"
        return first_difference(self.tensors, theirs.tensors)


@dataclass(slots=True, kw_only=True)
class Table:
    """Tensors under one rule, and this shard's slices of them."""

    index: int
    spec: TableSpec
    layout: Layout
    optimizer: Optimizer
    specs: dict[int, SliceSpec]
    clocks: dict[int, SliceClock]
    aside: dict[int, Change]  # By rank: waits for the mode to be changed, and nobody for it.
    changed: dict[int, Change] = field(default_factory=dict)  # The newest that each has made.
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
        self.aside.clear()
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


def make_spec(
    *,
    name: str,
    tensors: tuple[TensorSpec, ...],
    num_shards: int,
    rule: tuple[str, dict[str, object]],
    compressor: tuple[str, dict[str, object]],
    optimizer: str,
    num_groups: int,
    pull_compressor: tuple[str, dict[str, object]] = (RAW.name, {}),
    origin: tuple[int, int] = (0, 0),
) -> TableSpec:
    """Returns a declaration from its parts by name.

    Raises:
        ConfigError: A rule, compressor or argument is not one that there is, or not for pulls.
    """
    pulls = make_compressor(*pull_compressor)
    require_for_pulls(pulls)
    if not all(0 <= int(count) <= COUNT_MAX for count in origin):
        raise ConfigError(f"table {name!r}: steps are counted from {origin!r}, two counts wanted")
    return TableSpec(
        name=name,
        tensors=tensors,
        num_shards=num_shards,
        rule=make_rule(*rule),
        compressor=make_compressor(*compressor),
        optimizer=optimizer,
        num_groups=num_groups,
        pull_compressor=pulls,
        origin=Origin(*map(int, origin)),
    )
