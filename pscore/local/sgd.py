"""Plain local step: a worker continues by its own gradient, without momentum.

The local update of Yemao Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for
Distributed Training", arXiv:2005.06728, without its compensation term (Lambda = 0), as read in the
authors' code (repository CynthiaProtector/OD-SGD).

    w = w - lr_scale * lr * (g + weight_decay * w)      (maximize: -g)

Differs from the paper: gradients are means, so that the local learning rate is `lr_scale` times the
optimizer's and follows its schedule; the authors set both by hand, for summed gradients.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numba import njit

from pscore.local.base import LocalSlice, LocalUpdate
from pscore.plugins import require_range
from pscore.types import FloatArray, HyperArray, IntArray

LR_SCALE_MAX = 1e6


class PlainSGD(LocalUpdate):
    """One step of plain SGD.

    Args:
        lr_scale: Learning rate of the local step over the optimizer's.
    """

    name: ClassVar[str] = "sgd"

    def __init__(self, lr_scale: float = 1.0) -> None:
        require_range("sgd.lr_scale", lr_scale, 0.0, LR_SCALE_MAX)
        self.lr_scale = lr_scale

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the step."""
        decay_column, sign_column = hyper_columns(part)
        if part.kernels is not None:
            part.kernels.sgd(part, grad, self.lr_scale, decay_column, sign_column)
            return
        if part.weights.device.type == "cpu":
            _update(
                part.weights.numpy(),
                grad.numpy(),
                self.lr_scale,
                part.segments.bounds,
                part.segments.groups,
                part.active,
                part.hyper,
                decay_column,
                sign_column,
            )
            return
        for index in np.flatnonzero(part.active):
            row = part.hyper[part.segments.groups[index]].tolist()
            start, stop = part.segments.bounds[index].tolist()
            weights, direction = part.weights[start:stop], grad[start:stop]
            if sign_column >= 0 and row[sign_column]:
                direction = direction.neg()
            if decay_column >= 0 and row[decay_column]:
                direction = direction.add(weights, alpha=row[decay_column])
            weights.add_(direction, alpha=-self.lr_scale * row[0])


def hyper_columns(part: LocalSlice) -> tuple[int, int]:
    """Returns the columns of weight decay and of maximize; -1 if the optimizer has none."""
    names = part.optimizer.hyper_names
    return (
        names.index("weight_decay") if "weight_decay" in names else -1,
        names.index("maximize") if "maximize" in names else -1,
    )


@njit(nogil=True, cache=True, fastmath=False)
def _update(
    weights: FloatArray,
    grad: FloatArray,
    lr_scale: float,
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
        sign = np.float32(-1.0 if sign_column >= 0 and row[sign_column] != 0.0 else 1.0)
        decay = np.float32(row[decay_column] if decay_column >= 0 else 0.0)
        start, stop = bounds[index, 0], bounds[index, 1]
        lr = np.float32(lr_scale * row[0])
        _plain(weights[start:stop], grad[start:stop], sign, decay, lr)


@njit(nogil=True, cache=True, fastmath=False)
def _plain(
    w: FloatArray, g: FloatArray, sign: np.float32, decay: np.float32, lr: np.float32
) -> None:
    for i in range(w.size):
        w[i] -= lr * (g[i] * sign + decay * w[i])
