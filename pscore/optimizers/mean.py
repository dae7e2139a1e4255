"""The mean gradient as the table's value: the workers run the optimizer (`optimizer_on="worker"`).

Paceline's own. As after an all-reduce, every worker gets the same mean and makes the same step with
its own torch optimizer, so the weights of all workers stay equal, and shards hold none.

    value = scale * g                  NaN where no worker has a gradient: there is no mean

Before the first update the value is what rank 0 has uploaded: its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pscore.memory.kernels import kernel, read_only, sum_block
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.optimizers.driver import is_summed
from pscore.types import FloatArray, IntArray


class Mean(Optimizer):
    """The mean of the pushes takes the value's place; `lr` is there by protocol and is 0."""

    name = "mean"
    adds = True
    hyper_names = ("lr",)
    holds_weights = False

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters: those of the group are used on the worker alone."""
        return (0.0,)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            step.out,
            read_only(step.grad),
            float(step.scale),
            step.segments.bounds,
            step.counts,
            step.active,
            *step.sum_for_kernel(),
        )


@kernel
def _step(
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    bounds: IntArray,
    counts: IntArray,
    active: IntArray,
    others: IntArray,
    shares: FloatArray,
) -> None:
    factor = np.float32(scale)
    written = 0
    for index in range(counts.size):
        start, stop = bounds[index, 0], bounds[index, 1]
        out[written:start] = np.float32(0.0)
        if active[index] == 0:
            out[start:stop] = np.float32(np.nan)
        else:
            if is_summed(shares):
                sum_block(grad, others, shares, start, out[start:stop])
                _scaled(out[start:stop], out[start:stop], factor)
            else:
                _scaled(grad[start:stop], out[start:stop], factor)
            counts[index] += 1
        written = stop
    out[written:] = np.float32(0.0)


@kernel
def _scaled(source: FloatArray, target: FloatArray, factor: np.float32) -> None:
    for i in range(target.size):
        target[i] = source[i] * factor
