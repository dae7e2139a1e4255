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
from typing import Any, ClassVar

import numpy as np
from numba import njit

from pscore.local.base import LocalSlice, LocalUpdate, state_array
from pscore.local.sgd import hyper_columns
from pscore.plugins import require_range
from pscore.types import FloatArray, HyperArray, IntArray

FACTOR_MAX = 1e6


class Secant(LocalUpdate):
    """The direction between two pulls for the local update.

    Args:
        alpha: Factor of the worker's own gradient.
        beta: Factor of the global update read off two pulls.
        lr_scale: Learning rate of the local step over the optimizer's.
        local_warmup: Local steps over which that rate rises to its full size.
    """

    name: ClassVar[str] = "secant"

    def __init__(
        self, alpha: float = 2.0, beta: float = 0.5, lr_scale: float = 1.0, local_warmup: int = 0
    ) -> None:
        for argument, value in (("alpha", alpha), ("beta", beta), ("lr_scale", lr_scale)):
            require_range(f"secant.{argument}", value, 0.0, FACTOR_MAX)
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.lr_scale = float(lr_scale)
        self.local_warmup = local_warmup

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step."""
        decay_column, sign_column = hyper_columns(part)
        sync = state_array(part, "grad_sync")
        scale = self.lr_scale
        if part.num_made < self.local_warmup:
            scale *= (part.num_made + 1) / self.local_warmup
        if part.kernels is not None:
            factors = (self.alpha, self.beta, scale)
            part.kernels.secant(part, grad, sync, factors, (decay_column, sign_column))
            return
        if part.weights.device.type == "cpu":
            _update(
                part.weights.numpy(),
                grad.numpy(),
                sync.numpy(),
                self.alpha,
                self.beta,
                scale,
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
            lr = scale * row[0]
            sign = -1.0 if sign_column >= 0 and row[sign_column] else 1.0
            weights = part.weights[start:stop]
            if decay_column >= 0:
                weights.mul_(1.0 - lr * row[decay_column])
            weights.add_(grad[start:stop], alpha=-lr * self.alpha * sign)
            weights.add_(sync[start:stop], alpha=-lr * self.beta)

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
        shrinks, rates = passed(part, num_updates)
        if part.weights.device.type == "cpu" and part.kernels is None:
            _rebase(
                part.weights.numpy(),
                weights.numpy(),
                old.numpy(),
                sync.numpy(),
                weights.data_ptr() == sync.data_ptr(),
                part.segments.bounds,
                part.segments.groups,
                shrinks,
                rates,
            )
            return
        part.weights.copy_(weights)
        if part.kernels is not None:
            pulled = part.weights  # On the device; `weights` may be on the host.
            part.kernels.secant_rebase(part, pulled, old, sync, shrinks, rates)
            return
        for (start, stop), group in zip(
            part.segments.bounds.tolist(), part.segments.groups.tolist(), strict=True
        ):
            direction = sync[start:stop]
            if rates[group] == 0.0:
                direction.zero_()
                continue
            direction.copy_(old[start:stop]).mul_(shrinks[group].item())
            direction.sub_(part.weights[start:stop]).mul_(rates[group].item())
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


@njit(nogil=True, cache=True, fastmath=False)
def _update(
    weights: FloatArray,
    grad: FloatArray,
    sync: FloatArray,
    alpha: float,
    beta: float,
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
        own = np.float32(-alpha if sign_column >= 0 and row[sign_column] != 0.0 else alpha)
        decay = np.float32(row[decay_column] if decay_column >= 0 else 0.0)
        lr = np.float32(lr_scale * row[0])
        start, stop = bounds[index, 0], bounds[index, 1]
        w, g, s = weights[start:stop], grad[start:stop], sync[start:stop]
        _local_step(w, g, s, own, np.float32(beta), decay, lr)


@njit(nogil=True, cache=True, fastmath=False)
def _local_step(
    w: FloatArray,
    g: FloatArray,
    s: FloatArray,
    alpha: np.float32,
    beta: np.float32,
    decay: np.float32,
    lr: np.float32,
) -> None:
    for i in range(w.size):
        w[i] -= lr * (alpha * g[i] + beta * s[i] + decay * w[i])


@njit(nogil=True, cache=True, fastmath=False)
def _rebase(
    weights: FloatArray,
    pulled: FloatArray,
    old: FloatArray,
    sync: FloatArray,
    landed: bool,
    bounds: IntArray,
    groups: IntArray,
    shrinks: FloatArray,
    rates: FloatArray,
) -> None:
    written = 0
    for index in range(groups.size):
        start, stop = bounds[index, 0], bounds[index, 1]
        shrink, rate = shrinks[groups[index]], rates[groups[index]]
        _take(weights[written:start], pulled[written:start])
        w, o, s = weights[start:stop], old[start:stop], sync[start:stop]
        if landed:
            _read_off_landed(w, o, s, shrink, rate)
        else:
            _read_off(w, pulled[start:stop], o, s, shrink, rate)
        written = stop
    _take(weights[written:], pulled[written:])


@njit(nogil=True, cache=True, fastmath=False)
def _read_off(
    w: FloatArray,
    pulled: FloatArray,
    old: FloatArray,
    sync: FloatArray,
    shrink: np.float32,
    rate: np.float32,
) -> None:
    for i in range(w.size):
        new = pulled[i]
        sync[i] = (shrink * old[i] - new) * rate
        old[i] = new
        w[i] = new


@njit(nogil=True, cache=True, fastmath=False)
def _read_off_landed(
    w: FloatArray, old: FloatArray, sync: FloatArray, shrink: np.float32, rate: np.float32
) -> None:
    """Computes the same for a pull in `sync`: with two names for it there is no vector code."""
    for i in range(w.size):
        new = sync[i]
        sync[i] = (shrink * old[i] - new) * rate
        old[i] = new
        w[i] = new


@njit(nogil=True, cache=True, fastmath=False)
def _take(w: FloatArray, pulled: FloatArray) -> None:
    for i in range(w.size):
        w[i] = pulled[i]
