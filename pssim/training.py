"""A job that trains real models in virtual time: gradients are real, computing and wire are not.

Each worker has a computing time per step, each message a latency and bytes over a bandwidth, so
that modes can be compared at equal steps and at equal virtual seconds on one core, and gradients
are as stale as they would be. The same seed gives the same bits.

Not modelled: the shards' own work takes no time, a gradient leaves when its backward pass has
ended, not during it, and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import HyperArray, Role
from psserver.decisions.membership import Member
from pssim.cluster import Cluster, quiet
from pssim.network import LinkNetwork, Loop, Network, NetworkLink
from pssim.shard import ShardObserver
from pssim.worker import Program, Worker
from psworker.compression.error_feedback import choose
from psworker.connection.accounts.pace import SMOOTHING
from psworker.model.flat import FlatModel, describe

RAW = NoCompression()
Gradient = Callable[[nn.Module, int, int], float]  # Model, rank, step: backward; returns the loss.
# Cluster, rank, the step that has just ended, its loss.
OnStep = Callable[["TrainingCluster", int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Time of one forward and backward pass."""

    mean_s: float = 8e-3  # Mean in seconds.
    # Standard deviation of the logarithm: 0.1 is about 10 % from step to step.
    deviation: float = 0.1
    slow: Mapping[int, float] = field(default_factory=dict)  # Factors of the ranks that are slow.
    hiccup: float = 0.0  # Probability that a step is slow.
    hiccup_factor: float = 10.0  # Factor of such a step.

    def draw(self, rank: int, rng: np.random.Generator) -> float:
        """Returns the seconds of one step."""
        noise = math.exp(self.deviation * rng.standard_normal() - self.deviation**2 / 2)
        is_slow = rng.random() < self.hiccup
        factor = self.slow.get(rank, 1.0) * (self.hiccup_factor if is_slow else 1.0)
        return self.mean_s * noise * factor


