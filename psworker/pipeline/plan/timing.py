"""The time of a minibatch in a pipeline, by a run of its schedule on paper.

The cost of a stage (`costs.py`) counts each stage by itself. A real pipeline is slower: a replica
has only a few minibatches in flight, and waits while they are under way; the replicas of a stage
send at the same moments, and share the link of the worker that receives; and a mode that blocks
keeps them from computing while they push and pull. Here all of that happens, in simulated time: the
forwards and backwards of `psworker.Pipeline` in their order, and each transfer at the rate that its
links have left, shared evenly by the connections (max-min fairness).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pscore.types import HyperArray
from psworker.pipeline.plan.costs import ShardsCost
from psworker.pipeline.plan.partition import Level, MemoryLimit, Partition, Partitioner, Stage
from psworker.pipeline.plan.profile import Layer
from psworker.pipeline.run.schedule import Place
from psworker.pipeline.run.stage import ACTIVATION, GRADIENT

PAYLOAD = 0.956  # Part of a link's bytes that is not a packet's header: 1448 of 1514.
ROUNDS = 12  # Minibatches of each replica of the stage that has most, at least.
GROUPS = 6  # Times that the pipeline is filled with minibatches, at least.
PARTS = 4  # Parts of a push: a part is pulled when all replicas have pushed it.
SLOWER = (1.0, 0.5, 0.25)  # Parts of a link's bandwidth with which plans are sought.
FEW = 8  # Workers up to which every number of them is tried.
NEVER = math.inf

Message = tuple[int, int, int]  # Receiving rank, kind, minibatch.


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    left: float  # Bytes.
    links: dict[int, float]  # Part of the bytes on each link.
    shares: int  # Connections that carry it: its weight where it meets others.
    ended: Callable[[], None]  # Called at its end.
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeWait:
    """Waits for seconds of computing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Until:
    """Waits until something is there."""

    is_there: Callable[[], bool]


Script = Generator[ComputeWait | Until, None, None]


class Links:
    """Full-duplex links with flows on them; each flow gets its fair share."""

    def __init__(self, number: int, bandwidth: float) -> None:
        """Begins without flows.

        Args:
            number: Links; each has two directions, `2 * link` out and `2 * link + 1` in.
            bandwidth: Bytes per second of each direction, headers included.
        """
        self._capacity = np.full(2 * number, bandwidth * PAYLOAD)
        self._columns: list[HyperArray] = []  # Use of the links by each flow.
        self._is_shared = True  # Whether the rates are those of the flows that there are.
        self.flows: list[Flow] = []

    def add(self, flow: Flow) -> None:
        """Begins to carry a flow."""
        column = np.zeros(len(self._capacity))
        column[list(flow.links)] = [part * flow.shares for part in flow.links.values()]
        self.flows.append(flow)
        self._columns.append(column)
        self._is_shared = False

    def share(self) -> None:
        """Sets the rate of each flow: all grow alike until one of their links is full."""
        if self._is_shared:
            return
        self._is_shared = True
        if not self.flows:
            return
        use = np.stack(self._columns, axis=1)
        for flow, rate in zip(self.flows, _fair(use, self._capacity), strict=True):
            flow.rate = rate * flow.shares

    def next_s(self) -> float:
        """Returns the seconds until a flow ends."""
        return min((flow.left / flow.rate for flow in self.flows if flow.rate), default=NEVER)

    def advance(self, seconds: float) -> list[Flow]:
        """Carries bytes for some seconds; returns the flows that have ended."""
        over, stay = [], []
        for index, flow in enumerate(self.flows):
            # A nanosecond's bytes are lost in rounding.
            flow.left -= flow.rate * seconds
            if flow.left <= flow.rate * 1e-9:
                over.append(flow)
            else:
                stay.append(index)
        if over:
            self.flows = [self.flows[index] for index in stay]
            self._columns = [self._columns[index] for index in stay]
            self._is_shared = False
        return over


def _fair(use: HyperArray, capacity: HyperArray) -> list[float]:
    """Returns max-min fair rates.

    Args:
        use: Part of each flow's rate on each link, `(links, flows)`.
        capacity: Bytes per second of each link, `(links,)`.
    """
    rates = np.zeros(use.shape[1])
    grows = np.ones(use.shape[1], bool)
    left = capacity.astype(float)
    while grows.any():
        load = use[:, grows].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(load > 0, left / load, NEVER)
        step = room.min()
        rates[grows] += step
        left = left - load * step
        full = room <= step * (1 + 1e-12)
        grows &= ~(use[full] > 0).any(axis=0)
    return [float(rate) for rate in rates]


