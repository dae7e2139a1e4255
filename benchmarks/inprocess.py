"""A whole cluster in one thread, with simulated time: the real replicas, clocks and stores.

Gradients are real (torch), the wire is not: each worker has a computing time per step, each message
a latency and bytes over a bandwidth, and events happen in the order of simulated time. So modes
can be compared at equal steps and at equal simulated seconds on one core, and gradients are as
stale as they would be. The same seed gives the same bits.

What is not modelled: the shards' own work takes no time, and a gradient leaves when its backward
pass has ended, not during it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.optimizers import OPTIMIZERS
from pscore.partition import make_layout
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.types import ByteArray, FloatArray, Pull, Push, Role, SliceSpec, Verdict
from psserver.decisions.orders import Acknowledge, Action, Answer
from psserver.decisions.progress import Token
from psserver.decisions.slice_clock import SliceClock
from psserver.engine.slice_queue import execute
from psserver.slices.store import Payload, SliceStore
from psworker.compression.error_feedback import Feedback, choose
from psworker.compression.pull_estimate import Held
from psworker.model.flat import Bucket, describe
from psworker.replica.ports import Landing
from psworker.replica.replica import Replica

RAW = NoCompression()
REQUEST_NBYTES = 64  # Of a pull's request, and of what stands in front of a payload.

Gradient = Callable[[nn.Module, int, int], float]  # Model, rank, step: backward; returns the loss.
OnStep = Callable[["Cluster", int, int, float], None]  # Cluster, rank, step just ended, its loss.
Life = Generator[Callable[[], bool], None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Every worker and every shard has one such link, full duplex."""

    latency_s: float = 0.5e-3
    bandwidth: float = 125e6  # Bytes per second: 1 Gbit/s.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Time of one forward and backward pass."""

    mean_s: float = 8e-3
    deviation: float = 0.1  # Of the logarithm: about 10 % from step to step.
    slow: Mapping[int, float] = field(default_factory=dict)  # Factor of a rank that is slow.
    hiccup: float = 0.0  # Probability that a step is slow.
    hiccup_factor: float = 10.0

    def draw(self, rank: int, rng: np.random.Generator) -> float:
        """Returns the seconds of one step."""
        noise = math.exp(self.deviation * rng.standard_normal() - self.deviation**2 / 2)
        is_slow = rng.random() < self.hiccup
        factor = self.slow.get(rank, 1.0) * (self.hiccup_factor if is_slow else 1.0)
        return self.mean_s * noise * factor


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, by whom, and for how long."""

    rule: Rule
    make_model: Callable[[], nn.Module]  # The same weights at each call.
    gradient: Gradient
    group: Mapping[str, Any]  # The user's parameter group, as torch has it.
    optimizer: str = "sgd"  # The user's; by its name in `OPTIMIZERS`.
    lr: Callable[[int], float] | None = None  # By step; None: as in `group`.
    make_inner: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    num_workers: int = 4
    num_shards: int = 2
    steps: int = 100  # Of each worker.
    compressor: Compressor = RAW
    pull_compressor: Compressor = RAW
    compress_min_nbytes: int = 1 << 10  # Models are small here.
    network: Network = Network()
    compute: Compute = Compute()
    seed: int = 0
    on_step: OnStep | None = None


@dataclass(eq=False, slots=True)
class Message:
    """A push or pull on its way; its own token."""

    worker: int
    slice: int
    push: Push | None = None
    payload: Payload | None = None
    pull: Pull | None = None
    landing: Landing | None = None
    held: int | None = None  # Of a compressed pull.


@dataclass(frozen=True)
class Everybody:
    """The participants of the one table: all workers that have not ended."""

    cluster: Cluster
    is_elastic: bool = False

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return self.cluster.job.num_workers

    def ranks(self) -> list[int]:
        """Returns the ranks that a step waits for."""
        return self.cluster.expected()

    def least(self) -> int:
        """Returns 0: the job is not elastic."""
        return 0


class Shards:
    """All slices, and the desk that their actions are carried out at."""

    def __init__(self, cluster: Cluster, slices: tuple[SliceSpec, ...], optimizer: str) -> None:
        self.cluster = cluster
        rule = cluster.job.rule
        plugin = OPTIMIZERS[optimizer]()
        self.clocks = [SliceClock(rule, Everybody(cluster)) for _ in slices]
        self.stores = [SliceStore(spec, rule, plugin) for spec in slices]
        self.owners = [spec.shard for spec in slices]

    def deliver(self, message: Message) -> None:
        """Takes one message off the wire."""
        clock = self.clocks[message.slice]
        if message.push is not None:
            actions = clock.push(message.push, message)
        else:
            assert message.pull is not None
            actions = clock.pull(message.pull, message)
        self.carry_out(message.slice, actions)

    def carry_out(self, index: int, actions: list[Action]) -> None:
        """Does what a clock has decided."""
        execute(actions, self.stores[index], self)

    # ----- Desk

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push."""
        assert isinstance(token, Message)
        assert token.payload is not None
        return token.payload

    def keep(self, token: Token, payload: Payload) -> None:
        """Has another payload from now on."""
        assert isinstance(token, Message)
        token.payload = payload

    def done(self, token: Token) -> None:
        """Forgets a payload."""
        assert isinstance(token, Message)
        token.payload = None

    def acknowledge(self, action: Acknowledge) -> None:
        """Sends an acknowledgement."""
        message = action.token
        assert isinstance(message, Message)
        worker = self.cluster.workers[message.worker]
        self.cluster.after(
            self.cluster.job.network.latency_s,
            lambda: worker.acknowledged(message.slice, action.verdict),
        )

    def answer(self, action: Answer, store: SliceStore) -> None:
        """Sends the weights as they are now."""
        message = action.token
        assert isinstance(message, Message)
        reply = data_pb2.PullReply(version=action.version)
        arrays: Sequence[FloatArray | ByteArray]
        if message.held is None:
            arrays = store.read(action)
            reply.counts.extend(store.counts.tolist() if action.with_state else ())
        else:
            pulls = self.cluster.job.pull_compressor
            estimate = store.estimate(action, pulls)
            arrays = estimate.answer(message.held, reply)
        copies = [array.copy() for array in arrays]
        nbytes = sum(array.nbytes for array in copies) + REQUEST_NBYTES
        worker = self.cluster.workers[message.worker]
        worker.pulled_nbytes += nbytes
        arrival_s = self.cluster.down(message.worker, self.owners[message.slice], nbytes)
        self.cluster.at(arrival_s, lambda: worker.land(message, copies, reply))

    def broke(self, problem: BaseException | None) -> None:
        """Only a bug can cause it."""
        raise AssertionError(problem)


