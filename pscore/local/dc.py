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
from typing import Any, ClassVar

import numpy as np
from numba import njit

from pscore.local.base import LocalSlice, LocalUpdate, state_array
from pscore.local.sgd import hyper_columns
from pscore.plugins import require_range
from pscore.types import FloatArray, HyperArray, IntArray

FACTOR_MAX = 1e6
EPSILON = 1e-7


class DC(LocalUpdate):
    """The constant form.

    Args:
        lr_scale: Learning rate of the local step over the optimizer's.
        variance_control: lambda, without unit.
    """

    name: ClassVar[str] = "dc"
    is_adaptive: ClassVar[bool] = False

    def __init__(self, lr_scale: float = 1.0, variance_control: float = 0.04) -> None:
        require_range("dc.lr_scale", lr_scale, 0.0, FACTOR_MAX)
        require_range("dc.variance_control", variance_control, 0.0, FACTOR_MAX)
        self.lr_scale = float(lr_scale)
        self.control = float(variance_control)
        self.decay = 0.0

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step."""
        decay_column, sign_column = hyper_columns(part)
        old = state_array(part, "weights_before", like=part.weights)
        square = state_array(part, "mean_square") if self.is_adaptive else old
        if part.kernels is not None:
            factors, columns = (
                (self.control, self.decay, self.lr_scale),
                (decay_column, sign_column),
            )
            arrays, adapts = (old, square), self.is_adaptive
            part.kernels.dc(part, grad, arrays, factors, columns, is_adaptive=adapts)
            return
        if part.weights.device.type == "cpu":
            _update(
                part.weights.numpy(),
                grad.numpy(),
                old.numpy(),
                square.numpy(),
                self.control,
                self.decay,
                self.is_adaptive,
                self.lr_scale,
                part.segments.bounds,
                part.segments.groups,
                part.active,
                part.hyper,
                decay_column,
                sign_column,
            )
            return
        for index, (start, stop) in enumerate(part.segments.bounds.tolist()):
            row = part.hyper[part.segments.groups[index]].tolist()
            weights, own = part.weights[start:stop], grad[start:stop]
            if not part.active[index]:
                old[start:stop].copy_(weights)
                continue
            term = own.square()
            if self.is_adaptive:
                mean = square[start:stop]
                mean.mul_(self.decay).add_(term, alpha=1.0 - self.decay).add_(EPSILON)
                term.div_(mean.sqrt())
            term.mul_(weights - old[start:stop]).mul_(self.control)
            old[start:stop].copy_(weights)
            term.add_(own, alpha=-1.0 if sign_column >= 0 and row[sign_column] else 1.0)
            if decay_column >= 0 and row[decay_column]:
                term.add_(weights, alpha=row[decay_column])
            weights.add_(term, alpha=-self.lr_scale * row[0])

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

    name: ClassVar[str] = "dc_adaptive"
    is_adaptive: ClassVar[bool] = True

    def __init__(
        self, lr_scale: float = 1.0, adaptive_control: float = 2.0, decay: float = 0.0
    ) -> None:
        super().__init__(lr_scale)
        require_range("dc_adaptive.adaptive_control", adaptive_control, 0.0, FACTOR_MAX)
        require_range("dc_adaptive.decay", decay, 0.0, 1.0 - 1e-9)
        self.control = float(adaptive_control)
        self.decay = float(decay)


@njit(nogil=True, cache=True, fastmath=False)
def _update(
    weights: FloatArray,
    grad: FloatArray,
    old: FloatArray,
    square: FloatArray,
    control: float,
    keep: float,
    is_adaptive: bool,
    lr_scale: float,
    bounds: IntArray,
    groups: IntArray,
    active: IntArray,
    hyper: HyperArray,
    decay_column: int,
    sign_column: int,
) -> None:
    for index in range(groups.size):
        start, stop = bounds[index, 0], bounds[index, 1]
        w, g, o = weights[start:stop], grad[start:stop], old[start:stop]
        if active[index] == 0:
            o[:] = w
            continue
        row = hyper[groups[index]]
        sign = np.float32(-1.0 if sign_column >= 0 and row[sign_column] != 0.0 else 1.0)
        decay = np.float32(row[decay_column] if decay_column >= 0 else 0.0)
        lr = np.float32(lr_scale * row[0])
        if is_adaptive:
            s = square[start:stop]
            _adaptive(
                w,
                g,
                o,
                s,
                np.float32(control),
                np.float32(keep),
                np.float32(1.0 - keep),
                sign,
                decay,
                lr,
            )
        else:
            _constant(w, g, o, np.float32(control), sign, decay, lr)


@njit(nogil=True, cache=True, fastmath=False)
def _constant(
    w: FloatArray,
    g: FloatArray,
    o: FloatArray,
    control: np.float32,
    sign: np.float32,
    decay: np.float32,
    lr: np.float32,
) -> None:
    for i in range(w.size):
        before = w[i]
        term = control * (g[i] * g[i]) * (before - o[i])
        o[i] = before
        w[i] = before - lr * (g[i] * sign + decay * before + term)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _adaptive(
    w: FloatArray,
    g: FloatArray,
    o: FloatArray,
    s: FloatArray,
    control: np.float32,
    keep: np.float32,
    take: np.float32,
    sign: np.float32,
    decay: np.float32,
    lr: np.float32,
) -> None:
    for i in range(w.size):
        before, square = w[i], g[i] * g[i]
        mean = keep * s[i] + take * square + np.float32(EPSILON)
        s[i] = mean
        term = control / np.sqrt(mean) * square * (before - o[i])
        o[i] = before
        w[i] = before - lr * (g[i] * sign + decay * before + term)
