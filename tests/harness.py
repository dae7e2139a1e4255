"""One table of a job in one thread: real replicas, clocks and stores, seeded order of arrival.

Messages of one worker about one slice arrive in the order in which they were sent, as on a
connection; everything else is interleaved at random. What happened, in the order in which the
shard saw it, is in `log`, so that a model of the equations can follow the same history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.types import Pull, Push, Role, Segment, SliceSpec, TensorSpec, Verdict
from psserver.decisions.orders import Acknowledge, Action, Answer
from psserver.decisions.progress import Token
from psserver.decisions.slice_clock import SliceClock
from psserver.engine.slice_queue import execute
from psserver.slices.base import Payload, Store
from psserver.slices.store import SliceStore
from psworker.replica.ports import PullBuffer
from psworker.replica.replica import Replica
from tests.participants import Listed

Vector = npt.NDArray[np.float64]
Gradient = Callable[[int, int, Vector], Vector]  # Worker, step, weights.
RAW: Compressor = NoCompression()

TENSORS = (4, 5, 3)  # Elements of the tensors; the second one spans both slices.
CUTS = (0, 6, 12)
NUMEL = CUTS[-1]
SLICES = [slice(CUTS[0], CUTS[1]), slice(CUTS[1], CUTS[2])]


def make_layout() -> Layout:
    """Returns two slices of three tensors, smaller than those of the product."""
    offsets = [sum(TENSORS[:index]) for index in range(len(TENSORS))]
    slices = []
    for index, part in enumerate(SLICES):
        segments = []
        for tensor, (offset, numel) in enumerate(zip(offsets, TENSORS, strict=True)):
            low, high = max(offset, part.start), min(offset + numel, part.stop)
            if low < high:
                start, stop = low - part.start, high - part.start
                segments.append(
                    Segment(
                        tensor=tensor, group=0, start=start, stop=stop, tensor_start=low - offset
                    )
                )
        slices.append(
            SliceSpec(
                index=index, shard=0, start=part.start, stop=part.stop, segments=tuple(segments)
            )
        )
    return Layout(
        tensors=tuple(
            TensorSpec(name=f"t{index}", shape=(numel,), dtype="float32")
            for index, numel in enumerate(TENSORS)
        ),
        offsets=tuple(offsets),
        numel=NUMEL,
        num_shards=1,
        slices=tuple(slices),
        fingerprint="",
    )


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that the shard has seen, or that a worker has done."""

    kind: str  # "compute", "push" (counted in time), "late", "answer" or "leave".
    worker: int
    slice: int = -1
    number: int = -1  # The worker's step, the push's step on the wire, or the answer's version.


@dataclass(eq=False)
class Message:
    """A push or pull on its way, and its own token."""

    worker: int
    slice: int
    push: Push | None = None
    payload: Payload | None = None
    pull: Pull | None = None
    pull_buffer: PullBuffer | None = None
    reply: list[npt.NDArray[np.float32]] = field(default_factory=list)
    version: int = -1
    counts: npt.NDArray[np.int64] | None = None


class Shard:
    """The slices, and the desk that their actions are carried out at."""

    def __init__(self, cluster: Cluster, layout: Layout, optimizer: str) -> None:
        self.cluster = cluster
        plugin = OPTIMIZERS[optimizer]()
        rule, num_workers = cluster.rule, cluster.num_workers
        self.clocks = [SliceClock(rule, Listed(cluster.live, num_workers)) for _ in layout.slices]
        self.stores = [SliceStore(spec, rule, plugin) for spec in layout.slices]
        self.most_open = 0

    def submit(self, index: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Acknowledge):
                message = self.message(action.token)
                late = action.verdict is Verdict.TOO_LATE
                step = message.push.step if message.push else -1
                self.cluster.note("late" if late else "push", message.worker, index, step)
            elif isinstance(action, Answer) and not action.is_look:
                self.cluster.note("answer", action.worker, index, action.version)
        execute(actions, self.stores[index], self)
        self.most_open = max(self.most_open, len(self.stores[index]._sums))

    def message(self, token: Token) -> Message:
        assert isinstance(token, Message)
        return token

    def payload(self, token: Token) -> Payload:
        payload = self.message(token).payload
        assert payload is not None
        return payload

    def keep(self, token: Token, payload: Payload) -> None:
        self.message(token).payload = payload

    def done(self, token: Token) -> None:
        self.message(token).payload = None

    def acknowledge(self, action: Acknowledge) -> None:
        message = self.message(action.token)
        worker = self.cluster.workers[message.worker]
        worker.unacknowledged[message.slice] = False
        if action.verdict is Verdict.TOO_LATE:
            worker.num_late += 1

    def answer(self, action: Answer, store: Store) -> None:
        message = self.message(action.token)
        arrays = store.read(action)
        message.reply = [array.copy() for array in arrays]
        message.version = action.version
        message.counts = store.counts.copy() if action.with_state else None
        self.cluster.workers[message.worker].replies[message.slice].append(message)

    def broke(self, problem: BaseException | None) -> None:
        raise AssertionError(problem)


