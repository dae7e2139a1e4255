"""The comparison of the best pipeline with data parallelism, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psworker.pipeline.plan.costs import Cost, ShardsCost
from psworker.pipeline.plan.partition import (
    Level,
    MemoryLimit,
    Partition,
    Partitioner,
    Stage,
    with_idle,
)
from psworker.pipeline.plan.profile import Layer, Profile
from psworker.pipeline.plan.timing import fastest

GAIN_MIN = 1.1  # Predictions are no better than a tenth: a smaller gain is none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The best pipeline beside one stage on all workers; bytes are of one minibatch.

    Attributes:
        pipeline: The fastest pipeline of two stages or more; None: none can be made, or fits.
        advised: It, one stage on all workers, or one worker; None: nothing fits into memory.
        data_parallel_s: Seconds of one stage on all workers, in the given mode.
        hidden_s: The same if all traffic is hidden behind computing, as far as the link allows.
        data_parallel: That stage.
        activation_nbytes: Activations and their gradients between stages of the pipeline.
        sync_nbytes: Pushed and pulled by its replicated stages.
        data_parallel_nbytes: Pushed and pulled by data parallelism.
        is_pipeline: Whether to pipeline.
        reason: Why.
    """

    pipeline: Partition | None
    advised: Partition | None
    data_parallel_s: float
    hidden_s: float
    data_parallel: Stage
    activation_nbytes: int
    sync_nbytes: int
    data_parallel_nbytes: int
    is_pipeline: bool
    reason: str

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return "pipeline" if self.is_pipeline else "do not pipeline"

    @property
    def moved_nbytes(self) -> int:
        """The bytes of a minibatch in the pipeline."""
        return self.activation_nbytes + self.sync_nbytes


@dataclass(frozen=True, slots=True)
class _Facts:
    """The alternatives, for the verdict."""

    layers: Sequence[Layer]
    workers: int
    limit_nbytes: float  # Memory of a worker.
    pipeline: Partition | None
    moved_nbytes: int
    stage: Stage  # The stage of data parallelism.
    parallel_s: float
    hidden_s: float
    parallel_nbytes: int

    @property
    def one_s(self) -> float:
        """Seconds of one worker alone."""
        return sum(layer.alone_s for layer in self.layers)


def compare(
    profile: Profile, levels: Sequence[Level], cost: Cost, memory: MemoryLimit | None = None
) -> Comparison:
    """Returns the best pipeline of a model beside data parallelism, and the verdict.

    On one level of links, with replicas on shards, the pipeline's seconds are those of a run on
    paper (`timing.py`); else those of its slowest stage.

    Args:
        profile: The model.
        levels: Workers of a machine first, then machines.
        cost: Cost of a stage.
        memory: Memory of a worker; None: no limit.
    """
    memory = memory or MemoryLimit()
    layers = profile.layers
    found = Partitioner(layers, levels, cost, memory)
    parallel_s, stage = found.data_parallel()
    hidden_s, _ = Partitioner(layers, levels, cost.hidden(), memory).data_parallel()
    if isinstance(cost, ShardsCost) and len(levels) == 1:
        pipeline = fastest(layers, levels[0], cost, memory)
    else:
        pipeline = with_idle(layers, levels, cost, memory, is_cut=True)
    stages = () if pipeline is None else pipeline.stages
    activations = 2 * sum(layers[stage.last].output_nbytes for stage in stages[:-1])
    sync = round(sum(cost.sync_nbytes(found.load(stage)) for stage in stages))
    parallel_nbytes = round(cost.sync_nbytes(found.load(stage)))
    facts = _Facts(
        layers,
        stage.replicas,
        memory.limit_nbytes,
        pipeline,
        activations + sync,
        stage,
        parallel_s,
        hidden_s,
        parallel_nbytes,
    )
    advised, reason = _judge(facts)
    return Comparison(
        pipeline=pipeline,
        advised=advised,
        data_parallel_s=parallel_s,
        hidden_s=hidden_s,
        data_parallel=stage,
        activation_nbytes=activations,
        sync_nbytes=sync,
        data_parallel_nbytes=parallel_nbytes,
        is_pipeline=advised is not None and advised is pipeline,
        reason=reason,
    )


