"""NAdam, as `torch.optim.NAdam` makes its steps: Adam with Nesterov's momentum.

Timothy Dozat, "Incorporating Nesterov Momentum into Adam", ICLR workshop 2016, algorithm 2; t
counts the steps of each parameter from 1, and P is `mu_product`, 1 before the first step.

    d = scale * g + weight_decay * w              (maximize: -g; decoupled: w shrinks instead)
    mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)
    P = P * mu_t
    m = m + (1 - beta1) * (d - m)
    v = beta2 * v + (1 - beta2) * d * d
    a = sqrt(v / (1 - beta2^t)) + eps
    w = w - lr * (1 - mu_t) / (1 - P) * d / a - lr * mu_{t+1} / (1 - P * mu_{t+1}) * m / a

P depends on every earlier beta1, which a schedule may change, so it is kept. It is one number for
each parameter; here it is an array like the other state, because a parameter may lie in several
slices, and slices are cut again for another number of shards. That is 4 bytes for each element.

Differs from the paper: weight decay, which the paper does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, move, move_idle, read_only
from pscore.optimizers.base import BLOCK, DeviceStep, Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray, IntArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM_DECAY, DECOUPLED, MAXIMIZE = range(8)


class NAdam(Optimizer):
    """`torch.optim.NAdam`: betas, eps, weight decay of both kinds, momentum_decay, maximize."""

    name: ClassVar[str] = "nadam"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {"NAdam": frozenset()}
    hyper_names: ClassVar[tuple[str, ...]] = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "momentum_decay",
        "decoupled_weight_decay",
        "maximize",
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "mu_product")
    scalar_names: ClassVar[tuple[str, ...]] = ("mu_product",)
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
            read_only(step.state[2]),
            step.state_after[0],
            step.state_after[1],
            step.state_after[2],
            step.segments.bounds,
            step.segments.groups,
            step.counts,
            step.active,
            step.hyper,
        )

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device, without waiting for it."""
        counts = step.counts
        for index, row, part, direction, (mean, square, product) in step.parts():
            if counts[index] == 0:
                product.fill_(1.0)
            counts[index] += 1
            count = int(counts[index])
            if row[MAXIMIZE]:
                direction = direction.neg()
            if row[WEIGHT_DECAY] and row[DECOUPLED]:
                part.mul_(1.0 - row[LR] * row[WEIGHT_DECAY])
            elif row[WEIGHT_DECAY]:
                direction = direction.add(part, alpha=row[WEIGHT_DECAY])
            mu, mu_next = (
                momentum_at(row[BETA1], row[MOMENTUM_DECAY], t) for t in (count, count + 1)
            )
            product.mul_(mu)
            mean.lerp_(direction, 1.0 - row[BETA1])
            square.mul_(row[BETA2]).addcmul_(direction, direction, value=1.0 - row[BETA2])
            spread = square.div(1.0 - row[BETA2] ** count).sqrt_().add_(row[EPS])
            along = direction * (1.0 - mu) / (1.0 - product)
            part.addcdiv_(along, spread, value=-row[LR])
            part.addcdiv_(mean * mu_next / (1.0 - product * mu_next), spread, value=-row[LR])


@kernel
def momentum_at(beta1: float, momentum_decay: float, count: int) -> float:
    """Returns mu of step `count`, from 1."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, count * momentum_decay))


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    scale: float,
    mean: FloatArray,
    square: FloatArray,
    product: FloatArray,
    mean_out: FloatArray,
    square_out: FloatArray,
    product_out: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    counts: IntArray,
    active: IntArray,
    hyper: HyperArray,
) -> None:
    move_idle(weights, out, bounds, active)
    move_idle(mean, mean_out, bounds, active)
    move_idle(square, square_out, bounds, active)
    move_idle(product, product_out, bounds, active)
    for index in range(groups.size):
        if active[index] == 0:
            continue
        row = hyper[groups[index]]
        start, stop = bounds[index, 0], bounds[index, 1]
        former = product[start] if counts[index] else np.float32(1.0)
        counts[index] += 1
        mu = momentum_at(row[BETA1], row[MOMENTUM_DECAY], counts[index])
        mu_next = momentum_at(row[BETA1], row[MOMENTUM_DECAY], counts[index] + 1)
        now = np.float32(former * np.float32(mu))
        decay = row[WEIGHT_DECAY]
        is_decoupled = row[DECOUPLED] != 0.0
        correction2 = 1.0 - row[BETA2] ** counts[index]
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            move(weights[low:high], out[low:high])
            move(mean[low:high], mean_out[low:high])
            move(square[low:high], square_out[low:high])
            product_out[low:high] = now
            _nadam(
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
                np.float32(1.0 / correction2),
                np.float32(row[EPS]),
                np.float32(row[LR] * (1.0 - mu) / (1.0 - now)),
                np.float32(row[LR] * mu_next / (1.0 - now * mu_next)),
            )


@kernel
def _nadam(
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
    unbias2: np.float32,
    eps: np.float32,
    along: np.float32,
    ahead: np.float32,
) -> None:
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        w[i] = weight - (along * d + ahead * mean) / (np.sqrt(square * unbias2) + eps)
