"""Runs a job in time, and returns the seconds of a step and its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.timing.deployment import Deployment
from pscore.timing.plans import period, without_warmup
from pscore.types import SliceSpec, TensorSegment, TensorSpec
from pssim.cluster import quiet
from pssim.network import Loop, StuckError
from pssim.timing.links import HostLinks, Servers
from pssim.timing.shards import TimedShard
from pssim.timing.workers import TimedWorker

RAW = NoCompression()
STEPS_MIN = 6  # Steps that are measured, at least.


@dataclass(frozen=True)
class OneElementTable(TableSpec):
    """The table of a deployment, with one element in each slice."""

    slices: tuple[SliceSpec, ...] = ()  # Its slices.

    def layout(self) -> Layout:
        """Returns the layout of these slices."""
        return Layout(
            tensors=self.tensors,
            offsets=tuple(range(len(self.slices))),
            numel=len(self.slices),
            num_shards=self.num_shards,
            slices=self.slices,
            fingerprint="",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """The result of a run."""

    step_s: float  # Seconds of a step of training, of the slowest worker that a step waits for.
    waited: float  # Share of the time in which workers waited after computing.
    busy: Mapping[str, float]  # Share of the time in which each part was busy, by its name.
    num_events: int  # Events of the whole run.

    @property
    def limit(self) -> str:
        """Name of the part that was busy for the largest share of the time."""
        return max(self.busy, key=lambda name: self.busy[name])


def run_in_time(
    deployment: Deployment,
    rule: Rule,
    compressor: Compressor = RAW,
    *,
    num_steps: int = STEPS_MIN,
    seed: int = 0,
) -> TimedRun:
    """Runs a mode behind its warm-up, and measures whole periods of its plan.

    Args:
        rule: The mode; one whose weights are on shards.

    Raises:
        ConfigError: The mode does not fit the number of workers or slices.
        StuckError: A worker waits for something that never comes, which only a bug can cause.
    """
    rule = without_warmup(rule)
    rule.require_workers(deployment.num_workers)
    length = len(period(rule))
    lead, measured = length * -(-2 // length), length * -(-num_steps // length)
    with quiet():
        job = make_job(deployment, rule, compressor, steps=lead + measured, seed=seed)
        for worker in job.workers:
            job.loop.after(0.0, worker.start)
        job.loop.run()
    _require_over(job.workers, rule)
    over = [worker for worker in job.workers if worker.is_over]
    return _measure(deployment, job.loop, job.links, job.shards, over, lead)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedJob:
    """The parts of a job in time, before any event."""

    loop: Loop
    links: HostLinks  # The links between hosts.
    shards: list[TimedShard]  # The shards, with all workers joined and the weights loaded.
    workers: list[TimedWorker]  # The workers, which have yet to be started.
    make_worker: Callable[[int], TimedWorker]  # Returns another process for a rank.


def make_job(
    deployment: Deployment, rule: Rule, compressor: Compressor, *, steps: int, seed: int = 0
) -> TimedJob:
    """Returns a job whose workers make some steps of a mode."""
    loop = Loop()
    spec = table_of(deployment, rule, compressor)
    links = HostLinks(loop, deployment)
    cores = None if deployment.cores is None else Servers(loop, deployment.cores)
    numels = [each.numel for each in deployment.slices]
    shards = [
        TimedShard(
            index,
            spec,
            numels,
            deployment.rates,
            num_workers=deployment.num_workers,
            threads=Servers(loop, deployment.threads, cores),
            secured=lambda worker, host=host: (  # type: ignore[misc]
                deployment.tls and deployment.worker_hosts[worker] != host
            ),
        )
        for index, host in enumerate(deployment.shard_hosts)
    ]
    layout, optimizer = spec.layout(), OPTIMIZERS[spec.optimizer]()

    def make_worker(rank: int) -> TimedWorker:
        return TimedWorker(
            rank,
            deployment,
            layout,
            rule,
            compressor,
            optimizer,
            shards,
            links,
            loop,
            num_steps=steps,
            seed=seed,
            cores=cores,
        )

    return TimedJob(
        loop=loop,
        links=links,
        shards=shards,
        workers=[make_worker(rank) for rank in range(deployment.num_workers)],
        make_worker=make_worker,
    )


def _require_over(workers: list[TimedWorker], rule: Rule) -> None:
    """Raises a `StuckError` unless all workers have ended that a step waits for.

    Without the others no step closes for a worker that none of them waits for.
    """
    number = rule.fan_in(len(workers), len(workers)) if rule.by_step else len(workers)
    stuck = [worker.rank for worker in workers if not worker.is_over]
    if len(stuck) > len(workers) - number:
        raise StuckError(f"workers {stuck[:4]} wait for ever in {rule}")


def _measure(
    deployment: Deployment,
    loop: Loop,
    links: HostLinks,
    shards: list[TimedShard],
    workers: list[TimedWorker],
    lead: int,
) -> TimedRun:
    spans = [worker.ended_s[-1] - worker.ended_s[lead - 1] for worker in workers]
    numbers = [len(worker.ended_s) - lead for worker in workers]
    total_s = loop.now_s or 1.0
    computed_s = sum(
        deployment.compute_s * deployment.slow.get(worker.rank, 1.0) * len(worker.ended_s)
        for worker in workers
    )
    slowest = max(deployment.slow.get(worker.rank, 1.0) for worker in workers)
    busy = {
        "computing": slowest * deployment.compute_s * len(workers[0].ended_s) / total_s,
        "link out": max(one.busy_s for one in links.out.values()) / total_s,
        "link in": max(one.busy_s for one in links.into.values()) / total_s,
        "shard CPU": max(one.threads.busy_s for one in shards) / total_s / deployment.threads,
        "worker CPU": max(one.codec.busy_s + one.receiver.busy_s for one in workers) / total_s,
    }
    waited_s = sum(worker.waited_s for worker in workers)
    return TimedRun(
        step_s=max(span / number for span, number in zip(spans, numbers, strict=True)),
        waited=waited_s / (waited_s + computed_s),
        busy=busy,
        num_events=loop.num_events,
    )


def table_of(deployment: Deployment, rule: Rule, compressor: Compressor) -> OneElementTable:
    """Returns the table of a deployment, one element in each slice."""
    tensors = tuple(
        TensorSpec(name=str(index), shape=(1,), dtype="float32", compress=each.compress)
        for index, each in enumerate(deployment.slices)
    )
    slices = tuple(
        SliceSpec(
            index=index,
            shard=each.shard,
            start=index,
            stop=index + 1,
            segments=(TensorSegment(tensor=index, group=0, start=0, stop=1, tensor_start=0),),
            compress=each.compress,
        )
        for index, each in enumerate(deployment.slices)
    )
    return OneElementTable(
        name="model",
        tensors=tensors,
        num_shards=deployment.num_shards,
        rule=rule,
        compressor=compressor,
        optimizer=rule.outer_optimizer or _optimizer(deployment.num_state),
        num_groups=1,
        slices=slices,
    )


def _optimizer(num_state: int) -> str:
    """Returns the name of an optimizer with a number of state arrays."""
    return next(name for name, kind in OPTIMIZERS.items() if len(kind.state_names) == num_state)
