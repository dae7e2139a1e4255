"""Assignment: the weights become the mean of the pushed tensors. For buffers and averaged models.

Paceline's own: it has no learning rate and no state.

    w = scale * g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pscore.memory.kernels import kernel, move_idle, read_only, sum_block
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import is_summed
from pscore.types import FloatArray, IntArray


class Assign(Optimizer):
    """The mean of the pushes takes the weights' place; `lr` is there by protocol and ignored."""

    name = "assign"
    assigns = True
    adds = True
    hyper_names = ("lr",)

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; buffers have no group, so `lr` may be missing."""
        return (float(group.get("lr", 0.0)),)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        self._assign(step, step.scale)

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        for index, _, part, pushed, _ in step.parts():
            part.copy_(pushed)
            step.counts[index] += 1

    @staticmethod
    def _assign(step: SliceStep, scale: float) -> None:
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(scale),
            step.segments.bounds,
            step.counts,
            step.active,
            *step.sum_for_kernel(),
        )


@kernel
def _step(
    weights: FloatArray,
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
    move_idle(weights, out, bounds, active)
    for index in range(counts.size):
        if active[index] != 0:
            start, stop = bounds[index, 0], bounds[index, 1]
            if is_summed(shares):
                sum_block(grad, others, shares, start, out[start:stop])
                for i in range(start, stop):
                    out[i] *= factor
            else:
                for i in range(start, stop):
                    out[i] = grad[i] * factor
            counts[index] += 1
