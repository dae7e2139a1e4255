"""The comparison of the best pipeline with data parallelism, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psworker.pipeline.costs import Cost
from psworker.pipeline.partition import (
    Level,
    Memory,
    Partition,
    Partitioner,
    Stage,
    with_idle,
)
from psworker.pipeline.profile import Layer, Profile

GAIN_MIN = 1.1  # Predictions are good to a tenth: a smaller gain is none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A partition beside one stage on all workers; bytes are of one minibatch."""

    partition: Partition | None  # None: nothing fits into memory.
    pipeline_s: float  # The partition, or the best pipeline if the partition has one stage.
    data_parallel_s: float
    data_parallel: Stage
    activation_nbytes: int  # Activations and their gradients between stages.
    sync_nbytes: int  # Pushed and pulled by replicated stages.
    data_parallel_nbytes: int
    is_pipeline: bool
    reason: str

    @property
    def moved_nbytes(self) -> int:
        """The bytes of a minibatch in the partition."""
        return self.activation_nbytes + self.sync_nbytes


def compare(
    profile: Profile, levels: Sequence[Level], cost: Cost, memory: Memory | None = None
) -> Comparison:
    """Returns the best partition of a model beside data parallelism, and the verdict.

    Args:
        profile: The model.
        levels: Workers of a machine first, then machines.
        cost: Cost of a stage.
        memory: Memory of a worker; None: no limit.
    """
    memory = memory or Memory()
    found = Partitioner(profile.layers, levels, cost, memory)
    best = with_idle(profile.layers, levels, cost, memory)
    alone_s, alone = found.data_parallel()
    shown = (
        best
        if best is not None and len(best.stages) > 1
        else (with_idle(profile.layers, levels, cost, memory, is_cut=True))
    )
    stages = () if shown is None else shown.stages
    activations = 2 * sum(profile.layers[stage.last].output_nbytes for stage in stages[:-1])
    sync = sum(cost.sync_nbytes(found.load(stage)) for stage in stages)
    alone_nbytes = round(cost.sync_nbytes(found.load(alone)))
    is_pipeline, reason = _judge(
        profile.layers,
        best,
        shown,
        (alone_s, alone, alone_nbytes),
        (round(activations + sync), memory.limit_nbytes),
    )
    return Comparison(
        partition=best,
        pipeline_s=alone_s if shown is None else shown.seconds,
        data_parallel_s=alone_s,
        data_parallel=alone,
        activation_nbytes=activations,
        sync_nbytes=round(sync),
        data_parallel_nbytes=alone_nbytes,
        is_pipeline=is_pipeline,
        reason=reason,
    )


def _judge(
    layers: Sequence[Layer],
    best: Partition | None,
    shown: Partition | None,
    alone: tuple[float, Stage, int],
    sizes: tuple[int, float],
) -> tuple[bool, str]:
    """Returns whether to pipeline, and why."""
    alone_s, stage, alone_nbytes = alone
    moved, limit = sizes
    traffic = f"data parallelism takes {ms(alone_s)} and moves {size(alone_nbytes)}"
    if best is None:
        return False, (
            f"nothing fits into {size(limit)} of a worker: data parallelism needs "
            f"{size(stage.memory_nbytes)}, and so many stages that each fits are more than there "
            "are workers or layers"
        )
    if shown is None:
        return False, f"one layer or one worker cannot be cut; {traffic}"
    cuts = ", ".join(layers[item.last].name for item in shown.stages[:-1])
    pipeline = f"{shown.name}, cut after {cuts}, takes {ms(shown.seconds)} and moves {size(moved)}"
    if stage.memory_nbytes > limit:
        return True, (
            f"data parallelism needs {size(stage.memory_nbytes)} of {size(limit)} of a worker; "
            f"{pipeline}"
        )
    one_s = sum(layer.compute_s for layer in layers)
    if one_s < alone_s and one_s / shown.seconds < GAIN_MIN and _fits_one(layers, limit):
        return False, (
            f"one worker alone takes {ms(one_s)} and moves nothing; {traffic}; the best pipeline, "
            f"{pipeline}: no gain over one worker"
        )
    gain = alone_s / shown.seconds
    if gain < GAIN_MIN:
        compared = f"only {gain:.2f} times as fast" if gain > 1 else "not faster"
        return False, f"{traffic}; the best pipeline, {pipeline}: {compared}"
    return True, f"{pipeline}; {traffic}: {gain:.2f} times as fast"


def _fits_one(layers: Sequence[Layer], limit: float) -> bool:
    """Returns whether a worker has room for the whole model, without the optimizer's state."""
    weights = sum(layer.parameter_nbytes for layer in layers)
    held = sum(layer.held_nbytes for layer in layers)
    return Memory().stage_nbytes(weights, held, versions=1, replicas=1) <= limit


def ms(seconds: float) -> str:
    """Returns a time of one minibatch for people."""
    return f"{1e3 * seconds:.4g} ms"


def size(nbytes: float) -> str:
    """Returns a number of bytes for people, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} bytes"
