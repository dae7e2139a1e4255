"""Assignment: the weights become the sum of the pushed tensors. For named tensors and buffers.

Paceline's own: it has no learning rate and no state. The mean is left to the workers, which get the
number of tensors in the sum with it: a mean has lost the last bits of the sum.

    w = g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pscore.memory.kernels import kernel, move_idle, read_only
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, IntArray


class Assign(Optimizer):
    """The sum of the pushes takes the weights' place; `lr` is there by protocol and ignored."""

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
    bounds: IntArray,
    counts: IntArray,
    active: IntArray,
) -> None:
    move_idle(weights, out, bounds, active)
    for index in range(counts.size):
        if active[index] != 0:
            start, stop = bounds[index, 0], bounds[index, 1]
            out[start:stop] = grad[start:stop]
            counts[index] += 1
