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

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM_DECAY, DECOUPLED, MAXIMIZE = range(8)


class NAdam(Optimizer):
    """`torch.optim.NAdam`: betas, eps, weight decay of both kinds, momentum_decay, maximize."""

    name = "nadam"
    adds = True
    torch_classes = {"NAdam": frozenset()}
    hyper_names = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "momentum_decay",
        "decoupled_weight_decay",
        "maximize",
    )
    state_names = ("exp_avg", "exp_avg_sq", "mu_product")
    scalar_names = ("mu_product",)
    torch_has_step = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

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
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row, count = step.hyper[step.groups[index]], step.counts[index] + 1
    former = step.state[2][step.bounds[index, 0]] if count > 1 else np.float32(1.0)
    mu = momentum_at(row[BETA1], row[MOMENTUM_DECAY], count)
    mu_next = momentum_at(row[BETA1], row[MOMENTUM_DECAY], count + 1)
    now = np.float32(former * np.float32(mu))
    decay, is_decoupled = row[WEIGHT_DECAY], row[DECOUPLED] != 0.0
    return (
        now,
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
        np.float32(0.0 if is_decoupled else decay),
        np.float32(1.0 - row[LR] * decay if is_decoupled else 1.0),
        np.float32(1.0 - row[BETA1]),
        np.float32(row[BETA2]),
        np.float32(1.0 - row[BETA2]),
        np.float32(1.0 / (1.0 - row[BETA2] ** count)),
        np.float32(row[EPS]),
        np.float32(row[LR] * (1.0 - mu) / (1.0 - now)),
        np.float32(row[LR] * mu_next / (1.0 - now * mu_next)),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    m, v, product = state
    now, factor, decay, shrink, take1, keep2, take2, unbias2, eps, along, ahead = factors
    product[:] = now
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        m[i] = mean
        v[i] = square
        w[i] = weight - (along * d + ahead * mean) / (np.sqrt(square * unbias2) + eps)
