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
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.base import BLOCK, DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MAXIMIZE = range(6)


class Adam(Optimizer):
    """`torch.optim.Adam`: betas, eps, weight decay, maximize.

    Attributes:
        decoupled: Weight decay shrinks the weights and is not a part of the gradient.
        keeps_largest: The third state array is the largest second moment so far (`amsgrad.py`).
    """

    name: ClassVar[str] = "adam"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"Adam": frozenset()}
    hyper_names: ClassVar[tuple[str, ...]] = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "maximize",
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    torch_has_step: ClassVar[bool] = True
    decoupled: ClassVar[bool] = False
    keeps_largest: ClassVar[bool] = False

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters; flags are 0 or 1."""
        cls.refuse_flags(
            group,
            "differentiable",
            amsgrad=cls.keeps_largest,
            decoupled_weight_decay=cls.decoupled,
        )
        beta1, beta2 = group["betas"]
        return (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(group["maximize"]),
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
            self.decoupled,
        )

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
    decoupled: bool,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(mean, mean_out, bounds, active)
    move_idle(square, square_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        start, stop = bounds[index, 0], bounds[index, 1]
        row = hyper[groups[index]]
        counts[index] += 1
        correction1, correction2 = corrections(row[BETA1], row[BETA2], counts[index])
        factor = np.float32(-scale if row[MAXIMIZE] != 0.0 else scale)
        decay = np.float32(0.0 if decoupled else row[WEIGHT_DECAY])
        shrink = np.float32(1.0 - row[LR] * row[WEIGHT_DECAY] if decoupled else 1.0)
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            move(mean[low:high], mean_out[low:high])
            move(square[low:high], square_out[low:high])
            _adam(
                out[low:high],
                grad[low:high],
                mean_out[low:high],
                square_out[low:high],
                factor,
                decay,
                shrink,
                np.float32(1.0 - row[BETA1]),
                np.float32(row[BETA2]),
                np.float32(1.0 - row[BETA2]),
                np.float32(row[LR] / correction1),
                np.float32(correction2),
                np.float32(row[EPS]),
            )


@kernel
def _adam(
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
    correction2: np.float32,
    eps: np.float32,
) -> None:
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        w[i] = weight - step_size * (mean / (np.sqrt(square) / correction2 + eps))
