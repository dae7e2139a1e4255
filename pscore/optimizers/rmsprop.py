"""RMSprop, as `torch.optim.RMSprop` makes its steps, plain and centered.

Tijmen Tieleman and Geoffrey Hinton, "Lecture 6.5: rmsprop", Coursera: Neural Networks for Machine
Learning, 2012. The centered form and the momentum are those of Alex Graves, "Generating Sequences
With Recurrent Neural Networks", arXiv:1308.0850, section 4.2, equations 38 to 45.

    d = scale * g + weight_decay * w              (maximize: -g)
    v = alpha * v + (1 - alpha) * d * d
    m = m + (1 - alpha) * (d - m)                 centered only
    u = d / (sqrt(v) + eps)                       centered: sqrt(v - m * m) instead of sqrt(v)
    b = momentum * b + u
    w = w - lr * b                                without momentum: lr * u

Differs from the paper: eps is added outside of the root, and the learning rate is no part of the
buffer, as in torch. Differs from torch: where rounding makes the variance v - m * m negative it
counts as 0; torch's root of it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray

LR, ALPHA, EPS, WEIGHT_DECAY, MOMENTUM, MAXIMIZE = range(6)


class RMSprop(Optimizer):
    """`torch.optim.RMSprop`: alpha, eps, weight decay, momentum, maximize.

    Attributes:
        is_centered: The gradient is divided by its standard deviation and not by its size.
    """

    name = "rmsprop"
    adds = True
    torch_classes = {"RMSprop": frozenset()}
    hyper_names = ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize")
    state_names: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer")
    torch_has_step = True
    is_centered: ClassVar[bool] = False

    @classmethod
    def fixed_flags(cls) -> Mapping[str, bool]:
        """Returns the flag by which the two optimizers of this file differ."""
        return {"centered": cls.is_centered}

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        for index, row, part, direction, (square, buffer, *mean) in step.parts():
            if row[MAXIMIZE]:
                direction = direction.neg()
            if row[WEIGHT_DECAY]:
                direction = direction.add(part, alpha=row[WEIGHT_DECAY])
            square.mul_(row[ALPHA]).addcmul_(direction, direction, value=1.0 - row[ALPHA])
            variance = square
            if mean:
                mean[0].lerp_(direction, 1.0 - row[ALPHA])
                variance = square.addcmul(mean[0], mean[0], value=-1.0).clamp_(min=0.0)
            spread = variance.sqrt().add_(row[EPS])
            if row[MOMENTUM]:
                buffer.mul_(row[MOMENTUM]).addcdiv_(direction, spread)
                part.add_(buffer, alpha=-row[LR])
            else:
                part.addcdiv_(direction, spread, value=-row[LR])
            step.counts[index] += 1


class CenteredRMSprop(RMSprop):
    """`torch.optim.RMSprop` with `centered=True` in every group."""

    name = "centered_rmsprop"
    torch_classes = {"RMSprop": frozenset({"centered"})}
    state_names = ("square_avg", "momentum_buffer", "grad_avg")
    is_centered = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step_centered(step.for_kernel())


@kernel
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row = step.hyper[step.groups[index]]
    return (
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
        np.float32(row[WEIGHT_DECAY]),
        np.float32(row[ALPHA]),
        np.float32(1.0 - row[ALPHA]),
        np.float32(row[EPS]),
        np.float32(row[MOMENTUM]),
        np.float32(row[LR]),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    v, b = state
    factor, decay, keep, take, eps, momentum, lr = factors
    is_kept = momentum != np.float32(0.0)
    for i in range(w.size):
        d = g[i] * factor + decay * w[i]
        square = keep * v[i] + take * (d * d)
        v[i] = square
        push = momentum * b[i] + d / (np.sqrt(square) + eps)
        b[i] = push if is_kept else b[i]
        w[i] -= lr * push


@kernel
def _step_centered(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change_centered)


@kernel
def _change_centered(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    v, b, m = state
    factor, decay, keep, take, eps, momentum, lr = factors
    is_kept = momentum != np.float32(0.0)
    for i in range(w.size):
        d = g[i] * factor + decay * w[i]
        square = keep * v[i] + take * (d * d)
        mean = m[i] + take * (d - m[i])
        v[i] = square
        m[i] = mean
        variance = square - mean * mean
        variance = variance if variance > np.float32(0.0) else np.float32(0.0)
        push = momentum * b[i] + d / (np.sqrt(variance) + eps)
        b[i] = push if is_kept else b[i]
        w[i] -= lr * push
