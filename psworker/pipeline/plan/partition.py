"""The partition of a chain of layers into stages, and of the workers among them: exact.

The dynamic programme of Deepak Narayanan, Aaron Harlap et al., "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, section 3.1, over a cost of section 3's form:

    A(i..j, m) = min( T(i..j, m),  min over c, m' of max( A(i..c, m - m'), T(c+1..j, m') ) )

T is the time of one stage with m replicas, A that of the best pipeline of layers i..j on m workers:
its slowest stage. On machines of several workers a level of its own holds for each kind of link:
a replica of a stage of the outer level is then a pipeline of the inner one (`A` of that level takes
the place of the computing in `T`).

Differs from the paper: bytes of an edge are charged to the links of both its stages, and the memory
limit uses the exact number of minibatches in flight, which depends on the workers before a stage;
layers without parameters are no stage of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from psworker.pipeline.plan.costs import Cost, StageLoad
from psworker.pipeline.plan.profile import Layer, sums

LESS = 1 - 1e-9  # A time must be shorter by this factor to be worth another stage.


@dataclass(frozen=True, slots=True)
class Level:
    """Workers, or machines of the level below, behind links of one kind."""

    units: int
    bandwidth: float  # Bytes per second, in each direction of a unit's link.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers `first` to `last`, both in it, on `replicas` workers."""

    first: int
    last: int
    replicas: int
    in_flight: int  # Minibatches between their forward and their backward on one replica.
    memory_nbytes: int  # Bytes of one replica.


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in order, and the seconds between two minibatches of the slowest one."""

    stages: tuple[Stage, ...]
    seconds: float

    @property
    def name(self) -> str:
        """The numbers of replicas, as in `3-1`."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def workers(self) -> int:
        """Workers of all stages; others stay idle."""
        return sum(stage.replicas for stage in self.stages)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of a worker's memory, and the optimizer's part in it."""

    limit_nbytes: float = math.inf
    num_state: int = 0  # Arrays of the optimizer, as long as the parameters.

    def stage_nbytes(self, weights: float, held: float, versions: int, replicas: int) -> int:
        """Returns the bytes of a stage's replica.

        One weight version and the activations of each minibatch in flight, one gradient, and the
        optimizer's state. The optimizer of a replicated stage runs on the shards: in place of its
        state there is the gradient that travels, and beside several versions the weights that a
        pull brings.

        Args:
            weights: Bytes of its parameters.
            held: Bytes of activations of one minibatch.
            versions: Minibatches in flight.
            replicas: Its workers.
        """
        others = 1 + self.num_state if replicas == 1 else 2 + (versions > 1)
        return int(versions * (weights + held) + others * weights)


def in_flight(before: int, replicas: int, workers: int) -> int:
    """Returns the weight versions of a stage: minibatches in flight on one of its replicas.

    Args:
        before: Workers of all stages before it.
        replicas: Its own workers.
        workers: Workers of all stages.
    """
    return (workers - 1 - before) // replicas + 1


@dataclass(frozen=True, slots=True)
class _Cell:
    """The best pipeline of layers first..j on m units; `cut` is the last layer before its end."""

    seconds: float
    cut: int = -1  # -1: it is one stage.
    units: int = 0  # Units of its last stage.


# Where a pipeline is: level of the links between its stages, its first layer, how often the outer
# levels replicate it, and workers of the stages before it.
_Place = tuple[int, int, int, int]
# Cells by last layer and units, where the last stage sends its output on this level, and not.
_Cells = list[list[_Cell]]
_Table = tuple[_Cells, _Cells]
_NEVER = _Cell(math.inf)


class Partitioner:
    """Finds the fastest pipeline of a chain of layers that fits into memory."""

    def __init__(
        self,
        layers: Sequence[Layer],
        levels: Sequence[Level],
        cost: Cost,
        memory: MemoryLimit | None = None,
    ) -> None:
        """Prepares the sums of the layers.

        Args:
            levels: Workers of a machine first, then machines.
            memory: Memory of a worker; None: no limit.
        """
        self._layers = layers
        self._levels = levels
        self._cost = cost
        self._memory = memory or MemoryLimit()
        self._compute = sums([layer.compute_s for layer in layers])
        self._updates = sums([layer.update_s for layer in layers])
        self._weights = sums([layer.parameter_nbytes for layer in layers])
        self._held = sums([layer.held_nbytes for layer in layers])
        # Workers in one unit of each level.
        self._inside = [math.prod(level.units for level in levels[:k]) for k in range(len(levels))]
        self._workers = math.prod(level.units for level in levels)
        self._tables: dict[_Place, _Table] = {}
        # Seconds of stages: each is compared behind every number of units before it.
        self._known_s: dict[tuple[int, int, int, int, bool, bool], float] = {}

    def on(self, units: int) -> Partitioner:
        """Returns the partitioner of fewer units of the outer level.

        Without a memory limit it has the tables of this one: the best pipelines on few units do
        not depend on how many there are.
        """
        outer = Level(units, self._levels[-1].bandwidth)
        levels = [*self._levels[:-1], outer]
        if self._memory.limit_nbytes < math.inf:
            return Partitioner(self._layers, levels, self._cost, self._memory)
        self._table((len(levels) - 1, 0, 1, 0))
        clone = copy.copy(self)
        clone._levels = levels
        clone._workers = math.prod(level.units for level in levels)
        return clone

    def best(self) -> Partition | None:
        """Returns the fastest partition, of fewest stages among equals; None: nothing fits."""
        top, last = len(self._levels) - 1, len(self._layers) - 1
        cell = self._table((top, 0, 1, 0))[1][last][self._levels[top].units]
        return self._partition(cell)

    def best_pipeline(self) -> Partition | None:
        """Returns the fastest partition of two stages or more on the outer level."""
        top, last = len(self._levels) - 1, len(self._layers) - 1
        place, units = (top, 0, 1, 0), self._levels[top].units
        sends = self._table(place)[0]
        return self._partition(self._split(place, sends, last, units, _NEVER, is_last=True))

    def data_parallel(self) -> tuple[float, Stage]:
        """Returns the seconds of one stage on all workers, and that stage, without a limit."""
        alone = self._updates[-1] if self._workers == 1 else 0.0
        seconds, units = self._compute[-1] + alone, 1
        for level in self._levels:
            units *= level.units
            seconds = self._cost.stage_s(
                self._load(0, len(self._layers) - 1, level, level.units, seconds)
            )
        return seconds, self._stage(0, len(self._layers) - 1, units, 0)

    def load(self, stage: Stage) -> StageLoad:
        """Returns the load of a stage of a partition, over the outer links."""
        first, last = stage.first, stage.last
        load = self._load(
            first,
            last,
            self._levels[-1],
            stage.replicas,
            self._compute[last + 1] - self._compute[first],
            is_first=first == 0,
            is_last=last + 1 == len(self._layers),
        )
        return replace(load, update_s=self._updates[last + 1] - self._updates[first])

    # ----- the programme

    def _table(self, place: _Place) -> _Table:
        """Returns the best pipelines of layers, by last layer and units."""
        if math.isinf(self._memory.limit_nbytes):
            place = (*place[:2], 1, 0)  # Only the memory depends on the other workers.
        if place not in self._tables:
            self._tables[place] = self._fill(place)
        return self._tables[place]

    def _fill(self, place: _Place) -> _Table:
        level, first, _, _ = place
        most = self._levels[level].units
        sends, ends = ([[_NEVER] * (most + 1) for _ in self._layers] for _ in range(2))
        for last in range(first, len(self._layers)):
            for units in range(1, most + 1):
                for cells, is_last in ((sends, False), (ends, True)):
                    seconds = self._stage_s(place, last, units, is_first=True, is_last=is_last)
                    cells[last][units] = self._split(
                        place, sends, last, units, _Cell(seconds, -1, units), is_last=is_last
                    )
        return sends, ends

    def _split(
        self, place: _Place, sends: _Cells, last: int, units: int, cell: _Cell, *, is_last: bool
    ) -> _Cell:
        """Returns the best pipeline that ends with a stage of its own, if it is beyond `cell`."""
        level, first, outer, before = place
        for cut in range(first, last):
            row = sends[cut]
            limit_s = cell.seconds * LESS
            for own in range(1, units):
                former_s = row[units - own].seconds
                if former_s >= limit_s:
                    continue
                ahead = before + outer * (units - own) * self._inside[level]
                own_s = self._stage_s(
                    (level, cut + 1, outer, ahead), last, own, is_first=False, is_last=is_last
                )
                seconds = max(former_s, own_s)
                if seconds < limit_s:
                    cell = _Cell(seconds, cut, own)
                    limit_s = cell.seconds * LESS
        return cell

    def _stage_s(
        self, place: _Place, last: int, units: int, *, is_first: bool, is_last: bool
    ) -> float:
        """Returns the seconds of one stage; infinite if it has no parameters or is too large."""
        key = place[0], place[1], last, units, is_first, is_last
        seconds = self._known_s.get(key)
        if seconds is None:
            seconds = self._new_stage_s(place, last, units, is_first=is_first, is_last=is_last)
            if math.isinf(self._memory.limit_nbytes):  # Else it depends on the units before it.
                self._known_s[key] = seconds
        return seconds

    def _new_stage_s(
        self, place: _Place, last: int, units: int, *, is_first: bool, is_last: bool
    ) -> float:
        level, first, outer, before = place
        if level:
            inner = self._table((level - 1, first, outer * units, before))[1]
            inner_s = inner[last][self._levels[level - 1].units].seconds
        else:
            inner_s = self._compute[last + 1] - self._compute[first]
            if not self._trains(first, last) or not self._fits(first, last, outer * units, before):
                return math.inf
        if math.isinf(inner_s):
            return math.inf
        load = self._load(
            first, last, self._levels[level], units, inner_s, is_first=is_first, is_last=is_last
        )
        if not level:  # Else it is in the seconds of the level below.
            load = replace(load, update_s=self._updates[last + 1] - self._updates[first])
        return self._cost.stage_s(load)

    def _load(
        self,
        first: int,
        last: int,
        level: Level,
        units: int,
        inner_s: float,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> StageLoad:
        return StageLoad(
            inner_s=inner_s,
            parameter_nbytes=self._weights[last + 1] - self._weights[first],
            input_nbytes=0 if is_first else self._layers[first - 1].output_nbytes,
            output_nbytes=0 if is_last else self._layers[last].output_nbytes,
            replicas=units,
            bandwidth=level.bandwidth,
        )

    def _trains(self, first: int, last: int) -> bool:
        """Returns whether a stage has parameters; `psworker.Pipeline` refuses one without.

        The whole chain is one stage in any case: data parallelism.
        """
        is_whole = first == 0 and last + 1 == len(self._layers)
        return is_whole or self._weights[last + 1] > self._weights[first]

    def _fits(self, first: int, last: int, replicas: int, before: int) -> bool:
        if math.isinf(self._memory.limit_nbytes):
            return True
        stage = self._stage(first, last, replicas, before)
        return stage.memory_nbytes <= self._memory.limit_nbytes

    def _stage(self, first: int, last: int, replicas: int, before: int) -> Stage:
        versions = in_flight(before, replicas, self._workers)
        return Stage(
            first=first,
            last=last,
            replicas=replicas,
            in_flight=versions,
            memory_nbytes=self._memory.stage_nbytes(
                self._weights[last + 1] - self._weights[first],
                self._held[last + 1] - self._held[first],
                versions,
                replicas,
            ),
        )

    # ----- the way back

    def _partition(self, cell: _Cell) -> Partition | None:
        """Returns the partition behind the last cell of the outer level."""
        if math.isinf(cell.seconds):
            return None
        top = len(self._levels) - 1
        stages = self._stages((top, 0, 1, 0), cell, len(self._layers) - 1, self._levels[top].units)
        return Partition(tuple(stages), cell.seconds)

    def _stages(self, place: _Place, cell: _Cell, last: int, units: int) -> list[Stage]:
        """Returns the stages of a cell, and of the pipelines inside them."""
        level, first, outer, before = place
        stages: list[Stage] = []
        while True:
            start = first if cell.cut < 0 else cell.cut + 1
            ahead = before + outer * (units - cell.units) * self._inside[level]
            stages = self._inner_stages((level, start, outer * cell.units, ahead), last) + stages
            if cell.cut < 0:
                return stages
            last, units = cell.cut, units - cell.units
            cell = self._table(place)[0][last][units]

    def _inner_stages(self, place: _Place, last: int) -> list[Stage]:
        level, first, replicas, before = place
        if level == 0:
            return [self._stage(first, last, replicas, before)]
        inner, units = (level - 1, first, replicas, before), self._levels[level - 1].units
        return self._stages(inner, self._table(inner)[1][last][units], last, units)


def with_idle(
    layers: Sequence[Layer],
    levels: Sequence[Level],
    cost: Cost,
    memory: MemoryLimit | None = None,
    *,
    is_cut: bool = False,
) -> Partition | None:
    """Returns the fastest partition on at most the given units of the outer level, of fewest units.

    Slow links can make a worker more cost more than it brings: it stays idle.

    Args:
        levels: Workers of a machine first, then machines.
        memory: Memory of a worker; None: no limit.
        is_cut: Whether there must be two stages or more.
    """
    fastest: Partition | None = None
    whole = Partitioner(layers, levels, cost, memory)
    for units in range(1, levels[-1].units + 1):
        partitioner = whole.on(units)
        pipeline = partitioner.best_pipeline() if is_cut else partitioner.best()
        if pipeline and (fastest is None or pipeline.seconds < fastest.seconds * LESS):
            fastest = pipeline
    return fastest
