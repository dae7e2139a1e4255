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
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.base import BLOCK, DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray

LR, ALPHA, EPS, WEIGHT_DECAY, MOMENTUM, MAXIMIZE = range(6)


class RMSprop(Optimizer):
    """`torch.optim.RMSprop`: alpha, eps, weight decay, momentum, maximize.

    Attributes:
        is_centered: The gradient is divided by its standard deviation and not by its size.
    """

    name: ClassVar[str] = "rmsprop"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"RMSprop": frozenset()}
    hyper_names: ClassVar[tuple[str, ...]] = (
        "lr",
        "alpha",
        "eps",
        "weight_decay",
        "momentum",
        "maximize",
    )
    state_names: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer")
    torch_has_step: ClassVar[bool] = True
    is_centered: ClassVar[bool] = False

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; flags are 0 or 1."""
        cls.refuse_flags(group, "differentiable", centered=cls.is_centered)
        return tuple(float(group[name]) for name in cls.hyper_names)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(step.scale),
            read_only(step.state[0]),
            read_only(step.state[1]),
            read_only(step.state[-1]),  # Without a mean, the buffer again, which is not used.
            step.state_after[0],
            step.state_after[1],
            step.state_after[-1],
            step.segments.bounds,
            step.segments.groups,
            step.counts,
            step.active,
            step.hyper,
            self.is_centered,
        )

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

    name: ClassVar[str] = "centered_rmsprop"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"RMSprop": frozenset({"centered"})}
    state_names: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")
    is_centered: ClassVar[bool] = True


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    square: FloatArray,
    buffer: FloatArray,
    mean: FloatArray,
    square_out: FloatArray,
    buffer_out: FloatArray,
    mean_out: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    counts: IntArray,
    active: IntArray,
    hyper: HyperArray,
    is_centered: bool,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(square, square_out, bounds, active)
    move_idle(buffer, buffer_out, bounds, active)
    if is_centered:
        move_idle(mean, mean_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        counts[index] += 1
        row = hyper[groups[index]]
        start, stop = bounds[index, 0], bounds[index, 1]
        factor = np.float32(-scale if row[MAXIMIZE] != 0.0 else scale)
        decay, eps = np.float32(row[WEIGHT_DECAY]), np.float32(row[EPS])
        keep, take = np.float32(row[ALPHA]), np.float32(1.0 - row[ALPHA])
        momentum, lr = np.float32(row[MOMENTUM]), np.float32(row[LR])
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            move(square[low:high], square_out[low:high])
            move(buffer[low:high], buffer_out[low:high])
            w, g = out[low:high], grad[low:high]
            v, b = square_out[low:high], buffer_out[low:high]
            if is_centered:
                move(mean[low:high], mean_out[low:high])
                m = mean_out[low:high]
                _centered(w, g, v, b, m, factor, decay, keep, take, eps, momentum, lr)
            else:
                _plain(w, g, v, b, factor, decay, keep, take, eps, momentum, lr)


@kernel
def _plain(
    w: FloatArray,
    g: FloatArray,
    v: FloatArray,
    b: FloatArray,
    factor: np.float32,
    decay: np.float32,
    keep: np.float32,
    take: np.float32,
    eps: np.float32,
    momentum: np.float32,
    lr: np.float32,
) -> None:
    is_kept = momentum != np.float32(0.0)
    for i in range(w.size):
        d = g[i] * factor + decay * w[i]
        square = keep * v[i] + take * (d * d)
        v[i] = square
        push = momentum * b[i] + d / (np.sqrt(square) + eps)
        b[i] = push if is_kept else b[i]
        w[i] -= lr * push


@kernel
def _centered(
    w: FloatArray,
    g: FloatArray,
    v: FloatArray,
    b: FloatArray,
    m: FloatArray,
    factor: np.float32,
    decay: np.float32,
    keep: np.float32,
    take: np.float32,
    eps: np.float32,
    momentum: np.float32,
    lr: np.float32,
) -> None:
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