def _judge(facts: _Facts) -> tuple[Partition | None, str]:
    """Returns the advised partition, and why."""
    stage, pipeline, limit = facts.stage, facts.pipeline, facts.limit_nbytes
    together = Partition((stage,), facts.parallel_s)
    if stage.memory_nbytes > limit:
        needs = f"data parallelism needs {size(stage.memory_nbytes)} of {size(limit)} of a worker"
        if pipeline is not None:
            return pipeline, f"{needs}; {_pipeline_text(facts, pipeline)}"
        return None, (
            f"nothing fits into {size(limit)} of a worker: data parallelism needs "
            f"{size(stage.memory_nbytes)}, and so many stages that each fits are more than there "
            "are workers or layers"
        )
    traffic = _traffic_text(facts)
    if pipeline is None:
        return together, f"one layer or one worker cannot be cut; {traffic}"
    shown = _pipeline_text(facts, pipeline)
    if _is_better_alone(facts, pipeline):
        alone = Partition((replace(stage, replicas=1),), facts.one_s)
        return alone, (
            f"one worker alone takes {ms(facts.one_s)} and moves nothing; {traffic}; the best "
            f"pipeline, {shown}: no gain over one worker"
        )
    gain = min(facts.parallel_s, facts.hidden_s) / pipeline.seconds
    if gain < GAIN_MIN:
        compared = f"only {gain:.2f} times as fast" if gain > 1 else "not faster"
        return together, f"{traffic}; the best pipeline, {shown}: {compared}"
    return pipeline, f"{shown}; {traffic}: {gain:.2f} times as fast"


def _is_better_alone(facts: _Facts, pipeline: Partition) -> bool:
    """Returns whether one worker is as fast as all of them, and has room for the model."""
    best_s = min(pipeline.seconds * GAIN_MIN, facts.hidden_s, facts.parallel_s)
    return facts.one_s < best_s and _fits_one(facts.layers, facts.limit_nbytes)


def _traffic_text(facts: _Facts) -> str:
    moves = f"moves {size(facts.parallel_nbytes)}"
    if facts.hidden_s >= facts.parallel_s:
        return f"data parallelism takes {ms(facts.parallel_s)} and {moves}"
    return (
        f"data parallelism takes {ms(facts.parallel_s)} if it waits for its traffic, "
        f"{ms(facts.hidden_s)} at best if it hides it behind computing (overlap=True, or mode "
        f"ssd), and {moves}"
    )


def _pipeline_text(facts: _Facts, pipeline: Partition) -> str:
    cuts = ", ".join(facts.layers[stage.last].name for stage in pipeline.stages[:-1])
    return (
        f"{plan_text(pipeline, facts.workers)}, cut after {cuts}, takes {ms(pipeline.seconds)} "
        f"and moves {size(facts.moved_nbytes)}"
    )


def plan_text(partition: Partition, workers: int) -> str:
    """Returns a plan's replicas, and how many workers it uses if some stay idle."""
    if partition.workers == workers:
        return partition.name
    return f"{partition.name} on {partition.workers} of {workers} workers"


def _fits_one(layers: Sequence[Layer], limit: float) -> bool:
    """Returns whether a worker has room for the whole model, without the optimizer's state."""
    weights = sum(layer.parameter_nbytes for layer in layers)
    held = sum(layer.held_nbytes for layer in layers)
    return MemoryLimit().stage_nbytes(weights, held, versions=1, replicas=1) <= limit


def ms(seconds: float) -> str:
    """Returns a time of one minibatch for people."""
    return f"{1e3 * seconds:.4g} ms"


def size(nbytes: float) -> str:
    """Returns a number of bytes for people, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} bytes"
