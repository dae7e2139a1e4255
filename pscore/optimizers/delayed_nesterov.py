"""The delayed Nesterov step: each arrival moves the weights, each N-th the momentum.

Bo Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135,
algorithm 3 (recalled; a public implementation, `DelayedNesterovOptimizer` in a fork of torchft, has
the same step for c = 0).

    d = scale * g;   s = s + d                         g: one worker's move
    N-th arrival:    v = m * v + s / N;   s = 0
                     w = w - lr * (d / N + (1 - c N + c) * m * v)
    any other:       w = w - lr * (d / N + c * m * v)

Over N arrivals that is one Nesterov step with the mean of the N moves: with c = 0 the momentum
moves the weights at once, at the N-th; with c = 1 / N in N equal parts.

Differs from the paper: with m = 0, where no momentum is kept, the state is left alone.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray, HyperArray

LR, MOMENTUM, EVERY, ACTIVATION = range(4)
EVERY_MAX = 4096


class DelayedNesterov(Optimizer):
    """The delayed Nesterov step; `every` is N, `activation` is c."""

    name: ClassVar[str] = "delayed_nesterov"
    adds: ClassVar[bool] = True
    hyper_names: ClassVar[tuple[str, ...]] = ("lr", "momentum", "every", "activation")
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer", "move_sum")

    def keeps_state(self, hyper: HyperArray) -> bool:
        """Returns whether there is no momentum in any group."""
        return not hyper[:, MOMENTUM].any()

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())


@kernel
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row = step.hyper[step.groups[index]]
    momentum, activation = row[MOMENTUM], row[ACTIVATION]
    every = min(row[EVERY], EVERY_MAX) if row[EVERY] > 1.0 else 1.0  # It came over the wire.
    is_last = momentum > 0 and (step.counts[index] + 1) % int(every) == 0
    along = 1.0 - activation * every + activation if is_last else activation
    return (
        np.float32(step.scale),
        np.float32(1.0 / every),
        np.float32(row[LR]),
        np.float32(momentum),
        np.float32(along * momentum),
        is_last,
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    velocity, total = state
    scale, part, lr, momentum, along, is_last = factors
    if momentum == 0.0:
        for i in range(w.size):
            w[i] -= lr * (g[i] * scale * part)
        return
    for i in range(w.size):
        move = g[i] * scale
        total[i] += move
        if is_last:
            velocity[i] = momentum * velocity[i] + total[i] * part
            total[i] = 0.0
        w[i] -= lr * (move * part + along * velocity[i])