ETHERNET, STEADY = NetworkLink(), Compute()


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training run: the model, its workers, and its length."""

    rule: Rule
    make_model: Callable[[], nn.Module]  # Returns the model, with the same weights at each call.
    gradient: Gradient  # Computes one minibatch's gradients into `.grad`; returns the loss.
    group: Mapping[str, Any]  # The user's parameter group, as torch has it.
    optimizer: str = "sgd"  # The user's optimizer by its name in `OPTIMIZERS`.
    lr: Callable[[int], float] | None = None  # Learning rate of a step; None: as in `group`.
    # Returns the workers' own optimizer, in modes that have one.
    make_inner: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    num_workers: int = 4
    num_shards: int = 2
    steps: int = 100  # Steps of each worker; in a mode with rounds by speed, of the training.
    compressor: Compressor = RAW
    pull_compressor: Compressor = RAW
    compress_min_nbytes: int = 1 << 10  # Smaller tensors are not compressed.
    link: NetworkLink = ETHERNET  # Link of each worker and shard.
    compute: Compute = STEADY
    # Weight of a worker's step in the mean of its step; None: 1.
    samples: Callable[[int, int], float] | None = None
    seed: int = 0  # Seed of the computing times.
    on_step: OnStep | None = None  # Called after each step of each worker.
    # Virtual seconds after which shards look at the windows of rounds with a quorum.
    tick_s: float = 1e-3


class TrainingWorker(Worker):
    """One worker with its model, and the steps of its training script.

    Attributes:
        model: The model, a view on the replica's weights.
        flat_model: Flat weights and gradients.
        waited_s: Virtual seconds between the end of computing and the end of a step.
        computed_s: Virtual seconds of computing a step, smoothed; 0: none was computed.
        restart: Number of its processes before this one.
    """

    restart = 0

    def __init__(self, cluster: TrainingCluster, rank: int, model: nn.Module) -> None:
        super().__init__(rank, cluster.shards, cluster.loop, cluster.network)
        self.cluster = cluster
        self.model = model
        self.waited_s = self.computed_s = 0.0
        parameters = list(model.parameters())
        self.flat_model = FlatModel(parameters, cluster.layout)
        for index, parameter in enumerate(parameters):
            flat = self.flat_model.grads[cluster.layout.offsets[index] :][: parameter.numel()]
            parameter.grad = flat.view(parameter.shape)
        self.grads = [self.flat_model.grads_of(spec.index) for spec in cluster.layout.slices]
        job = cluster.job
        self.inner = job.make_inner(parameters) if job.make_inner else None
        self._rng = np.random.default_rng([job.seed, rank])
        self.start_process(
            self.train(),
            cluster.spec,
            cluster.layout,
            cluster.optimizer,
            self.flat_model.weights,
            job.num_workers,
        )
        self.replica.speed = self._share

    def join(self) -> None:
        """Joins the job at every shard and declares the table, in no time."""
        for shard in self.shards:
            member = Member(
                rank=self.rank,
                incarnation=self.incarnation,
                restart=self.restart,
                host="host",
                pid=self.rank,
                heard_s=self.loop.now_s,
            )
            shard.join(member, self.cluster.job.num_workers)
        for shard in self.shards:
            shard.define(self.rank, self.incarnation, self.cluster.spec)

    def upload(self) -> None:
        """Sends its weights to the shards; they are not counted in `pushed_nbytes`."""
        weights = self.flat_model.weights.numpy()
        for spec in self.layout.slices:
            part = weights[spec.start : spec.stop].copy()
            self.exchange.load(spec.index, Role.WEIGHTS, [part], [])
        self.pushed_nbytes = 0

    def end(self) -> None:
        """Leaves the job: those that waited for this worker continue."""
        super().end()
        for shard in self.shards:
            shard.leave(self.rank, self.incarnation)

    # ----- the program

    def train(self) -> Program:
        """Returns the program of a training script and `DistributedOptimizer`."""
        job, replica = self.cluster.job, self.replica
        yield from self.wait_for_pushes()
        yield from self.wait_for_pulls(replica.begin(self.exchange))
        replica.shorten()
        made = 0
        while (replica.step if replica.round_steps else made) < job.steps:
            step = replica.step if replica.round_steps else made
            self.flat_model.grads.zero_()
            loss = job.gradient(self.model, self.rank, step)
            yield self._compute_s()
            ended_s = self.loop.now_s
            yield from self.step(step)
            self.waited_s += self.loop.now_s - ended_s
            if job.on_step is not None:
                job.on_step(self.cluster, self.rank, step, loss)
            made += 1
        yield from self.wait_for_pushes()
        replica.end_round(self.grads, self.exchange)
        yield from self.wait_for_pushes()
        yield from self.wait_for_pulls(replica.settle())

    def _compute_s(self) -> float:
        """Returns the seconds of a step; they enter this worker's speed, as its pace does."""
        seconds = self.cluster.job.compute.draw(self.rank, self._rng)
        self.computed_s += SMOOTHING * (seconds - self.computed_s) if self.computed_s else seconds
        return seconds

    def _share(self) -> float:
        """Returns its speed over that of the fastest worker; heartbeats take no time here."""
        known = [worker.computed_s for worker in self.cluster.workers if worker.computed_s]
        return min(known) / self.computed_s if self.computed_s else 1.0

    def step(self, step: int) -> Program:
        """Makes one step of the gradients, as `DistributedOptimizer.step` does."""
        job, replica = self.cluster.job, self.replica
        samples = 1.0 if job.samples is None else job.samples(self.rank, step)
        hyper = self.cluster.hyper(step)
        for part in replica.parts:
            part.hyper = hyper
        plan = replica.plan()
        if plan.push is not None:
            yield from self.wait_for_pushes()
        for index in replica.front_first() if plan.push is Role.GRADIENT else ():
            yield from self.wait_for_pulls(replica.land(index))
            replica.push(index, self.grads[index], -1, samples, self.exchange)
            replica.end_slice(index, self.grads[index], self.exchange)
        if plan.inner:
            self.inner_step(step)
        yield from self.wait_for_pulls(replica.finish(self.grads, self.exchange, samples))

    def inner_step(self, step: int) -> None:
        """Makes a step of the worker's own optimizer."""
        assert self.inner is not None
        if self.cluster.job.lr is not None:
            for group in self.inner.param_groups:
                group["lr"] = self.cluster.job.lr(step)
        self.inner.step()


