"""Adagrad, as `torch.optim.Adagrad` makes its steps.

John Duchi, Elad Hazan and Yoram Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization", JMLR 12, 2011, in the diagonal form; t counts the steps of each parameter
from 1.

    d = scale * g + weight_decay * w              (maximize: -g)
    s = s + d * d                                 before the first step: initial_accumulator_value
    w = w - lr / (1 + (t - 1) * lr_decay) * d / (sqrt(s) + eps)

Differs from the paper: weight decay and the decay of the learning rate, as in torch. Differs from
torch: a parameter group may have an initial_accumulator_value of its own; torch uses one for all.
"""

from __future__ import annotations

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray

LR, LR_DECAY, WEIGHT_DECAY, INITIAL, EPS, MAXIMIZE = range(6)


class Adagrad(Optimizer):
    """`torch.optim.Adagrad`: lr_decay, weight decay, initial_accumulator_value, eps, maximize."""

    name = "adagrad"
    adds = True
    torch_classes = {"Adagrad": frozenset()}
    hyper_names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")
    state_names = ("sum",)
    torch_has_step = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        counts = step.counts
        for index, row, part, direction, (total,) in step.parts():
            if counts[index] == 0:
                total.fill_(row[INITIAL])
            if row[MAXIMIZE]:
                direction = direction.neg()
            if row[WEIGHT_DECAY]:
                direction = direction.add(part, alpha=row[WEIGHT_DECAY])
            lr = row[LR] / (1.0 + int(counts[index]) * row[LR_DECAY])
            total.addcmul_(direction, direction)
            part.addcdiv_(direction, total.sqrt().add_(row[EPS]), value=-lr)
            counts[index] += 1


@kernel
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row, count = step.hyper[step.groups[index]], step.counts[index]
    return (
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
        np.float32(row[WEIGHT_DECAY]),
        np.float32(row[LR] / (1.0 + count * row[LR_DECAY])),
        np.float32(row[EPS]),
        count == 0,
        np.float32(row[INITIAL]),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    s = state[0]
    factor, decay, lr, eps, is_first, initial = factors
    if is_first:
        s[:] = initial
    for i in range(w.size):
        d = g[i] * factor + decay * w[i]
        total = s[i] + d * d
        s[i] = total
        w[i] -= lr * (d / (np.sqrt(total) + eps))
