"""Adam, as `torch.optim.Adam` makes its steps; weight decay is a part of the gradient (L2).

Diederik Kingma and Jimmy Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015,
arXiv:1412.6980; t counts the steps of each parameter from 1.

    d = scale * g + weight_decay * w              (maximize: -g)
    m = m + (1 - beta1) * (d - m)
    v = beta2 * v + (1 - beta2) * d * d
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Differs from the paper: weight decay, which the paper does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MAXIMIZE = range(6)


class Adam(Optimizer):
    """`torch.optim.Adam`: betas, eps, weight decay, maximize.

    Attributes:
        decoupled: Weight decay shrinks the weights and is not a part of the gradient.
        keeps_largest: The third state array is the largest second moment so far (`amsgrad.py`).
    """

    name = "adam"
    adds = True
    torch_classes = {"Adam": frozenset()}
    hyper_names = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    torch_has_step = True
    decoupled: ClassVar[bool] = False
    keeps_largest: ClassVar[bool] = False

    @classmethod
    def fixed_flags(cls) -> Mapping[str, bool]:
        """Returns the flags by which the optimizers of this file and of `amsgrad.py` differ."""
        return {"amsgrad": cls.keeps_largest, "decoupled_weight_decay": cls.decoupled}

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel(self.decoupled))

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        if step.kernels is not None:
            step.kernels.adam_step(step, decoupled=self.decoupled)
            return
        for index, row, part, direction, (mean, square, *largest) in step.parts():
            lr, beta1, beta2, eps, weight_decay, maximize = row
            step.counts[index] += 1
            count = int(step.counts[index])
            if maximize:
                direction = direction.neg()
            if weight_decay and self.decoupled:
                part.mul_(1.0 - lr * weight_decay)
            elif weight_decay:
                direction = direction.add(part, alpha=weight_decay)
            mean.lerp_(direction, 1.0 - beta1)
            square.mul_(beta2).addcmul_(direction, direction, value=1.0 - beta2)
            if self.keeps_largest:
                square = largest[0].copy_(largest[0].maximum(square))
            spread = square.sqrt().div_((1.0 - beta2**count) ** 0.5).add_(eps)
            part.addcdiv_(mean, spread, value=-lr / (1.0 - beta1**count))


@kernel
def corrections(beta1: float, beta2: float, count: int) -> tuple[float, float]:
    """Returns the corrections of both moments after `count` steps: `1 - beta1^t`, and the root."""
    return 1.0 - beta1**count, np.sqrt(1.0 - beta2**count)


@kernel
def compute_factors(step: KernelStep, index: int) -> Factors:
    """Returns the factors of a parameter in its next step, for `amsgrad.py` as well."""
    row, count = step.hyper[step.groups[index]], step.counts[index] + 1
    correction1, correction2 = corrections(row[BETA1], row[BETA2], count)
    decay = row[WEIGHT_DECAY]
    return (
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
        np.float32(0.0 if step.decoupled else decay),
        np.float32(1.0 - row[LR] * decay if step.decoupled else 1.0),
        np.float32(1.0 - row[BETA1]),
        np.float32(row[BETA2]),
        np.float32(1.0 - row[BETA2]),
        np.float32(row[LR] / correction1),
        np.float32(correction2),
        np.float32(row[EPS]),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    m, v = state
    factor, decay, shrink, take1, keep2, take2, step_size, correction2, eps = factors
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        w[i] = weight - step_size * (mean / (np.sqrt(square) / correction2 + eps))
