"""Secant: a worker continues by its own gradient and the global one, read off the last two pulls.

Paceline's own, after the GLU of Yemao Xu et al., "SSD-SGD: Communication Sparsification for
Distributed Deep Learning Training", arXiv:2012.05396: the shape of the step and the factors are
theirs (`glu.py` is what they have released); the estimate of the global gradient is not.

    pull of W, after k updates of W_old with the rates lr_1 ... lr_k:
        G_sync = ((1 - lr_1 * wd) ... (1 - lr_k * wd) * W_old - W) / (lr_1 + ... + lr_k)
        W_old = W;  w = W
    local step:
        w = w - lr_scale * u * lr * (alpha * g + beta * G_sync + wd * w)      (maximize: -g)
        u = min(1, j / local_warmup) in the worker's j-th local step; 1 without local_warmup

G_sync is the SGD step solved for its gradient: the mean direction of one update of the shard. With
momentum on the shard a steady gradient is in there 1 / (1 - momentum) times, so that alpha=2 and
beta=0.5 stand in for the momentum that the local step lacks; without it, alpha + beta near 1 fits.

The rates are those that this worker had in the steps of the updates, so that a rate which drops
between two pulls changes nothing of G_sync. Updates of which it knows none (it was away) count with
its present rate. k is counted in versions, so that each pull of the warm-up counts as k = 1. With
Adam on the shard G_sync is the direction of its update and not a gradient, and its weight decay is
treated as if it were decoupled; with AdamW it is.
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
    empty_step,
    hyper_columns,
    state_array,
    warm_up,
)
from pscore.memory.kernels import kernel, move_idle
from pscore.optimizers.driver import Arrays
from pscore.plugins import require_range
from pscore.types import FloatArray

FACTOR_MAX = 1e6


class Secant(ElementwiseUpdate):
    """The direction between two pulls for the local update.

    Args:
        alpha: Factor of the worker's own gradient.
        beta: Factor of the global update read off two pulls.
        lr_scale: Learning rate of the local step over the optimizer's.
        local_warmup: Local steps over which that rate rises to its full size.
    """

    name = "secant"
    device_kernel = "local_secant"

    def __init__(
        self, alpha: float = 2.0, beta: float = 0.5, lr_scale: float = 1.0, local_warmup: int = 0
    ) -> None:
        for argument, value in (("alpha", alpha), ("beta", beta), ("lr_scale", lr_scale)):
            require_range(f"secant.{argument}", value, 0.0, FACTOR_MAX)
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.lr_scale = float(lr_scale)
        self.local_warmup = local_warmup

    def arrays(self, part: LocalSlice) -> list[Any]:
        """Returns G_sync."""
        return [state_array(part, "grad_sync")]

    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns alpha with the sign, beta, weight decay and rate."""
        scale = warm_up(self.lr_scale, self.local_warmup, part)
        return self.alpha * sign, self.beta, decay, scale * lr

    def warm_up(self) -> None:
        """Compiles the loops of the CPU, that of a pull too."""
        super().warm_up()
        _read_off(empty_step(self.num_arrays))

    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Makes the step on the CPU."""
        _step(step)

    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Makes the step of one segment by torch's operations."""
        (sync,), (alpha, beta, decay, lr) = arrays, factors
        w.mul_(1.0 - lr * decay).sub_(g, alpha=lr * alpha).sub_(sync, alpha=lr * beta)

    def room(self, part: LocalSlice) -> Any:
        """Returns G_sync: a newer pull makes it anew, from that pull and the one before."""
        return state_array(part, "grad_sync")

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Stores the pull and computes the global update from it and the pull before."""
        old, sync = state_array(part, "weights_old"), state_array(part, "grad_sync")
        num_updates = version - part.version
        if part.version < 0 or num_updates <= 0:
            # There is no global update between the two; the same version again leaves the last one.
            part.weights.copy_(weights)
            old.copy_(weights)
            if part.version != version:
                sync.zero_()
            return
        factors, segments = np.stack(passed(part, num_updates), 1), part.segments
        if part.weights.device.type == "cpu" and part.kernels is None:
            if weights.data_ptr() != sync.data_ptr():
                sync.copy_(weights)
            _read_off(
                SegmentsStep(
                    part.weights.numpy(),
                    sync.numpy(),
                    (old.numpy(),),
                    segments.bounds,
                    segments.groups,
                    np.ones(len(segments), np.int64),
                    factors,
                )
            )
            return
        part.weights.copy_(weights)
        if part.kernels is not None:  # `weights` may be on the host.
            arrays = [part.weights, old, sync]
            part.kernels.change("secant_rebase", part, arrays, factors, whole=True)
            return
        for (start, stop), group in zip(
            segments.bounds.tolist(), segments.groups.tolist(), strict=True
        ):
            shrink, rate = factors[group].tolist()
            direction = sync[start:stop]
            direction.copy_(old[start:stop]).mul_(shrink).sub_(part.weights[start:stop]).mul_(rate)
        old.copy_(part.weights)


def passed(part: LocalSlice, num_updates: int) -> tuple[FloatArray, FloatArray]:
    """Returns the factor on a weight of the updates since the last pull, and 1 / their rates.

    Args:
        part: The slice, with the hyper-parameters of its local steps since then in `past`.
        num_updates: How many updates: the newest of those steps, and before that the present one.

    Returns:
        Of each group: the product of all `1 - lr * wd`, and 1 over the sum of all `lr`; 0 where
        that sum is 0, because before a rate of 0 the weights say nothing about the direction.
    """
    column, _ = hyper_columns(part)
    known = part.past[-num_updates:]
    shrink, total = np.ones(len(part.hyper)), np.zeros(len(part.hyper))
    for hyper, times in [*((hyper, 1) for hyper in known), (part.hyper, num_updates - len(known))]:
        lr, decay = hyper[:, 0], hyper[:, column] if column >= 0 else 0.0
        shrink *= (1.0 - lr * decay) ** times
        total += lr * times
    inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total != 0.0)
    return shrink.astype(np.float32), inverse.astype(np.float32)


@kernel
def _step(step: SegmentsStep) -> None:
    change_segments(step, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    s = arrays[0]
    alpha, beta, decay, lr = factors[0], factors[1], factors[2], factors[3]
    for i in range(w.size):
        w[i] -= lr * (alpha * g[i] + beta * s[i] + decay * w[i])


@kernel
def _read_off(step: SegmentsStep) -> None:
    """Computes G_sync from the pull in `step.grad` and the one before, with G_sync in its place."""
    change_segments(step, _read_off_segment)
    move_idle(step.grad, step.weights, step.bounds, step.active)


@kernel
def _read_off_segment(w: FloatArray, sync: FloatArray, arrays: Arrays, factors: FloatArray) -> None:
    old, shrink, rate = arrays[0], factors[0], factors[1]
    for i in range(w.size):
        new = sync[i]
        sync[i] = (shrink * old[i] - new) * rate
        old[i] = new
        w[i] = new
