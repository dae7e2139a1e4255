"""Delay-compensated local step: corrects a worker's gradient for the last move of the weights.

The local updates of Yemao Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for
Distributed Training", arXiv:2005.06728, after DC-ASGD (Zheng et al., arXiv:1609.08326), as read in
the authors' code (repository CynthiaProtector/OD-SGD).

    w = w - lr_scale * lr * (g + weight_decay * w + L * g * g * (w - w_old))    (maximize: -g)

    dc:           L = variance_control                                          lambda
    dc_adaptive:  L = adaptive_control / sqrt(MS)                               lambda_0
                  MS = decay * MS + (1 - decay) * g * g + 1e-7
    w_old = w before this step, for the next one; a pull without a local step before it sets it too

With one local step per pull (OD-SGD) w is W^t and w_old is W^{t-1}, the pull before; with several
it is the weights one local step earlier, as in the code. In the first step of all L is 0.

Differs from the paper, of which only the abstract and the code were read: gradients are means, so
that the learning rate is `lr_scale` times the optimizer's and follows its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pscore.local.base import (
    ElementwiseUpdate,
    LocalSlice,
    SegmentsStep,
    change_segments,
    state_array,
)
from pscore.memory.kernels import kernel
from pscore.optimizers.driver import Arrays
from pscore.plugins import require_range
from pscore.types import FloatArray

FACTOR_MAX = 1e6
EPSILON = 1e-7


class DC(ElementwiseUpdate):
    """The constant form.

    Args:
        lr_scale: Learning rate of the local step over the optimizer's.
        variance_control: lambda, without unit.
    """

    name = "dc"
    device_kernel = "local_dc"

    def __init__(self, lr_scale: float = 1.0, variance_control: float = 0.04) -> None:
        require_range("dc.lr_scale", lr_scale, 0.0, FACTOR_MAX)
        require_range("dc.variance_control", variance_control, 0.0, FACTOR_MAX)
        self.lr_scale = float(lr_scale)
        self.control = float(variance_control)

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step; a segment without a gradient has just its weights kept."""
        (old, *_), bounds = self.arrays(part), part.segments.bounds
        for start, stop in bounds[part.active == 0].tolist():
            old[start:stop].copy_(part.weights[start:stop])
        super().update(part, grad)

    def arrays(self, part: LocalSlice) -> list[Any]:
        """Returns w_old."""
        return [state_array(part, "weights_before", like=part.weights)]

    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns lambda, sign, weight decay and rate."""
        return self.control, sign, decay, self.lr_scale * lr

    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Makes the step on the CPU."""
        _step(step)

    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Makes the step of one segment by torch's operations."""
        _correct(w, g, arrays[0], g.square().mul_(factors[0]), factors)

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Stores the pull; without a local step before it, as in a warm-up, sets `w_old` too."""
        if part.version < 0:
            state_array(part, "weights_before").copy_(weights)
        elif part.num_local == 0:
            state_array(part, "weights_before").copy_(part.weights)
        part.weights.copy_(weights)


class AdaptiveDC(DC):
    """The adaptive form.

    Args:
        lr_scale: Learning rate of the local step over the optimizer's.
        adaptive_control: lambda_0, in units of the gradient.
        decay: How much of the mean square is kept from one step to the next.
    """

    name = "dc_adaptive"
    device_kernel = "local_dc_adaptive"
    num_arrays = 2

    def __init__(
        self, lr_scale: float = 1.0, adaptive_control: float = 2.0, decay: float = 0.0
    ) -> None:
        super().__init__(lr_scale)
        require_range("dc_adaptive.adaptive_control", adaptive_control, 0.0, FACTOR_MAX)
        require_range("dc_adaptive.decay", decay, 0.0, 1.0 - 1e-9)
        self.control = float(adaptive_control)
        self.decay = float(decay)

    def arrays(self, part: LocalSlice) -> list[Any]:
        """Returns w_old and MS."""
        return [*super().arrays(part), state_array(part, "mean_square")]

    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns lambda_0, sign, weight decay, rate, and the two factors of the mean."""
        hyper = super().factors(part, group, sign, decay, lr)
        return *hyper, self.decay, 1.0 - self.decay

    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Makes the step on the CPU."""
        _step_adaptive(step)

    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Makes the step of one segment by torch's operations."""
        (old, mean), square = arrays, g.square()
        mean.mul_(factors[4]).add_(square, alpha=factors[5]).add_(EPSILON)
        _correct(w, g, old, square.div_(mean.sqrt()).mul_(factors[0]), factors)


def _correct(w: Any, g: Any, old: Any, term: Any, factors: Sequence[float]) -> None:
    """Makes the step with `L * g * g` in `term`, which is changed."""
    _, sign, decay, lr = factors[:4]
    term.mul_(w - old)
    old.copy_(w)
    w.sub_(term.add_(g, alpha=sign).add_(w, alpha=decay), alpha=lr)


@kernel
def _step(step: SegmentsStep) -> None:
    change_segments(step, _change)


@kernel
def _step_adaptive(step: SegmentsStep) -> None:
    change_segments(step, _change_adaptive)


@kernel
def _change(w: FloatArray, g: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    o = arrays[0]
    control, sign, decay, lr = factors[0], factors[1], factors[2], factors[3]
    for i in range(w.size):
        before = w[i]
        term = control * (g[i] * g[i]) * (before - o[i])
        o[i] = before
        w[i] = before - lr * (g[i] * sign + decay * before + term)


@kernel
def _change_adaptive(w: FloatArray, g: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    o, s = arrays[0], arrays[1]
    control, sign, decay, lr = factors[0], factors[1], factors[2], factors[3]
    keep, take = factors[4], factors[5]
    for i in range(w.size):
        before, square = w[i], g[i] * g[i]
        mean = keep * s[i] + take * square + np.float32(EPSILON)
        s[i] = mean
        term = control / np.sqrt(mean) * square * (before - o[i])
        o[i] = before
        w[i] = before - lr * (g[i] * sign + decay * before + term)