class Worker:
    """One replica, and its way to the shard."""

    def __init__(self, cluster: Cluster, layout: Layout, rank: int, optimizer: str) -> None:
        self.cluster = cluster
        self.rank = rank
        self.weights = torch.zeros(NUMEL)
        self.flat = torch.zeros(NUMEL)
        self.grads = [self.flat[part] for part in SLICES]
        self.replica = Replica(layout, cluster.rule, OPTIMIZERS[optimizer](), 1, self.weights, rank)
        count = len(SLICES)
        # What error feedback keeps of each slice; the residual is under "residual".
        self.kept = [
            {
                name: np.zeros(part.stop - part.start, np.float32)
                for name in cluster.compressor.state_names
            }
            for part in SLICES
        ]
        self.channels: list[deque[Message]] = [deque() for _ in range(count)]
        self.replies: list[deque[Message]] = [deque() for _ in range(count)]
        self.unacknowledged = [False] * count
        self.landed = [True] * count
        self.seen: list[npt.NDArray[np.float32]] = []  # Weights of each step's gradient.
        self.looked = np.zeros(NUMEL, np.float32)  # What the last look has shown.
        self.ready: Callable[[], bool] = lambda: True
        self.num_late = 0
        self.is_done = False
        self.life = self._live()

    # ----- PushPull

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        assert not self.unacknowledged[index]
        self.unacknowledged[index] = True
        values, kept, compressor = grad.numpy().copy(), self.kept[index], RAW
        if flush and "residual" in kept:
            values += kept["residual"]
            kept["residual"][:] = 0.0
        data = values.view(np.uint8)
        if compress and self.cluster.compressor is not RAW:
            compressor = self.cluster.compressor
            data = np.zeros(compressor.payload_nbytes_max(len(values)), np.uint8)
            data = data[: compressor.encode(values, kept, data, step=push.step)]
        payload = Payload(data=data, compressor=compressor)
        self.channels[index].append(Message(self.rank, index, push=push, payload=payload))

    def pull(
        self, index: int, clock: int, min_version: int, pull_buffer: PullBuffer, *, with_state: bool
    ) -> None:
        pull = Pull(
            worker=self.rank,
            clock=clock,
            min_version=min_version,
            with_state=with_state,
            is_look=pull_buffer.is_look,
        )
        self.landed[index] = False
        self.channels[index].append(Message(self.rank, index, pull=pull, pull_buffer=pull_buffer))

    def maps_weights(self, index: int) -> bool:
        """Nothing is shared."""
        return False

    # ----- events

    def deliver(self, index: int) -> None:
        message = self.channels[index].popleft()
        clock = self.cluster.shard.clocks[index]
        if message.push is not None:
            actions = clock.push(message.push, message)
        else:
            assert message.pull is not None
            actions = clock.pull(message.pull, message)
        self.cluster.shard.submit(index, actions)

    def land(self, index: int) -> None:
        message = self.replies[index].popleft()
        assert message.pull_buffer is not None
        weights, *state = message.reply
        message.pull_buffer.weights.copy_(torch.from_numpy(weights))
        for target, array in zip(message.pull_buffer.state, state, strict=False):
            target.copy_(torch.from_numpy(array))
        message.pull_buffer.version, message.pull_buffer.counts = message.version, message.counts
        self.landed[index] = True

    def resume(self) -> None:
        try:
            self.ready = next(self.life)
        except StopIteration:
            self.is_done = True
            self.cluster.leave(self.rank)

    # ----- what a training script and `DistributedOptimizer` do

    def _live(self) -> Generator[Callable[[], bool], None, None]:
        cluster, replica = self.cluster, self.replica
        yield from self._wait(replica.begin(self))
        for step in range(cluster.steps):
            cluster.note("compute", self.rank, -1, step)
            self.seen.append(self.weights.numpy().copy())
            grad = cluster.gradient(self.rank, step, self.weights.numpy().astype(np.float64))
            for part in replica.parts:
                part.hyper = cluster.rows(replica.step)
            samples = cluster.samples(self.rank, step)
            plan = replica.plan()
            if plan.push is not None:
                yield lambda: not any(self.unacknowledged)
            if plan.push is not Role.DELTA:
                self.flat.copy_(torch.from_numpy(grad.astype(np.float32)))
            for index in replica.front_first():
                yield from self._wait(replica.land(index))
                replica.push(index, self.grads[index], -1, samples, self)
            if plan.inner:
                cluster.inner(self.rank, step, self.weights, grad)
            yield from self._wait(replica.finish(self.grads, self, samples))
            if cluster.looks:
                yield from self._look(with_state=step % 2 == 1)
            yield lambda: True
        yield lambda: not any(self.unacknowledged)
        replica.end_round(self.grads, self)
        yield lambda: not any(self.unacknowledged)
        yield from self._wait(replica.settle())

    def _look(self, *, with_state: bool) -> Generator[Callable[[], bool], None, None]:
        """Looks at the weights, and at each second time at the optimizer's state too."""
        yield lambda: not any(self.unacknowledged)
        num_state = len(self.cluster.shard.stores[0].state) if with_state else 0
        pull_buffers = [
            PullBuffer(
                weights=torch.zeros(part.stop - part.start),
                state=[torch.zeros(part.stop - part.start) for _ in range(num_state)],
                is_look=True,
            )
            for part in SLICES
        ]
        yield from self._wait(self.replica.peek(pull_buffers, self, with_state=with_state))
        self.looked = torch.cat([pull_buffer.weights for pull_buffer in pull_buffers]).numpy()

    def _wait(self, waits: Any) -> Generator[Callable[[], bool], None, None]:
        for index in waits:
            yield lambda index=index: self.landed[index]  # type: ignore[misc]


