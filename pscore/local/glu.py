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

from collections.abc import Sequence
from typing import Any

import numpy as np

from pscore.local.base import (
    ElementwiseUpdate,
    LocalSlice,
    SegmentsStep,
    change_segments,
    state_array,
    warm_up,
)
from pscore.memory.kernels import kernel
from pscore.optimizers.driver import Arrays
from pscore.plugins import require_range
from pscore.types import FloatArray

FACTOR_MAX = 1e6


class GLU(ElementwiseUpdate):
    """Global gradient for the local update.

    Args:
        alpha: Factor of the worker's own gradient.
        beta: Factor of the way of the weights since the last local step.
        lr_scale: Learning rate of the local step over the optimizer's.
        local_warmup: Local steps over which that rate rises to its full size.
        divisor: D; 0 is `steps` times the largest local rate so far.
        steps: k, steps from one pull to the next.
    """

    name = "glu"
    device_kernel = "local_glu"

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

    def arrays(self, part: LocalSlice) -> list[Any]:
        """Returns p."""
        return [state_array(part, "weights_before", like=part.weights)]

    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns alpha with the sign, beta, weight decay, lr', 1 - lr' * wd and 1 / D."""
        lr *= warm_up(self.lr_scale, self.local_warmup, part)
        shrink = float(np.float32(1.0) - np.float32(lr) * np.float32(decay))
        return self.alpha * sign, self.beta, decay, lr, shrink, self.inverse(part, group)

    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Makes the step on the CPU."""
        _step(step)

    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Makes the step of one segment by torch's operations."""
        (last,), (alpha, beta, decay, lr, shrink, inverse) = arrays, factors
        direction = last.mul(shrink).sub_(w).mul_(beta * inverse)
        direction.add_(g, alpha=alpha).add_(w, alpha=decay)
        last.copy_(w)
        w.sub_(direction, alpha=lr)

    def inverse(self, part: LocalSlice, group: int) -> float:
        """Returns 1 / D of a group; 0 while the rate has been 0."""
        divisor = self.divisor
        if not divisor:
            rates = part.largest_rates
            rates[group] = max(rates[group], self.lr_scale * part.hyper[group, 0])
            divisor = self.steps * rates[group]
        return 1.0 / divisor if divisor > 0.0 else 0.0


@kernel
def _step(step: SegmentsStep) -> None:
    change_segments(step, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    p = arrays[0]
    alpha, beta, decay, lr = factors[0], factors[1], factors[2], factors[3]
    shrink, inverse = factors[4], factors[5]
    for i in range(w.size):
        now = w[i]
        sync = (shrink * p[i] - now) * inverse
        p[i] = now
        w[i] = now - lr * (alpha * g[i] + beta * sync + decay * now)
