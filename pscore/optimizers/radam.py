"""RAdam, as `torch.optim.RAdam` makes its steps: Adam without a warm-up.

Liyuan Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020,
arXiv:1908.03265, algorithm 2; t counts the steps of each parameter from 1.

    d = scale * g + weight_decay * w              (maximize: -g; decoupled: w shrinks instead)
    m = m + (1 - beta1) * (d - m)
    v = beta2 * v + (1 - beta2) * d * d
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2^t / (1 - beta2^t)
    r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
    w = w - lr * m / (1 - beta1^t) * r * sqrt(1 - beta2^t) / (sqrt(v) + eps)      where rho > 5
    w = w - lr * m / (1 - beta1^t)                                                elsewhere

Differs from the paper: weight decay and eps, and the adaptive step begins at rho > 5 and not 4, as
in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.base import BLOCK, DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, MAXIMIZE = range(7)


RHO_MIN = 5.0  # Steps at or below it are not adaptive.


class RAdam(Optimizer):
    """`torch.optim.RAdam`: betas, eps, weight decay of both kinds, maximize."""

    name: ClassVar[str] = "radam"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"RAdam": frozenset()}
    hyper_names: ClassVar[tuple[str, ...]] = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "maximize",
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    torch_has_step: ClassVar[bool] = True

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; flags are 0 or 1."""
        cls.refuse_flags(group, "differentiable")
        return (
            float(group["lr"]),
            float(group["betas"][0]),
            float(group["betas"][1]),
            *(float(group[name]) for name in cls.hyper_names[EPS:]),
        )

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(step.scale),
            read_only(step.state[0]),
            read_only(step.state[1]),
            step.state_after[0],
            step.state_after[1],
            step.segments.bounds,
            step.segments.groups,
            step.counts,
            step.active,
            step.hyper,
        )

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        for index, row, part, direction, (mean, square) in step.parts():
            step.counts[index] += 1
            count = int(step.counts[index])
            if row[MAXIMIZE]:
                direction = direction.neg()
            if row[WEIGHT_DECAY] and row[DECOUPLED]:
                part.mul_(1.0 - row[LR] * row[WEIGHT_DECAY])
            elif row[WEIGHT_DECAY]:
                direction = direction.add(part, alpha=row[WEIGHT_DECAY])
            mean.lerp_(direction, 1.0 - row[BETA1])
            square.mul_(row[BETA2]).addcmul_(direction, direction, value=1.0 - row[BETA2])
            rate = row[LR] / (1.0 - row[BETA1] ** count)
            factor = rectification(row[BETA2], count)
            if factor:
                part.addcdiv_(mean, square.sqrt().add_(row[EPS]), value=-rate * factor)
            else:
                part.add_(mean, alpha=-rate)


@kernel
def rectification(beta2: float, count: int) -> float:
    """Returns r * sqrt(1 - beta2^t) of step t = `count`, from 1; 0 where rho is at most 5."""
    correction2 = 1.0 - beta2**count
    rho_inf = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_inf - 2.0 * count * (1.0 - correction2) / correction2
    if rho <= RHO_MIN:
        return 0.0
    top = (rho - 4.0) * (rho - 2.0) * rho_inf
    return math.sqrt(top / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho) * correction2)


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    mean: FloatArray,
    square: FloatArray,
    mean_out: FloatArray,
    square_out: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    counts: IntArray,
    active: IntArray,
    hyper: HyperArray,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(mean, mean_out, bounds, active)
    move_idle(square, square_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        counts[index] += 1
        row = hyper[groups[index]]
        start, stop = bounds[index, 0], bounds[index, 1]
        decay = row[WEIGHT_DECAY]
        is_decoupled = row[DECOUPLED] != 0.0
        rate = row[LR] / (1.0 - row[BETA1] ** counts[index])
        factor = rectification(row[BETA2], counts[index])
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            move(mean[low:high], mean_out[low:high])
            move(square[low:high], square_out[low:high])
            _radam(
                out[low:high],
                grad[low:high],
                mean_out[low:high],
                square_out[low:high],
                np.float32(-scale if row[MAXIMIZE] != 0.0 else scale),
                np.float32(0.0 if is_decoupled else decay),
                np.float32(1.0 - row[LR] * decay if is_decoupled else 1.0),
                np.float32(1.0 - row[BETA1]),
                np.float32(row[BETA2]),
                np.float32(1.0 - row[BETA2]),
                np.float32(rate * factor if factor else rate),
                np.float32(row[EPS]),
                factor != 0.0,
            )


@kernel
def _radam(
    w: FloatArray,
    g: FloatArray,
    m: FloatArray,
    v: FloatArray,
    factor: np.float32,
    decay: np.float32,
    shrink: np.float32,
    take1: np.float32,
    keep2: np.float32,
    take2: np.float32,
    step_size: np.float32,
    eps: np.float32,
    is_adaptive: bool,
) -> None:
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        spread = np.sqrt(square) + eps if is_adaptive else np.float32(1.0)
        w[i] = weight - step_size * (mean / spread)
