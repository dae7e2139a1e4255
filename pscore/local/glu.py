"""GLU: a worker goes on by its own gradient and the global one, read off the last two pulls.

Yemao Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training",
arXiv:2012.05396; the rule's shape and the defaults of alpha and beta as in the authors' code
(repository main-520/SSD-SGD, `optimizer.py`).

    pull of W, k updates after W_old:
        G_sync = ((1 - lr * wd)^k * W_old - W) / (k * lr);  W_old = W;  w = W
    local step:
        w = w - lr_scale * u * lr * (alpha * g + beta * G_sync + wd * w)      (maximize: -g)
        u = min(1, j / local_warmup) in the worker's j-th local step; 1 without local_warmup

G_sync is the SGD step solved for its gradient: the mean direction of one update of the shard. With
momentum on the shard a steady gradient is in there 1 / (1 - momentum) times, so that alpha=2 and
beta=0.5 stand in for the momentum that the local step lacks; without it, alpha + beta near 1 fits.

Differs from the paper, of which only the abstract and the code were read: the code divides by a
constant D (8, in drafts 4 to 32) where `k * lr` stands here, and what D is there remains
unresolved; D = k * (local learning rate) is the reading that fits its launch scripts and that
follows a learning rate schedule. Their scripts raise the local rate from 0 over 625 steps, which
`local_warmup` does; here it counts local steps, and is 0 by default. k is counted in versions, so
that each pull of the warm-up counts as k = 1. Gradients are means, where the code's are sums over
the workers' number. With Adam on the shard G_sync is the direction of its update and not a
gradient, and its weight decay is treated as if it were decoupled; with AdamW it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numba import njit

from pscore.errors import ConfigError
from pscore.local.base import LocalSlice, LocalUpdate, zeros_like
from pscore.local.sgd import hyper_columns
from pscore.types import FloatArray, HyperArray, IntArray

FACTOR_MAX = 1e6


class GLU(LocalUpdate):
    """Global gradient for the local update.

    Args:
        alpha: Factor of the worker's own gradient.
        beta: Factor of the global update read off two pulls.
        lr_scale: Learning rate of the local step over the optimizer's.
        local_warmup: Local steps over which that rate rises to its full size.
    """

    name: ClassVar[str] = "glu"

    def __init__(
        self, alpha: float = 2.0, beta: float = 0.5, lr_scale: float = 1.0, local_warmup: int = 0
    ) -> None:
        for argument, value in (("alpha", alpha), ("beta", beta), ("lr_scale", lr_scale)):
            if not 0.0 <= value <= FACTOR_MAX:
                raise ConfigError(f"glu.{argument} is {value!r}, must be in 0.0..{FACTOR_MAX}")
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.lr_scale = float(lr_scale)
        self.local_warmup = local_warmup

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step."""
        decay_column, sign_column = hyper_columns(part)
        sync = _array(part, "grad_sync")
        scale = self.lr_scale
        if part.num_made < self.local_warmup:
            scale *= (part.num_made + 1) / self.local_warmup
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
        from pscore.cuda import local as device  # Imports torch, which shards do without.

        launch = device.kernels(part.weights)
        if launch is not None:
            factors = (self.alpha, self.beta, scale)
            device.glu(launch, part, grad, sync, factors, (decay_column, sign_column))
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
        return _array(part, "grad_sync")

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Takes the pull and reads the global update off it and the pull before."""
        old, sync = _array(part, "weights_old"), _array(part, "grad_sync")
        num_updates = version - part.version
        if part.version < 0 or num_updates <= 0:
            # There is no global update between the two; the same version again leaves the last one.
            part.weights.copy_(weights)
            old.copy_(weights)
            if part.version != version:
                sync.zero_()
            return
        decay_column, _ = hyper_columns(part)
        if part.weights.device.type == "cpu":
            _rebase(
                part.weights.numpy(),
                weights.numpy(),
                old.numpy(),
                sync.numpy(),
                weights.data_ptr() == sync.data_ptr(),
                num_updates,
                part.segments.bounds,
                part.segments.groups,
                part.hyper,
                decay_column,
            )
            return
        part.weights.copy_(weights)
        from pscore.cuda import local as device

        launch = device.kernels(part.weights)
        if launch is not None:
            pulled = part.weights  # On the device; `weights` may be on the host.
            device.glu_rebase(launch, part, pulled, old, sync, num_updates, decay_column)
            return
        for (start, stop), group in zip(
            part.segments.bounds.tolist(), part.segments.groups.tolist(), strict=True
        ):
            row = part.hyper[group].tolist()
            decay = row[decay_column] if decay_column >= 0 else 0.0
            direction = sync[start:stop]
            if row[0] == 0.0:
                direction.zero_()
                continue
            direction.copy_(old[start:stop]).mul_((1.0 - row[0] * decay) ** num_updates)
            direction.sub_(part.weights[start:stop]).div_(num_updates * row[0])
        old.copy_(part.weights)


def _array(part: LocalSlice, name: str) -> Any:
    if name not in part.state:
        part.state[name] = zeros_like(part.weights)
    return part.state[name]


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
    num_updates: int,
    bounds: IntArray,
    groups: IntArray,
    hyper: HyperArray,
    decay_column: int,
) -> None:
    written = 0
    for index in range(groups.size):
        start, stop = bounds[index, 0], bounds[index, 1]
        row = hyper[groups[index]]
        decay = row[decay_column] if decay_column >= 0 else 0.0
        # Before a learning rate of 0 the weights say nothing about the direction.
        shrink = np.float32((1.0 - row[0] * decay) ** num_updates)
        rate = np.float32(1.0 / (num_updates * row[0]) if row[0] != 0.0 else 0.0)
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
    """Does the same where the pull lies in `sync`: of two names for it no vector code is made."""
    for i in range(w.size):
        new = sync[i]
        sync[i] = (shrink * old[i] - new) * rate
        old[i] = new
        w[i] = new


@njit(nogil=True, cache=True, fastmath=False)
def _take(w: FloatArray, pulled: FloatArray) -> None:
    for i in range(w.size):
        w[i] = pulled[i]