class TrainingCluster(Cluster):
    """The workers and shards of a training job; `run` trains."""

    def __init__(
        self,
        job: TrainingJob,
        *,
        loop: Loop | None = None,
        network: Network | None = None,
        observers: Sequence[ShardObserver] = (),
    ) -> None:
        """Makes them, with rank 0's weights on the shards.

        Args:
            loop: Order of the events; None: by virtual time.
            network: Between workers and shards; None: the links of the job.
        """
        self.job = job
        loop = loop or Loop()
        models = [job.make_model() for _ in range(job.num_workers)]
        named = list(models[0].named_parameters())
        tensors = choose(
            describe(named, [0] * len(named)),
            job.compressor,
            job.pull_compressor,
            min_nbytes=job.compress_min_nbytes,
            exclude=(),
        )
        spec = TableSpec(
            name="model",
            tensors=tuple(tensors),
            num_shards=job.num_shards,
            rule=job.rule,
            compressor=job.compressor,
            pull_compressor=job.pull_compressor,
            optimizer=job.rule.outer_optimizer or job.optimizer,
            num_groups=1,
        )
        links = LinkNetwork(loop, job.link, job.num_workers, job.num_shards)
        super().__init__(
            spec, loop, Network(loop), lease_s=math.inf, observers=observers
        )  # The job starts in no time.
        self.workers = [self.make_worker(rank, model) for rank, model in enumerate(models)]
        with quiet():
            for worker in self.workers:
                worker.join()
            self.workers[0].upload()
        for worker in self.workers:
            worker.connect(network or links)
        self.network = network or links

    def make_worker(self, rank: int, model: nn.Module) -> TrainingWorker:
        """Returns a new worker."""
        return TrainingWorker(self, rank, model)

    @property
    def now_s(self) -> float:
        """Virtual time in seconds."""
        return self.loop.now_s

    def run(self, until_s: float = math.inf) -> TrainingCluster:
        """Trains until all workers have finished, or until a virtual time.

        Raises:
            RuntimeError: A worker waits for something that never comes.
        """
        for worker in self.workers:
            self.loop.after(0.0, worker.resume)
        if self.job.rule.window_s is not None:
            self.loop.after(self.job.tick_s, self._tick_windows)
        with quiet():
            is_over = self.loop.run(until_s)
        self.require_sound()
        waiting = [worker.rank for worker in self.workers if not worker.is_over]
        if is_over and waiting and not self.loop.is_stopped:
            raise RuntimeError(f"workers {waiting} wait for ever at {self.now_s} s")
        return self

    def _tick_windows(self) -> None:
        for shard in self.shards:
            shard.engine.tick_windows()
        if not all(worker.is_over for worker in self.workers):
            self.loop.after(self.job.tick_s, self._tick_windows)

    def require_sound(self) -> None:
        """Raises a shard's error, which only a bug can cause."""
        for shard in self.shards:
            if shard.problem is not None:
                raise shard.problem

    def stop(self) -> None:
        """Ends `run` after the current event."""
        self.loop.stop()

    def weights(self) -> torch.Tensor:
        """Returns a copy of the global weights, `(layout.numel,) float32`."""
        return torch.from_numpy(self.flat_weights())

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

    def hyper(self, step: int) -> HyperArray:
        """Returns the hyper-parameters of one step, `(1, num_hyper)`."""
        group = dict(self.job.group)
        if self.job.lr is not None:
            group["lr"] = self.job.lr(step)
        outer = self.job.rule.outer_group(step, group, self.job.num_workers)
        return np.array([self.optimizer.hyper_from_torch(outer)])