class Worker:
    """One replica with its model, and what `DistributedOptimizer` does around it."""

    def __init__(self, cluster: Cluster, rank: int, model: nn.Module, optimizer: str) -> None:
        job = cluster.job
        self.cluster, self.rank, self.model = cluster, rank, model
        parameters = list(model.parameters())
        self.bucket = Bucket(parameters, cluster.layout)
        for index, parameter in enumerate(parameters):
            flat = self.bucket.grads[cluster.layout.offsets[index] :][: parameter.numel()]
            parameter.grad = flat.view(parameter.shape)
        slices = cluster.layout.slices
        self.grads = [self.bucket.grads_of(spec.index) for spec in slices]
        plugin = OPTIMIZERS[optimizer]()
        self.replica = Replica(cluster.layout, job.rule, plugin, 1, self.bucket.weights, rank)
        self.feedback = [
            Feedback(job.compressor, spec.numel, f"{rank}/{spec.index}") if spec.compress else None
            for spec in slices
        ]
        self.held = [
            Held(job.pull_compressor, spec.numel, f"slice {spec.index} of worker {rank}")
            if spec.compress and not job.pull_compressor.is_raw
            else None
            for spec in slices
        ]
        self.inner = job.make_inner(parameters) if job.make_inner else None
        self.unacknowledged = [False] * len(slices)
        self.landed = [True] * len(slices)
        self.pushed_nbytes = self.pulled_nbytes = 0
        self.num_late = 0  # Pushes that came too late, slice by slice.
        self.waited_s = 0.0
        self.is_done = False
        self._rng = np.random.default_rng([job.seed, rank])
        self._ready: Callable[[], bool] = lambda: True
        self._life = self._live()

    # ----- Outbox

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends a gradient."""
        assert not self.unacknowledged[index]
        self.unacknowledged[index] = True
        values, compressor, feedback = grad.numpy(), RAW, self.feedback[index]
        if feedback is None or not (compress or flush):
            data = values.view(np.uint8).copy()
        elif flush:
            data = np.frombuffer(feedback.flush(push, values), np.uint8).copy()
        else:
            data = np.frombuffer(feedback.encode(push, values), np.uint8).copy()
            compressor = self.cluster.job.compressor
        payload = Payload(data=data, compressor=compressor)
        self._send(Message(self.rank, index, push=push, payload=payload), data.nbytes)

    def pull(
        self, index: int, clock: int, min_version: int, landing: Landing, *, with_state: bool
    ) -> None:
        """Asks for weights."""
        pull = Pull(worker=self.rank, clock=clock, min_version=min_version, with_state=with_state)
        self.landed[index] = False
        message = Message(self.rank, index, pull=pull, landing=landing)
        held = self.held[index]
        if held is not None and not (with_state or landing.exact):
            message.held = held.fingerprint
        self._send(message, 0)

    def _send(self, message: Message, nbytes: int) -> None:
        nbytes += REQUEST_NBYTES
        self.pushed_nbytes += nbytes
        shards = self.cluster.shards
        arrival_s = self.cluster.up(self.rank, shards.owners[message.slice], nbytes)
        self.cluster.at(arrival_s, lambda: shards.deliver(message))

    def maps_weights(self, index: int) -> bool:
        """Nothing is shared."""
        return False

    # ----- events

    def acknowledged(self, index: int, verdict: Verdict) -> None:
        """A push has been answered."""
        self.unacknowledged[index] = False
        self.num_late += verdict is Verdict.TOO_LATE
        if (feedback := self.feedback[index]) is not None:
            feedback.settle(verdict)
        self.wake()

    def land(self, message: Message, arrays: list[Any], reply: data_pb2.PullReply) -> None:
        """A pull has been answered."""
        landing, held = message.landing, self.held[message.slice]
        assert landing is not None
        if message.held is None:
            weights, *state = arrays
        else:
            assert held is not None
            payload = b"".join(array.tobytes() for array in arrays)
            held.room(reply, len(payload))[:] = payload
            assert held.take(reply)
            weights, state = held.values, []
        landing.weights.copy_(torch.from_numpy(weights))
        for target, array in zip(landing.state, state, strict=False):
            target.copy_(torch.from_numpy(array))
        landing.version = reply.version
        landing.counts = np.array(reply.counts, dtype=np.int64) if reply.counts else None
        self.landed[message.slice] = True
        self.wake()

    def wake(self) -> None:
        """Goes on, as far as there is nothing to wait for."""
        while not self.is_done and self._ready():
            try:
                self._ready = next(self._life)
            except StopIteration:
                self.is_done = True
                self.cluster.left()

    # ----- what a training script and `DistributedOptimizer` do

    def _live(self) -> Life:
        job, replica = self.cluster.job, self.replica
        yield from self._wait(replica.begin(self))
        for step in range(job.steps):
            self.bucket.grads.zero_()
            loss = job.gradient(self.model, self.rank, step)
            yield from self._sleep(job.compute.draw(self.rank, self._rng))
            ended_s = self.cluster.now_s
            hyper = self.cluster.hyper(step)
            for part in replica.parts:
                part.hyper = hyper
            plan = replica.plan()
            if plan.push is not None:
                yield self._is_acknowledged
            for index in replica.front_first():
                yield from self._wait(replica.land(index))
                replica.push(index, self.grads[index], -1, 1.0, self)
            if plan.inner:
                self._inner_step(step)
            yield from self._wait(replica.finish(self.grads, self))
            self.waited_s += self.cluster.now_s - ended_s
            if job.on_step is not None:
                job.on_step(self.cluster, self.rank, step, loss)
        yield self._is_acknowledged
        replica.end_round(self.grads, self)
        yield self._is_acknowledged
        yield from self._wait(replica.settle())

    def _inner_step(self, step: int) -> None:
        assert self.inner is not None
        if self.cluster.job.lr is not None:
            for group in self.inner.param_groups:
                group["lr"] = self.cluster.job.lr(step)
        self.inner.step()

    def _is_acknowledged(self) -> bool:
        return not any(self.unacknowledged)

    def _sleep(self, seconds: float) -> Life:
        end_s = self.cluster.now_s + seconds
        self.cluster.at(end_s, self.wake)
        yield lambda: self.cluster.now_s >= end_s

    def _wait(self, waits: Iterable[int]) -> Life:
        for index in waits:
            yield lambda index=index: self.landed[index]  # type: ignore[misc]


class Cluster:
    """Workers and shards; `run` lets them train."""

    def __init__(self, job: Job) -> None:
        """Makes them, with rank 0's weights on the shards."""
        self.job = job
        self.now_s = 0.0
        self.is_stopped = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._up, self._down = [0.0] * job.num_workers, [0.0] * job.num_workers
        self._in, self._out = [0.0] * job.num_shards, [0.0] * job.num_shards
        models = [job.make_model() for _ in range(job.num_workers)]
        named = list(models[0].named_parameters())
        tensors = choose(
            describe(named, [0] * len(named)),
            job.compressor,
            job.pull_compressor,
            min_nbytes=job.compress_min_nbytes,
            exclude=(),
        )
        self.layout = make_layout(tensors, job.num_shards)
        optimizer = job.rule.outer_optimizer or job.optimizer
        self._plugin = OPTIMIZERS[optimizer]()
        self.shards = Shards(self, self.layout.slices, optimizer)
        self.workers = [Worker(self, rank, model, optimizer) for rank, model in enumerate(models)]
        start = self.workers[0].bucket.weights.numpy()
        for spec in self.layout.slices:
            push = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
            data = start[spec.start : spec.stop].view(np.uint8).copy()
            message = Message(0, spec.index, push=push, payload=Payload(data=data, compressor=RAW))
            self.shards.deliver(message)

    def run(self, until_s: float = math.inf) -> Cluster:
        """Lets everything happen, until nothing is left to happen or the time has come.

        Raises:
            RuntimeError: A worker waits for what will never come.
        """
        for worker in self.workers:
            self.after(0.0, worker.wake)
        while self._events and not self.is_stopped:
            if self._events[0][0] > until_s:
                return self
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        stuck = [worker.rank for worker in self.workers if not worker.is_done]
        if stuck and not self.is_stopped:
            raise RuntimeError(f"workers {stuck} wait for ever at {self.now_s} s")
        return self

    def stop(self) -> None:
        """Ends `run` after this event."""
        self.is_stopped = True

    def weights(self) -> torch.Tensor:
        """Returns a copy of the global weights, `(layout.numel,) float32`."""
        return torch.from_numpy(np.concatenate([store.weights for store in self.shards.stores]))

    def show(self, model: nn.Module) -> nn.Module:
        """Copies the global weights, and rank 0's buffers, into a model of the same kind."""
        flat = self.weights()
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                part = flat[self.layout.offsets[index] :][: parameter.numel()]
                parameter.copy_(part.view(parameter.shape))
            for target, source in zip(
                model.buffers(), self.workers[0].model.buffers(), strict=True
            ):
                target.copy_(source)
        return model

    # ----- what workers and shards ask for

    def expected(self) -> list[int]:
        """Returns the ranks that a step waits for."""
        return [worker.rank for worker in self.workers if not worker.is_done]

    def left(self) -> None:
        """A worker has ended: those who waited for it decide again."""
        for index, clock in enumerate(self.shards.clocks):
            self.shards.carry_out(index, clock.recheck())

    def hyper(self, step: int) -> np.ndarray:
        """Returns the hyper-parameters of one step, `(1, num_hyper)`."""
        group = dict(self.job.group)
        if self.job.lr is not None:
            group["lr"] = self.job.lr(step)
        row = self._plugin.hyper_from_torch(self.job.rule.outer_group(step, group))
        return np.array([row])

    # ----- time and wire

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Plans an event."""
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Plans an event from now."""
        self.at(self.now_s + seconds, act)

    def up(self, worker: int, shard: int, nbytes: int) -> float:
        """Returns when a message of a worker arrives at a shard."""
        return self._travel(self._up, worker, self._in, shard, nbytes)

    def down(self, worker: int, shard: int, nbytes: int) -> float:
        """Returns when a message of a shard arrives at a worker."""
        return self._travel(self._out, shard, self._down, worker, nbytes)

    def _travel(
        self, first: list[float], source: int, second: list[float], target: int, nbytes: int
    ) -> float:
        """Both links carry one message after the other; lists hold when each is free again."""
        seconds = nbytes / self.job.network.bandwidth
        first[source] = max(self.now_s, first[source]) + seconds
        second[target] = max(first[source], second[target] + seconds)
        return second[target] + self.job.network.latency_s
