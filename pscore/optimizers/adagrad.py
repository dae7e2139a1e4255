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

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.base import BLOCK, DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray

LR, LR_DECAY, WEIGHT_DECAY, INITIAL, EPS, MAXIMIZE = range(6)


class Adagrad(Optimizer):
    """`torch.optim.Adagrad`: lr_decay, weight decay, initial_accumulator_value, eps, maximize."""

    name: ClassVar[str] = "adagrad"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"Adagrad": frozenset()}
    hyper_names: ClassVar[tuple[str, ...]] = (
        "lr",
        "lr_decay",
        "weight_decay",
        "initial_accumulator_value",
        "eps",
        "maximize",
    )
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    torch_has_step: ClassVar[bool] = True

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; flags are 0 or 1."""
        cls.refuse_flags(group, "differentiable")
        return tuple(float(group[name]) for name in cls.hyper_names)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(step.scale),
            read_only(step.state[0]),
            step.state_after[0],
            step.segments.bounds,
            step.segments.groups,
            step.counts,
            step.active,
            step.hyper,
        )

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
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    total: FloatArray,
    total_out: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    counts: IntArray,
    active: IntArray,
    hyper: HyperArray,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(total, total_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        row = hyper[groups[index]]
        start, stop = bounds[index, 0], bounds[index, 1]
        factor = np.float32(-scale if row[MAXIMIZE] != 0.0 else scale)
        lr = np.float32(row[LR] / (1.0 + counts[index] * row[LR_DECAY]))
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            if counts[index] == 0:
                total_out[low:high] = np.float32(row[INITIAL])
            else:
                move(total[low:high], total_out[low:high])
            _adagrad(
                out[low:high],
                grad[low:high],
                total_out[low:high],
                factor,
                np.float32(row[WEIGHT_DECAY]),
                lr,
                np.float32(row[EPS]),
            )
        counts[index] += 1


@kernel
def _adagrad(
    w: FloatArray,
    g: FloatArray,
    s: FloatArray,
    factor: np.float32,
    decay: np.float32,
    lr: np.float32,
    eps: np.float32,
) -> None:
    for i in range(w.size):
        d = g[i] * factor + decay * w[i]
        total = s[i] + d * d
        s[i] = total
        w[i] -= lr * (d / (np.sqrt(total) + eps))
