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

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, MAXIMIZE = range(7)
RHO_MIN = 5.0  # Steps at or below it are not adaptive.


class RAdam(Optimizer):
    """`torch.optim.RAdam`: betas, eps, weight decay of both kinds, maximize."""

    name = "radam"
    adds = True
    torch_classes = {"RAdam": frozenset()}
    hyper_names = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "maximize",
    )
    state_names = ("exp_avg", "exp_avg_sq")
    torch_has_step = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

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
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row, count = step.hyper[step.groups[index]], step.counts[index] + 1
    decay, is_decoupled = row[WEIGHT_DECAY], row[DECOUPLED] != 0.0
    rate = row[LR] / (1.0 - row[BETA1] ** count)
    factor = rectification(row[BETA2], count)
    return (
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
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
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    m, v = state
    factor, decay, shrink, take1, keep2, take2, step_size, eps, is_adaptive = factors
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        spread = np.sqrt(square) + eps if is_adaptive else np.float32(1.0)
        w[i] = weight - step_size * (mean / spread)
