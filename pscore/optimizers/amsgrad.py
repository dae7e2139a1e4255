"""AMSGrad, as `torch.optim.Adam` and `torch.optim.AdamW` make their steps with `amsgrad=True`.

Sashank Reddi, Satyen Kale and Sanjiv Kumar, "On the Convergence of Adam and Beyond", ICLR 2018,
arXiv:1904.09237, algorithm 2; t counts the steps of each parameter from 1.

    d, m and v as in `adam.py`
    x = max(x, v)
    w = w - lr / (1 - beta1^t) * m / (sqrt(x) / sqrt(1 - beta2^t) + eps)

Differs from the paper: the corrections of the bias, weight decay and eps, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.adam import (
    BETA1,
    BETA2,
    EPS,
    LR,
    MAXIMIZE,
    WEIGHT_DECAY,
    Adam,
    corrections,
)
from pscore.optimizers.base import BLOCK, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray


class AMSGrad(Adam):
    """`torch.optim.Adam` with `amsgrad=True` in every group."""

    name: ClassVar[str] = "amsgrad"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"Adam": frozenset({"amsgrad"})}
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    keeps_largest: ClassVar[bool] = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(
            read_only(step.weights),
            step.out,
            read_only(step.grad),
            float(step.scale),
            read_only(step.state[0]),
            read_only(step.state[1]),
            read_only(step.state[2]),
            step.state_after[0],
            step.state_after[1],
            step.state_after[2],
            step.segments.bounds,
            step.segments.groups,
            step.counts,
            step.active,
            step.hyper,
            self.decoupled,
        )


class AMSGradW(AMSGrad):
    """`torch.optim.AdamW` with `amsgrad=True`, and `Adam` with decoupled weight decay as well."""

    name: ClassVar[str] = "amsgradw"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {
        "AdamW": frozenset({"amsgrad"}),
        "Adam": frozenset({"amsgrad", "decoupled_weight_decay"}),
    }
    decoupled: ClassVar[bool] = True


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    mean: FloatArray,
    square: FloatArray,
    largest: FloatArray,
    mean_out: FloatArray,
    square_out: FloatArray,
    largest_out: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    counts: IntArray,
    active: IntArray,
    hyper: HyperArray,
    decoupled: bool,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(mean, mean_out, bounds, active)
    move_idle(square, square_out, bounds, active)
    move_idle(largest, largest_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        counts[index] += 1
        row = hyper[groups[index]]
        correction1, correction2 = corrections(row[BETA1], row[BETA2], counts[index])
        start, stop = bounds[index, 0], bounds[index, 1]
        decay = row[WEIGHT_DECAY]
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            move(mean[low:high], mean_out[low:high])
            move(square[low:high], square_out[low:high])
            move(largest[low:high], largest_out[low:high])
            _amsgrad(
                out[low:high],
                grad[low:high],
                mean_out[low:high],
                square_out[low:high],
                largest_out[low:high],
                np.float32(-scale if row[MAXIMIZE] != 0.0 else scale),
                np.float32(0.0 if decoupled else decay),
                np.float32(1.0 - row[LR] * decay if decoupled else 1.0),
                np.float32(1.0 - row[BETA1]),
                np.float32(row[BETA2]),
                np.float32(1.0 - row[BETA2]),
                np.float32(row[LR] / correction1),
                np.float32(correction2),
                np.float32(row[EPS]),
            )


@kernel
def _amsgrad(
    w: FloatArray,
    g: FloatArray,
    m: FloatArray,
    v: FloatArray,
    x: FloatArray,
    factor: np.float32,
    decay: np.float32,
    shrink: np.float32,
    take1: np.float32,
    keep2: np.float32,
    take2: np.float32,
    step_size: np.float32,
    correction2: np.float32,
    eps: np.float32,
) -> None:
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        largest = square if square > x[i] else x[i]
        m[i] = mean
        v[i] = square
        x[i] = largest
        w[i] = weight - step_size * (mean / (np.sqrt(largest) / correction2 + eps))
