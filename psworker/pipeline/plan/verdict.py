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
    """The best pipeline beside one stage on all workers; bytes are of one minibatch."""

    # The fastest pipeline of two stages or more; None: none can be made, or fits.
    pipeline: Partition | None
    data_parallel_s: float  # Seconds of one stage on all workers, in the given mode.
    # The same if all traffic is hidden behind computing, as far as the link allows.
    hidden_s: float
    data_parallel: Stage  # That stage.
    activation_nbytes: int  # Activations and their gradients between stages of the pipeline.
    sync_nbytes: int  # Pushed and pulled by its replicated stages.
    data_parallel_nbytes: int  # Pushed and pulled by data parallelism.
    # The pipeline, one stage on all workers, or one worker; None: nothing fits into memory.
    advised: Partition | None = None
    reason: str = ""

    @property
    def is_pipeline(self) -> bool:
        """Whether to pipeline."""
        return self.advised is not None and self.advised is self.pipeline

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return "pipeline" if self.is_pipeline else "do not pipeline"

    @property
    def moved_nbytes(self) -> int:
        """The bytes of a minibatch in the pipeline."""
        return self.activation_nbytes + self.sync_nbytes


def compare(
    profile: Profile, levels: Sequence[Level], cost: Cost, memory: MemoryLimit | None = None
) -> Comparison:
    """Returns the best pipeline of a model beside data parallelism, and the verdict.

    On one level of links, with replicas on shards, the pipeline's seconds are those of a run on
    paper (`timing.py`); else those of its slowest stage.

    Args:
        levels: Workers of a machine first, then machines.
        memory: Memory of a worker; None: no limit.
    """
    memory = memory or MemoryLimit()
    layers = profile.layers
    partitioner = Partitioner(layers, levels, cost, memory)
    parallel_s, stage = partitioner.data_parallel()
    hidden_s, _ = Partitioner(layers, levels, cost.hidden(), memory).data_parallel()
    if isinstance(cost, ShardsCost) and len(levels) == 1:
        pipeline = fastest(layers, levels[0], cost, memory)
    else:
        pipeline = with_idle(layers, levels, cost, memory, is_cut=True)
    stages = () if pipeline is None else pipeline.stages
    draft = Comparison(
        pipeline=pipeline,
        data_parallel_s=parallel_s,
        hidden_s=hidden_s,
        data_parallel=stage,
        activation_nbytes=2 * sum(layers[one.last].output_nbytes for one in stages[:-1]),
        sync_nbytes=round(sum(cost.sync_nbytes(partitioner.load(one)) for one in stages)),
        data_parallel_nbytes=round(cost.sync_nbytes(partitioner.load(stage))),
    )
    advised, reason = _judge(draft, layers, memory.limit_nbytes)
    return replace(draft, advised=advised, reason=reason)


def _judge(
    found: Comparison, layers: Sequence[Layer], limit_nbytes: float
) -> tuple[Partition | None, str]:
    """Returns the advised partition, and why."""
    stage, pipeline = found.data_parallel, found.pipeline
    together = Partition((stage,), found.data_parallel_s)
    shown = "" if pipeline is None else _pipeline_text(found, pipeline, layers)
    if stage.memory_nbytes > limit_nbytes:
        needs = f"data parallelism needs {size(stage.memory_nbytes)}"
        if pipeline is not None:
            return pipeline, f"{needs} of {size(limit_nbytes)} of a worker; {shown}"
        return None, (
            f"nothing fits into {size(limit_nbytes)} of a worker: {needs}, and so many stages "
            "that each fits are more than there are workers or layers"
        )
    traffic = _traffic_text(found)
    if pipeline is None:
        return together, f"one layer or one worker cannot be cut; {traffic}"
    one_s = sum(layer.alone_s for layer in layers)
    best_s = min(pipeline.seconds * GAIN_MIN, found.hidden_s, found.data_parallel_s)
    if one_s < best_s and _fits_one(layers, limit_nbytes):
        alone = Partition((replace(stage, replicas=1),), one_s)
        return alone, (
            f"one worker alone takes {ms(one_s)} and moves nothing; {traffic}; the best "
            f"pipeline, {shown}: no gain over one worker"
        )
    gain = min(found.data_parallel_s, found.hidden_s) / pipeline.seconds
    if gain < GAIN_MIN:
        compared = f"only {gain:.2f} times as fast" if gain > 1 else "not faster"
        return together, f"{traffic}; the best pipeline, {shown}: {compared}"
    return pipeline, f"{shown}; {traffic}: {gain:.2f} times as fast"


def _traffic_text(found: Comparison) -> str:
    moves = f"moves {size(found.data_parallel_nbytes)}"
    if found.hidden_s >= found.data_parallel_s:
        return f"data parallelism takes {ms(found.data_parallel_s)} and {moves}"
    return (
        f"data parallelism takes {ms(found.data_parallel_s)} if it waits for its traffic, "
        f"{ms(found.hidden_s)} at best if it hides it behind computing (overlap=True, or mode "
        f"ssd), and {moves}"
    )


def _pipeline_text(found: Comparison, pipeline: Partition, layers: Sequence[Layer]) -> str:
    cuts = ", ".join(layers[stage.last].name for stage in pipeline.stages[:-1])
    used, workers = pipeline.workers, found.data_parallel.replicas
    idle = "" if used == workers else f" on {used} of {workers} workers"
    return (
        f"{pipeline.name}{idle}, cut after {cuts}, takes {ms(pipeline.seconds)} "
        f"and moves {size(found.moved_nbytes)}"
    )


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
