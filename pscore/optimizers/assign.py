"""Assignment: the weights become the mean of the pushed tensors. For named tensors and buffers.

Paceline's own: it has no learning rate and no state.

    w = scale * g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, read_only
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, IntArray


class Assign(Optimizer):
    """The mean of the pushes takes the weights' place; `lr` is there by protocol and ignored."""

    name: ClassVar[str] = "assign"
    hyper_names: ClassVar[tuple[str, ...]] = ("lr",)

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; buffers have no group, so `lr` may be missing."""
        return (float(group.get("lr", 0.0)),)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(step.scale),
            step.segments.bounds,
            step.counts,
            step.active,
        )

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        for index, _, part, pushed, _ in step.parts():
            part.copy_(pushed)
            step.counts[index] += 1


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    bounds: IntArray,
    counts: IntArray,
    active: IntArray,
) -> None:
    factor = np.float32(scale)
    written = 0
    for index in range(counts.size):
        start, stop = bounds[index, 0], bounds[index, 1]
        if active[index] == 0:
            continue
        _scaled(weights[written:start], out[written:start], np.float32(1.0))
        _scaled(grad[start:stop], out[start:stop], factor)
        written = stop
        counts[index] += 1
    _scaled(weights[written:], out[written:], np.float32(1.0))


@kernel
def _scaled(source: FloatArray, target: FloatArray, factor: np.float32) -> None:
    for i in range(target.size):
        target[i] = source[i] * factor