@dataclass(slots=True)
class _Round:
    """A push and pull of a stage's replicas."""

    pushed: list[int] = field(default_factory=lambda: [0] * PARTS)
    pulled: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Run:
    """One pipeline on paper; `minibatch_s` is its result."""

    def __init__(
        self,
        layers: Sequence[Layer],
        partition: Partition,
        cost: ShardsCost,
        bandwidth: float,
        workers: int,
    ) -> None:
        """Prepares the replicas.

        Args:
            cost: Bytes of the mode, and the shards.
            bandwidth: Bytes per second and direction of each worker's link.
            workers: Hosts that there are; with shards on them, idle ones have theirs too.
        """
        self._replicas = tuple(stage.replicas for stage in partition.stages)
        self._stages = [layers[stage.first : stage.last + 1] for stage in partition.stages]
        self._cost = cost
        self._shards = [
            shard if cost.on_workers else workers + shard for shard in range(cost.num_shards)
        ]
        self._links = Links(max(workers, *self._shards) + 1, bandwidth)
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Script]] = []
        self._blocked: list[tuple[Script, Until]] = []
        self._here: set[Message] = set()
        self._queues: dict[tuple[int, int], deque[tuple[float, Message]]] = defaultdict(deque)
        self._rounds: dict[tuple[int, int], _Round] = defaultdict(_Round)
        self._ended: dict[int, float] = {}

    def minibatch_s(self) -> float:
        """Returns the seconds between two minibatches that leave the last stage."""
        first = self._replicas[0]
        group = -(-sum(self._replicas) // first) * first  # Minibatches in flight.
        total = max(ROUNDS * max(self._replicas), GROUPS * group)
        for rank in range(sum(self._replicas)):
            self._go_on(self._replica(Place.of_rank(rank, self._replicas), total))
        while len(self._ended) < total:
            self._advance()
        # They end in bursts: the mean over a group does not depend on where it begins. The first
        # minibatches and the last ones, which have the links for themselves, are left out.
        begin, end = total // 3, total - 2 * group
        means = [sum(self._ended[m + n] for n in range(group)) / group for m in (begin, end)]
        # Computing is a bound: a stage that is a little faster than the one before it still has
        # minibatches of the beginning to work off.
        computing = max(
            sum(layer.compute_s if replicas > 1 else layer.alone_s for layer in stage) / replicas
            for stage, replicas in zip(self._stages, self._replicas, strict=True)
        )
        return max(computing, (means[1] - means[0]) / (end - begin))

    # ----- time

    def _advance(self) -> None:
        self._links.share()
        timer_s = self._timers[0][0] - self._now if self._timers else NEVER
        step_s = min(timer_s, self._links.next_s())
        assert step_s < NEVER, "the schedule waits for itself"
        self._now += step_s
        for flow in self._links.advance(step_s):
            flow.ended()
        while self._timers and self._timers[0][0] <= self._now:
            self._go_on(heapq.heappop(self._timers)[2])
        for script, wait in list(self._blocked):
            if wait.is_there():
                self._blocked.remove((script, wait))
                self._go_on(script)

    def _go_on(self, script: Script) -> None:
        for wait in script:
            if isinstance(wait, ComputeWait):
                if wait.seconds > 0:
                    moment = self._now + wait.seconds, next(self._order), script
                    heapq.heappush(self._timers, moment)
                    return
            elif not wait.is_there():
                self._blocked.append((script, wait))
                return

    # ----- a replica

    def _replica(self, place: Place, total: int) -> Script:
        layers = self._stages[place.stage]
        forward_s = sum(layer.forward_s for layer in layers)
        backward_s = sum(layer.backward_s for layer in layers)
        flying: deque[int] = deque()
        for minibatch in range(place.replica, total, place.num_replicas):
            if not place.is_first:
                yield self._message(place.rank, ACTIVATION, minibatch)
            yield ComputeWait(forward_s)
            if not place.is_last:
                nbytes = layers[-1].output_nbytes
                self._give(place, place.rank_at(1, minibatch), (ACTIVATION, minibatch), nbytes)
            flying.append(minibatch)
            if len(flying) > place.depth():
                yield from self._backward(place, flying.popleft(), backward_s)
        while flying:
            yield from self._backward(place, flying.popleft(), backward_s)

    def _backward(self, place: Place, minibatch: int, backward_s: float) -> Script:
        if not place.is_last:
            yield self._message(place.rank, GRADIENT, minibatch)
        yield ComputeWait(backward_s)
        if not place.is_first:
            nbytes = self._stages[place.stage - 1][-1].output_nbytes
            self._give(place, place.rank_at(-1, minibatch), (GRADIENT, minibatch), nbytes)
        if place.num_replicas > 1:
            yield from self._sync(place, minibatch // place.num_replicas)
        else:
            yield ComputeWait(sum(layer.update_s for layer in self._stages[place.stage]))
        if place.is_last:
            self._ended[minibatch] = self._now

    def _message(self, rank: int, kind: int, minibatch: int) -> Until:
        return Until(lambda: (rank, kind, minibatch) in self._here)

    def _give(self, place: Place, to: int, what: tuple[int, int], nbytes: float) -> None:
        """Sends a message behind the others on its connection."""
        queue = self._queues[place.rank, to]
        queue.append((nbytes, (to, *what)))
        if len(queue) == 1:
            self._send_next(place.rank, to)

    def _send_next(self, source: int, to: int) -> None:
        queue = self._queues[source, to]
        nbytes, message = queue[0]

        def ended() -> None:
            self._here.add(message)
            queue.popleft()
            if queue:
                self._send_next(source, to)

        self._links.add(Flow(nbytes, {2 * source: 1.0, 2 * to + 1: 1.0}, 1, ended))

    # ----- the shards

    def _sync(self, place: Place, number: int) -> Script:
        """Pushes a gradient and pulls the weights, in parts; waits for it if the mode does."""
        this = self._rounds[place.stage, number]
        former = self._rounds[place.stage, number - 1]
        if self._cost.hides and number:
            yield Until(lambda: former.pulled[place.rank] == PARTS)
        self._push(place, this, 0)
        if not self._cost.hides:
            yield Until(lambda: this.pulled[place.rank] == PARTS)

    def _push(self, place: Place, this: _Round, part: int) -> None:
        def ended() -> None:
            this.pushed[part] += 1
            if this.pushed[part] == place.num_replicas:
                for replica in range(place.num_replicas):
                    self._pull(Place(place.stage, replica, place.replicas), this)
            if part + 1 < PARTS:
                self._push(place, this, part + 1)

        self._exchange(place, self._cost.pushed, ended, out=True)

    def _pull(self, place: Place, this: _Round) -> None:
        def ended() -> None:
            this.pulled[place.rank] += 1

        self._exchange(place, self._cost.pulled, ended, out=False)

    def _exchange(
        self, place: Place, per_byte: float, ended: Callable[[], None], *, out: bool
    ) -> None:
        """Sends a part of the stage's parameters to the shards, or from them."""
        others = [shard for shard in self._shards if shard != place.rank]
        weights = sum(layer.parameter_nbytes for layer in self._stages[place.stage])
        nbytes = weights * per_byte / PARTS * len(others) / len(self._shards)
        if not nbytes:
            ended()
            return
        links = {2 * shard + out: 1 / len(others) for shard in others}
        links[2 * place.rank + (not out)] = 1.0
        self._links.add(Flow(nbytes, links, len(others), ended))


def fastest(
    layers: Sequence[Layer], level: Level, cost: ShardsCost, memory: MemoryLimit
) -> Partition | None:
    """Returns the pipeline on at most the given workers that is fastest on paper; None: none fits.

    The programme of `partition.py` finds the plans to try: for each number of workers, with and
    without waiting for pushes and pulls, and with links that are slower than they are, because
    transfers cost more than their share of a link.
    """
    found: set[tuple[Stage, ...]] = set()
    programmes = {
        part: [
            Partitioner(layers, [Level(level.units, level.bandwidth * part)], way, memory)
            for way in (cost, cost.hidden())
        ]
        for part in SLOWER
    }
    for units, part in itertools.product(_counts(level.units), SLOWER):
        for programme in programmes[part]:
            partition = programme.on(units).best_pipeline()
            if partition is not None:
                found.add(partition.stages)
    timed = []
    for stages in sorted(found, key=len):
        run = Run(layers, Partition(stages, NEVER), cost, level.bandwidth, level.units)
        timed.append(Partition(stages, run.minibatch_s()))
    # Equal times: the plan of fewest workers.
    return min(timed, key=lambda one: (round(one.seconds, 6), one.workers), default=None)


def _counts(units: int) -> list[int]:
    """Returns the numbers of workers to try: all of a few, else the largest and powers of two."""
    if units <= FEW:
        return list(range(2, units + 1))
    powers = [1 << n for n in range(1, units.bit_length()) if 1 << n < units - 1]
    return sorted({*powers, units - 1, units})
