"""One table of a job whose events happen in a random order, drawn from a seed.

Messages of one worker about one slice arrive in the order in which they were sent, as on a
connection; everything else is interleaved at random. The events, in the order of the shard's
decisions, are in `log`, so that a model of the equations can follow the same history.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.rules.base import Rule
from pscore.types import Verdict
from psserver.decisions.orders import Acknowledge, Answer
from psserver.decisions.slice_clock import LOADS, SliceClock
from psserver.slices.store import SliceStore
from pssim.cluster import quiet, small_slices
from pssim.network import Loop, Message, Network
from pssim.shard import Decision
from pssim.training import TrainingCluster, TrainingJob, TrainingWorker
from pssim.worker import Program
from psworker.replica.ports import PullBuffer

Vector = npt.NDArray[np.float64]
Gradient = Callable[[int, int, Vector], Vector]  # Worker, step, weights.
RAW: Compressor = NoCompression()

TENSORS = (3, 5, 4)  # Elements of the tensors as they lie; the second one spans both slices.
CUTS = (0, 6, 12)
NUMEL = CUTS[-1]
SLICES = [slice(CUTS[0], CUTS[1]), slice(CUTS[1], CUTS[2])]


class Tensors(nn.Module):
    """A model of matrices; the flat vector has the last one first."""

    def __init__(self, start: Vector) -> None:
        super().__init__()
        parts = np.split(start.astype(np.float32), np.cumsum(TENSORS)[:-1])
        for index, part in enumerate(reversed(parts)):
            self.register_parameter(f"t{index}", nn.Parameter(torch.from_numpy(part[None].copy())))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that the shard has decided, or that a worker has done."""

    kind: str  # "compute", "push" (counted in time), "late", "answer" or "leave".
    worker: int
    slice: int = -1
    number: int = -1  # The worker's step, the push's step on the wire, or the answer's version.


class RandomOrder(Loop):
    """Events in random order; those of one queue in the order of their scheduling."""

    def __init__(self, seed: int, speeds: tuple[float, ...]) -> None:
        super().__init__()
        self.speeds = speeds  # Of each worker's own events; messages have speed 1.
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self._rng = np.random.default_rng(seed)

    def at(self, time_s: float, call: Callable[[], None], queue: Hashable = None) -> None:
        self._queues.setdefault(queue, deque()).append(call)

    def queues(self, kinds: tuple[str, ...] = (), rank: int | None = None) -> list[Any]:
        """Returns the queues that are not empty, of some kinds or of one worker."""
        found: list[Any] = list(self._queues)
        return [
            queue
            for queue in found
            if (not kinds or queue[0] in kinds) and rank in (None, queue[1])
        ]

    def happen(self, queue: Hashable) -> None:
        """Runs the first event of a queue."""
        call = self._queues[queue].popleft()
        if not self._queues[queue]:
            del self._queues[queue]
        call()

    def draw(self) -> bool:
        """Runs one event, or none if a slow worker is drawn; returns False if there is none."""
        found: list[Any] = list(self._queues)
        if not found:
            return False
        queue = found[self._rng.integers(len(found))]
        speed = self.speeds[queue[1]] if queue[0] == "worker" else 1.0
        if speed >= 1.0 or self._rng.random() < speed:
            self.happen(queue)
        return True


class QueuedNetwork(Network):
    """A queue for each worker, slice and direction."""

    def send(self, message: Message, deliver: Callable[[], None]) -> None:
        kind = "answer" if message.is_answer else "request"
        is_ack = message.nbytes is None  # Travels beside the answers to pulls.
        self._loop.after(0.0, deliver, (kind, message.worker, message.slice, is_ack))


class Worker(TrainingWorker):
    """A worker that keeps what it has seen."""

    cluster: Cluster

    def __init__(self, cluster: Cluster, rank: int, model: nn.Module) -> None:
        super().__init__(cluster, rank, model)
        self.seen: list[npt.NDArray[np.float32]] = []  # Weights of each step's gradient.
        self.looked = np.zeros(NUMEL, np.float32)  # The weights of the last look.

    @property
    def is_done(self) -> bool:
        return self.is_over

    @property
    def kept(self) -> list[dict[str, npt.NDArray[np.float32]]]:
        """The residuals of each slice."""
        return [dict(it.state) for it in self.exchange.payloads.feedback if it is not None]

    @property
    def num_unacknowledged(self) -> int:
        return sum(not push.done() for push in self.pushes.values())

    def end(self) -> None:
        self.cluster.note("leave", self.rank)
        super().end()

    def step(self, step: int) -> Program:
        yield from super().step(step)
        if self.cluster.looks:
            yield from self._look(with_state=step % 2 == 1)

    def inner_step(self, step: int) -> None:
        grad = self.flat_model.grads.numpy().astype(np.float64)
        self.cluster.inner(self.rank, step, self.flat_model.weights, grad)

    def _look(self, *, with_state: bool) -> Program:
        """Looks at the weights, and at each second time at the optimizer's state too."""
        yield from self.wait_for_pushes()
        num_state = len(self.cluster.optimizer.state_names) if with_state else 0
        buffers = [
            PullBuffer(
                weights=torch.zeros(part.stop - part.start),
                state=[torch.zeros(part.stop - part.start) for _ in range(num_state)],
                is_look=True,
            )
            for part in SLICES
        ]
        peek = self.replica.peek(dict(enumerate(buffers)), self.exchange, with_state=with_state)
        yield from self.wait_for_pulls(peek)
        self.looked = torch.cat([buffer.weights for buffer in buffers]).numpy()


class Shard:
    """The slices of the one shard."""

    def __init__(self, cluster: Cluster) -> None:
        parts = sorted(cluster.shards[0].slices(), key=lambda part: part[0])
        self.clocks: list[SliceClock] = [clock for _, _, clock, _ in parts]
        self.stores: list[SliceStore] = [store for _, _, _, store in parts]
        self.most_open = 0


