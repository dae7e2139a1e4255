"""Plain local step: a worker continues by its own gradient, without momentum.

The local update of Yemao Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for
Distributed Training", arXiv:2005.06728, without its compensation term (Lambda = 0), as read in the
authors' code (repository CynthiaProtector/OD-SGD).

    w = w - lr_scale * lr * (g + weight_decay * w)      (maximize: -g)

Differs from the paper: gradients are means, so that the local learning rate is `lr_scale` times the
optimizer's and follows its schedule; the authors set both by hand, for summed gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscore.local.base import ElementwiseUpdate, LocalSlice, SegmentsStep, change_segments
from pscore.memory.kernels import kernel
from pscore.optimizers.driver import Arrays
from pscore.plugins import require_range
from pscore.types import FloatArray

LR_SCALE_MAX = 1e6


class PlainSGD(ElementwiseUpdate):
    """One step of plain SGD.

    Args:
        lr_scale: Learning rate of the local step over the optimizer's.
    """

    name = "sgd"
    device_kernel = "local_sgd"

    def __init__(self, lr_scale: float = 1.0) -> None:
        require_range("sgd.lr_scale", lr_scale, 0.0, LR_SCALE_MAX)
        self.lr_scale = lr_scale

    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns sign, weight decay and rate."""
        return sign, decay, self.lr_scale * lr

    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Makes the step on the CPU."""
        _step(step)

    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Makes the step of one segment by torch's operations."""
        sign, decay, lr = factors
        w.sub_((g * sign).add_(w, alpha=decay), alpha=lr)


@kernel
def _step(step: SegmentsStep) -> None:
    change_segments(step, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    sign, decay, lr = factors[0], factors[1], factors[2]
    for i in range(w.size):
        w[i] -= lr * (g[i] * sign + decay * w[i])
