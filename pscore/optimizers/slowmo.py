"""The slow step of SlowMo: momentum over rounds, kept in units of gradients. An outer optimizer.

Jianyu Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020, arXiv:1910.00643, algorithm 1.

    d = scale * g                      g: sum of the workers' moves in the round
    u = slow_momentum * u + d / lr
    w = w - slow_lr * lr * u           slow_momentum = 0: w - slow_lr * d, and u is left alone

The division by the inner learning rate is what makes it another optimizer than SGD with momentum:
when a schedule changes lr, the momentum of earlier rounds shrinks along with it.

Differs from the paper: with lr = 0, as in the last step of a schedule, nothing is divided: the move
of the round, made by its steps with other rates, counts by w - slow_lr * d, and u decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray, HyperArray, SegmentTable


class SlowMo(Optimizer):
    """The slow step; `lr` is the inner learning rate of the round."""

    name: ClassVar[str] = "slowmo"
    adds: ClassVar[bool] = True
    hyper_names: ClassVar[tuple[str, ...]] = ("lr", "slow_lr", "slow_momentum")
    state_names: ClassVar[tuple[str, ...]] = ("slow_momentum_buffer",)

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        for index, row, part, direction, (buffer,) in step.parts():
            lr, slow_lr, slow_momentum = row
            step.counts[index] += 1
            if slow_momentum == 0.0:
                part.sub_(direction, alpha=slow_lr)
                continue
            buffer.mul_(slow_momentum)
            if lr:
                part.sub_(buffer.add_(direction, alpha=1.0 / lr), alpha=slow_lr * lr)
            else:
                part.sub_(direction, alpha=slow_lr)

    def infer(
        self,
        before: Any,
        after: Any,
        state: Sequence[Any],
        segments: SegmentTable,
        hyper: HyperArray,
    ) -> Any:
        """Solves a slow step for its gradient, the mean move; one with a `slow_lr` of 0 shows none.

        With an inner rate of 0 the step has no part of the momentum, which decays.
        """
        mean = before.new_zeros(before.shape)
        for (start, stop), group in zip(segments.bounds, segments.groups, strict=True):
            lr, slow_lr, slow_momentum = hyper[group].tolist()
            made, buffer = mean[start:stop], state[0][start:stop]
            if slow_lr:
                made.copy_(before[start:stop]).sub_(after[start:stop]).mul_(1.0 / slow_lr)
            buffer.mul_(slow_momentum or 1.0)
            if slow_momentum and lr and slow_lr:
                made.sub_(buffer, alpha=lr)
                buffer.add_(made, alpha=1.0 / lr)
        return mean


@kernel
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row = step.hyper[step.groups[index]]
    lr, slow_lr, slow_momentum = row[0], row[1], row[2]
    return (
        np.float32(step.scale),
        np.float32(1.0 / lr if lr != 0.0 else 0.0),
        np.float32(slow_lr * lr),
        np.float32(slow_lr),
        np.float32(slow_momentum),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    buffer = state[0]
    scale, inverse, rate, slow_lr, momentum = factors
    if momentum == 0.0 or inverse == 0.0:
        for i in range(w.size):
            w[i] -= slow_lr * (g[i] * scale)
        if momentum != 0.0:
            for i in range(w.size):
                buffer[i] *= momentum
        return
    for i in range(w.size):
        buffer[i] = momentum * buffer[i] + g[i] * scale * inverse
        w[i] -= rate * buffer[i]