class Cluster:
    """Workers and one shard; `run` lets them train."""

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
        samples: Callable[[int, int], float] = lambda worker, step: 1.0,
        inner: Callable[[int, int, torch.Tensor, Vector], None] | None = None,
        speeds: tuple[float, ...] = (),
        looks: bool = False,
    ) -> None:
        self.rule = rule
        self.looks = looks  # Each worker, behind each step.
        self.gradient = gradient
        self.num_workers = num_workers
        self.steps = steps
        self.group = {**SGD_GROUP, **(group or {})}
        self.lr = lr
        self.compressor = compressor
        self.samples = samples
        self.inner = inner or (lambda worker, step, weights, grad: None)
        self.speeds = speeds or (1.0,) * num_workers
        self.log: list[Event] = []
        self.gone: set[int] = set()
        self._rng = np.random.default_rng(seed)
        self._plugin = OPTIMIZERS[rule.outer_optimizer or optimizer]()
        layout = make_layout()
        self.shard = Shard(self, layout, self._plugin.name)
        self.workers = [
            Worker(self, layout, rank, self._plugin.name) for rank in range(num_workers)
        ]
        begin = (np.zeros(NUMEL) if start is None else start).astype(np.float32)
        for index, part in enumerate(SLICES):
            push = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
            payload = Payload(data=begin[part].view(np.uint8), compressor=RAW)
            message = Message(0, index, push=push, payload=payload)
            self.shard.submit(index, self.shard.clocks[index].push(push, message))
        self.log.clear()

    # ----- what workers and shard ask for

    def live(self) -> list[int]:
        return [rank for rank in range(self.num_workers) if rank not in self.gone]

    def leave(self, rank: int) -> None:
        self.gone.add(rank)
        self.note("leave", rank)
        for index, clock in enumerate(self.shard.clocks):
            self.shard.submit(index, clock.recheck())

    def note(self, kind: str, worker: int, index: int = -1, number: int = -1) -> None:
        self.log.append(Event(kind=kind, worker=worker, slice=index, number=number))

    def rows(self, step: int) -> npt.NDArray[np.float64]:
        group = dict(self.group)
        if self.lr is not None:
            group["lr"] = self.lr(step)
        row = self._plugin.hyper_from_torch(self.rule.outer_group(step, group))
        return np.array([row])

    # ----- time

    def choices(self) -> list[tuple[Callable[..., None], tuple[int, ...], float]]:
        found: list[tuple[Callable[..., None], tuple[int, ...], float]] = []
        for worker in self.workers:
            if not worker.is_done and worker.ready():
                found.append((worker.resume, (), self.speeds[worker.rank]))
            for index in range(len(SLICES)):
                if worker.channels[index]:
                    found.append((worker.deliver, (index,), 1.0))
                if worker.replies[index]:
                    found.append((worker.land, (index,), 1.0))
        return found

    def run(self, events: int = 1_000_000) -> Cluster:
        """Lets everything happen, at most so many events; a standstill is an error."""
        for _ in range(events):
            found = self.choices()
            if not found:
                break
            act, arguments, speed = found[self._rng.integers(len(found))]
            if speed >= 1.0 or self._rng.random() < speed:
                act(*arguments)
        stuck = [worker.rank for worker in self.workers if not worker.is_done]
        assert events < 1_000_000 or not stuck, (stuck, [c.missing() for c in self.shard.clocks])
        return self

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """The global weights."""
        return np.concatenate([store.weights for store in self.shard.stores])

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


def quadratic(worker: int, step: int, weights: Vector) -> Vector:
    """A noisy quadratic of which every worker has its own minimum; the gradient of a minibatch."""
    rng = np.random.default_rng([worker, step])
    target = np.cos(np.arange(NUMEL) * (1.0 + worker))
    grad: Vector = CURVATURE * (weights - target) + 0.3 * rng.standard_normal(NUMEL)
    return grad


def assert_follows(cluster: Cluster, seen: Vector, weights: Vector) -> None:
    """Compares what every worker saw at every step, and where the shard ended, with a model."""
    np.testing.assert_allclose(cluster.seen(), seen, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(cluster.weights, weights, rtol=2e-4, atol=2e-5)
