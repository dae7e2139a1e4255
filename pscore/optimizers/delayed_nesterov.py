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

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel, read_only
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.types import FloatArray, HyperArray

MOMENTUM = 1  # Its column.
EVERY_MAX = 4096


class DelayedNesterov(Optimizer):
    """The delayed Nesterov step; `every` is N, `activation` is c."""

    name: ClassVar[str] = "delayed_nesterov"
    hyper_names: ClassVar[tuple[str, ...]] = ("lr", "momentum", "every", "activation")
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer", "move_sum")

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters, from a group that the mode has made."""
        return tuple(float(group[name]) for name in cls.hyper_names)

    def keeps_state(self, hyper: HyperArray) -> bool:
        """Returns whether there is no momentum in any group."""
        return not hyper[:, MOMENTUM].any()

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        kept = step.state_after
        if step.state_out is not None:
            for before, after in zip(step.state, step.state_out, strict=True):
                np.copyto(after, before)
        written = 0
        for index, (start, stop) in enumerate(step.segments.bounds.tolist()):
            if not step.active[index]:
                continue
            lr, momentum, every, activation = step.hyper[step.segments.groups[index]].tolist()
            every = min(max(1.0, every), EVERY_MAX)  # It came over the wire.
            np.copyto(step.out[written:start], step.weights[written:start])
            written = stop
            step.counts[index] += 1
            is_last = momentum > 0 and step.counts[index] % int(every) == 0
            along = 1.0 - activation * every + activation if is_last else activation
            _step(
                read_only(step.weights[start:stop]),
                step.out[start:stop],
                read_only(step.grad[start:stop]),
                kept[0][start:stop],
                kept[1][start:stop],
                np.float32(step.scale),
                np.float32(1.0 / every),
                np.float32(lr),
                np.float32(momentum),
                np.float32(along * momentum),
                is_last,
            )
        np.copyto(step.out[written:], step.weights[written:])


@kernel
def _step(
    weights: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    velocity: FloatArray,
    total: FloatArray,
    scale: np.float32,
    part: np.float32,
    lr: np.float32,
    momentum: np.float32,
    along: np.float32,
    is_last: bool,
) -> None:
    if momentum == 0.0:
        for i in range(len(out)):
            out[i] = weights[i] - lr * (grad[i] * scale * part)
        return
    for i in range(len(out)):
        move = grad[i] * scale
        total[i] += move
        if is_last:
            velocity[i] = momentum * velocity[i] + total[i] * part
            total[i] = 0.0
        out[i] = weights[i] - lr * (move * part + along * velocity[i])
