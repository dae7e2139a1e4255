"""GLU: a worker continues by its gradient, and by how its weights have moved since its last step.

Yemao Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training",
arXiv:2012.05396, as released: class `COSDCASGD` in the authors' code (repository main-520/SSD-SGD,
`optimizer.py`, and the compiled `.pyc` beside it). The paper's own algorithm was not read.

    local step:  sync = ((1 - lr' * wd) * p - w) / D;  p = w
                 w = w - lr' * (alpha * g + beta * sync + wd * w)             (maximize: -g)
                 lr' = lr_scale * u * lr
                 u = min(1, j / local_warmup) in the worker's j-th local step, or 1
    pull of W:   w = W

p is w as it was before the last local step, so that in the first step of all, where p = w, sync is
all but 0. In the first step after a pull sync is the way from there to the global weights, in which
are the others' gradients; in the k - 1 that follow it is the local step before, and beta * lr' / D
is a momentum.

Read in the code: the formula, alpha = 2, beta = 0.5, and p taken at every call. Read there as a
number without a reason: D = 8 (drafts have 4, 12, 16 and 32). Reconstructed: `divisor=0`, the
default, is D = k * (largest lr_scale * lr so far), with the k of `ssd` and else 1. It fits the
authors' launch scripts (8 = 5 * 1.6), and makes the step free of the scale of the loss; the largest
rate is the first one, unless the rate is warmed up. `divisor=8` is as released, for their rates.

Differs from the code: p and the number of calls are kept for each slice, where one counter served
all keys. Gradients are means and not sums over the number of workers. Their scripts raise the local
rate from 0 over 625 steps, which `local_warmup` does; it is 0 by default. A worker that comes back
starts over with p, and with the largest rate.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numba import njit

from pscore.local.base import LocalSlice, LocalUpdate, state_array
from pscore.local.sgd import hyper_columns
from pscore.plugins import require_range
from pscore.types import FloatArray, HyperArray, IntArray

FACTOR_MAX = 1e6


class GLU(LocalUpdate):
    """Global gradient for the local update.

    Args:
        alpha: Factor of the worker's own gradient.
        beta: Factor of the way of the weights since the last local step.
        lr_scale: Learning rate of the local step over the optimizer's.
        local_warmup: Local steps over which that rate rises to its full size.
        divisor: D; 0 is `steps` times the largest local rate so far.
        steps: k, steps from one pull to the next.
    """

    name: ClassVar[str] = "glu"

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 0.5,
        lr_scale: float = 1.0,
        local_warmup: int = 0,
        divisor: float = 0.0,
        steps: int = 1,
    ) -> None:
        factors = {"alpha": alpha, "beta": beta, "lr_scale": lr_scale, "divisor": divisor}
        for argument, value in factors.items():
            require_range(f"glu.{argument}", value, 0.0, FACTOR_MAX)
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.lr_scale = float(lr_scale)
        self.local_warmup = local_warmup
        self.divisor = float(divisor)
        self.steps = steps

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step."""
        decay_column, sign_column = hyper_columns(part)
        before = state_array(part, "weights_before", like=part.weights)
        scale = self.lr_scale
        if part.num_made < self.local_warmup:
            scale *= (part.num_made + 1) / self.local_warmup
        inverse = self.inverse(part)
        if part.kernels is not None:
            factors = (self.alpha, self.beta, scale)
            part.kernels.glu(part, grad, before, factors, inverse, (decay_column, sign_column))
            return
        if part.weights.device.type == "cpu":
            _update(
                part.weights.numpy(),
                grad.numpy(),
                before.numpy(),
                self.alpha,
                self.beta,
                scale,
                inverse,
                part.segments.bounds,
                part.segments.groups,
                part.active,
                part.hyper,
                decay_column,
                sign_column,
            )
            return
        for index in np.flatnonzero(part.active):
            group = part.segments.groups[index]
            row = part.hyper[group].tolist()
            start, stop = part.segments.bounds[index].tolist()
            lr, decay = scale * row[0], row[decay_column] if decay_column >= 0 else 0.0
            sign = -1.0 if sign_column >= 0 and row[sign_column] else 1.0
            weights, last = part.weights[start:stop], before[start:stop]
            direction = last.mul(1.0 - lr * decay).sub_(weights)
            direction.mul_(self.beta * inverse[group].item())
            direction.add_(grad[start:stop], alpha=self.alpha * sign)
            direction.add_(weights, alpha=decay)
            last.copy_(weights)
            weights.add_(direction, alpha=-lr)

    def inverse(self, part: LocalSlice) -> FloatArray:
        """Returns 1 / D of each group; 0 while the rate has been 0."""
        divisors = np.full(len(part.hyper), self.divisor)
        if not self.divisor:
            rates = part.largest_rates
            np.maximum(rates, self.lr_scale * part.hyper[:, 0], out=rates)
            divisors = self.steps * rates
        inverse = np.divide(1.0, divisors, out=np.zeros_like(divisors), where=divisors > 0.0)
        return np.asarray(inverse, dtype=np.float32)


@njit(nogil=True, cache=True, fastmath=False)
def _update(
    weights: FloatArray,
    grad: FloatArray,
    before: FloatArray,
    alpha: float,
    beta: float,
    lr_scale: float,
    inverse: FloatArray,
    bounds: IntArray,
    groups: IntArray,
    active: IntArray,
    hyper: HyperArray,
    decay_column: int,
    sign_column: int,
) -> None:
    for index in range(groups.size):
        if active[index] == 0:
            continue
        row = hyper[groups[index]]
        own = np.float32(-alpha if sign_column >= 0 and row[sign_column] != 0.0 else alpha)
        decay = np.float32(row[decay_column] if decay_column >= 0 else 0.0)
        lr = np.float32(lr_scale * row[0])
        shrink = np.float32(1.0) - lr * decay
        start, stop = bounds[index, 0], bounds[index, 1]
        w, g, p = weights[start:stop], grad[start:stop], before[start:stop]
        _local_step(w, g, p, own, np.float32(beta), decay, lr, shrink, inverse[groups[index]])


@njit(nogil=True, cache=True, fastmath=False)
def _local_step(
    w: FloatArray,
    g: FloatArray,
    p: FloatArray,
    alpha: np.float32,
    beta: np.float32,
    decay: np.float32,
    lr: np.float32,
    shrink: np.float32,
    inverse: np.float32,
) -> None:
    for i in range(w.size):
        now = w[i]
        sync = (shrink * p[i] - now) * inverse
        p[i] = now
        w[i] = now - lr * (alpha * g[i] + beta * sync + decay * now)