class Cluster(TrainingCluster):
    """Workers and one shard; `run` lets them train."""

    loop: RandomOrder
    workers: list[Worker]  # type: ignore[assignment]

    def __init__(
        self,
        rule: Rule,
        gradient: Gradient,
        *,
        num_workers: int = 3,
        steps: int = 200,
        seed: int = 0,
        start: Vector | None = None,
        group: Mapping[str, Any] | None = None,
        lr: Callable[[int], float] | None = None,
        optimizer: str = "sgd",
        compressor: Compressor = RAW,
        samples: Callable[[int, int], float] | None = None,
        inner: Callable[[int, int, torch.Tensor, Vector], None] | None = None,
        speeds: tuple[float, ...] = (),
        looks: bool = False,
    ) -> None:
        self.rule = rule
        self.looks = looks  # Each worker, after each step.
        self.gradient = gradient
        self.num_workers = num_workers
        self.steps = steps
        self.group = {**SGD_GROUP, **(group or {})}
        self.compressor = compressor
        self.inner = inner or (lambda worker, step, weights, grad: None)
        self.log: list[Event] = []
        self._has_begun = False
        self.shard: Shard
        begin = np.zeros(NUMEL) if start is None else start
        job = TrainingJob(
            rule=rule,
            make_model=lambda: Tensors(begin),
            gradient=self._gradient,
            group=self.group,
            optimizer=optimizer,
            lr=lr,
            num_workers=num_workers,
            num_shards=1,
            steps=steps,
            compressor=compressor,
            compress_min_nbytes=0,
            samples=samples,
        )
        loop = RandomOrder(seed, speeds or (1.0,) * num_workers)
        with small_slices(CUTS[1], alignment=1):
            super().__init__(job, loop=loop, network=QueuedNetwork(loop), observers=(self,))
        self.shard, self._has_begun = Shard(self), True
        for worker in self.workers:
            loop.after(0.0, worker.resume, ("worker", worker.rank))

    def make_worker(self, rank: int, model: nn.Module) -> Worker:
        return Worker(self, rank, model)

    def _gradient(self, model: nn.Module, rank: int, step: int) -> float:
        worker = self.workers[rank]
        weights = worker.flat_model.weights.numpy()
        self.note("compute", rank, -1, step)
        worker.seen.append(weights.copy())
        grad = self.gradient(rank, step, weights.astype(np.float64))
        worker.flat_model.grads.copy_(torch.from_numpy(grad.astype(np.float32)))
        return 0.0

    # ----- what has happened

    @property
    def speeds(self) -> tuple[float, ...]:
        return self.loop.speeds

    @speeds.setter
    def speeds(self, speeds: tuple[float, ...]) -> None:
        self.loop.speeds = speeds

    def decided(self, decision: Decision) -> None:
        """Called with the shard's decisions."""
        if not self._has_begun:
            return
        self.shard.most_open = max(self.shard.most_open, len(decision.clock.open_steps))
        action, sender, index = decision.action, decision.sender, decision.slice
        if sender is None or sender.role in LOADS:
            return
        if isinstance(action, Acknowledge):
            kind = "late" if action.verdict is Verdict.TOO_LATE else "push"
            self.note(kind, sender.worker, index, sender.step)
        elif isinstance(action, Answer) and not action.is_look:
            self.note("answer", action.worker, index, action.version)

    def note(self, kind: str, worker: int, index: int = -1, number: int = -1) -> None:
        self.log.append(Event(kind=kind, worker=worker, slice=index, number=number))

    def rows(self, step: int) -> npt.NDArray[np.float64]:
        return self.hyper(step)

    # ----- time

    def train(self, events: int = 1_000_000) -> Cluster:
        """Runs all events, at most so many; a standstill is an error."""
        with quiet():
            for _ in range(events):
                if not self.loop.draw():
                    break
        self.require_sound()
        stuck = [worker.rank for worker in self.workers if not worker.is_done]
        clocks = [clock for _, _, clock, _ in self.shards[0].slices()]
        assert events < 1_000_000 or not stuck, (stuck, [clock.missing() for clock in clocks])
        return self

    def turn(self, rank: int, *kinds: str) -> bool:
        """Runs one event of one worker; returns False if there is none."""
        found = self.loop.queues(kinds, rank)
        if found:
            with quiet():
                self.loop.happen(found[0])
        return bool(found)

    def seen(self) -> npt.NDArray[np.float32]:
        """Returns `(workers, steps, numel)`: the weights that gradients were computed from."""
        return np.array([worker.seen for worker in self.workers])


SGD_GROUP = {
    "lr": 0.05,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
CURVATURE = np.linspace(0.25, 1.0, NUMEL)


@functools.cache
def _minibatch(worker: int, step: int) -> tuple[Vector, Vector]:
    """Returns a worker's minimum, and the noise of one minibatch."""
    noise = np.random.default_rng([worker, step]).standard_normal(NUMEL)
    return np.cos(np.arange(NUMEL) * (1.0 + worker)), 0.3 * noise


def quadratic(worker: int, step: int, weights: Vector) -> Vector:
    """A noisy quadratic of which every worker has its own minimum; the gradient of a minibatch."""
    target, noise = _minibatch(worker, step)
    grad: Vector = CURVATURE * (weights - target) + noise
    return grad


def assert_follows(cluster: Cluster, seen: Vector, weights: Vector) -> None:
    """Compares what every worker saw at every step, and where the shard ended, with a model."""
    np.testing.assert_allclose(cluster.seen(), seen, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(cluster.flat_weights(), weights, rtol=2e-4, atol=2e-5)
