"""DGC: top-k of a velocity that is kept on the worker, so that what waits gathers momentum.

Yujun Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887; details as in the
authors' code (repository synxlin/deep-gradient-compression).

    g = g * min(1, clip / ||g||)
    m = momentum * m + g;           v = v + m           nesterov: m = momentum * (m + g); v += m + g
    S = the k largest |v|;  send (i, v[i]) for i in S;  v = 0 and m = 0 in S (factor masking)

The payload is that of `sparse.py`; v is the state `residual`, m is `momentum`. Sent + v is what the
velocities sum to, not what the gradients do. The optimizer on the shard has to be SGD without
momentum: the momentum is in here.

The ratio is warmed up as in the paper: 25 %, 6.25 %, 1.56 % and 0.39 % of the elements in the four
quarters of `warmup` steps, never less than `ratio`.

Differs from the paper: clipping is by the norm of a slice's gradient and not of the model's; the
threshold of a sample is used once, as in `sparse.py`, and not adapted; warm-up is counted in steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pscore.compressors import blocks, sparse
from pscore.compressors.base import (
    INF_BITS,
    RESIDUAL,
    Compressor,
    State,
    note_largest,
    require_finite,
)
from pscore.compressors.blocks import ABS_BITS, BLOCK
from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_one_of, require_range
from pscore.types import ByteArray, FloatArray

MOMENTUM = "momentum"
RATIO_MIN = 1e-6
CLIP_MAX = 1e30
WARMUP_MAX = 1 << 40
STAGES = 4
STAGE_RATIO = 0.25


@dataclass(frozen=True)
class DGC(Compressor):
    """Top-k with momentum correction.

    Attributes:
        ratio: Share of the elements that are sent after the warm-up.
        momentum: Momentum of the velocity.
        nesterov: Whether it is Nesterov's.
        clip: Largest norm of a slice's gradient; 0 does not clip.
        warmup: Steps until the ratio is reached.
        select: `sampled` or `exact`.
    """

    name = "dgc"
    source = "Lin et al., arXiv:1712.01887"
    examples = ("(ratio=0.03)", "(ratio=0.03, momentum=0.0, select=exact)")

    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    warmup: int = 0
    select: str = "sampled"

    def __post_init__(self) -> None:
        require_range("dgc.ratio", self.ratio, RATIO_MIN, 1.0)
        require_range("dgc.momentum", self.momentum, 0.0, 1.0)
        require_range("dgc.clip", self.clip, 0.0, CLIP_MAX)
        require_range("dgc.warmup", self.warmup, 0, WARMUP_MAX)
        require_one_of("dgc.select", self.select, dict.fromkeys(sparse.SELECTS))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The velocity, which is the residual, and the momentum."""
        return (RESIDUAL, MOMENTUM)

    @property
    def needs_norm(self) -> bool:
        """Clipping is by the norm of the slice."""
        return self.clip > 0

    def payload_nbytes_max(self, numel: int) -> int:
        """Eight bytes per element that is sent in the first stage of the warm-up."""
        return self.payload_nbytes_at(numel, 0)

    def payload_nbytes_at(self, numel: int, step: int) -> int:
        """Eight bytes per element that is sent in this stage of the warm-up."""
        return sparse.payload_nbytes(sparse.limit(self.ratio_at(step), numel, self.select))

    def payload_nbytes(self, buffer: ByteArray, numel: int) -> int:
        """Returns the length that follows from the count at the start."""
        return sparse.payload_nbytes(sparse.count_in(buffer))

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, indices in range and increasing, values that are numbers."""
        limit = sparse.limit(self.ratio_at(0), numel, self.select)
        sparse.check(self.name, payload, numel, limit)

    def ratio_at(self, step: int) -> float:
        """Returns the share of the elements that is sent at a step."""
        if step >= self.warmup:
            return self.ratio
        stage = STAGES * step // self.warmup
        return max(self.ratio, STAGE_RATIO ** (1 + stage))

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Corrects by momentum, selects and clears."""
        self.require_room(grad, state)
        velocity, momentum = state[RESIDUAL], state[MOMENTUM]
        factors = self._factor(grad), np.float32(self.momentum), self.nesterov
        note_largest(state, _correct(read_only(grad), *factors, momentum, velocity), self.name)
        k = sparse.num_sent(self.ratio_at(step), len(grad))
        nbytes, indices = sparse.encode(velocity, k, self.select, out)
        _mask(indices, momentum)
        return nbytes

    def require_room(self, grad: FloatArray, state: State) -> None:
        """Raises GradientError if velocity or momentum cannot take a gradient; changes nothing."""
        if self.nesterov:  # It adds a gradient nearly twice: that may be too large by itself.
            require_finite(self._has_room(grad, state), self.name)
        else:
            super().require_room(grad, state)

    def _has_room(self, grad: FloatArray, state: State) -> bool:
        factors = self._factor(grad), np.float32(self.momentum), self.nesterov
        arrays = read_only(state[MOMENTUM]), read_only(state[RESIDUAL])
        return bool(_largest(read_only(grad), *factors, *arrays) < INF_BITS)

    def _factor(self, grad: FloatArray) -> np.float32:
        """Returns what clipping multiplies the gradient by."""
        norm = math.sqrt(_sum_squares(read_only(grad))) if self.clip else 0.0
        return np.float32(self.clip / norm if norm > self.clip else 1.0)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Scatters."""
        sparse.decode_add(payload, out, scale, assign=assign)


@kernel
def _sum_squares(grad: FloatArray) -> float:
    lanes = np.empty(blocks.LANES)
    total = 0.0
    for start in range(0, grad.size, BLOCK):
        total += blocks.sum_squares(grad[start : min(start + BLOCK, grad.size)], lanes)
    return total


@kernel
def _largest(
    grad: FloatArray,
    factor: np.float32,
    mu: np.float32,
    nesterov: bool,
    momentum: FloatArray,
    velocity: FloatArray,
) -> np.int32:
    """Returns the largest magnitude that `_correct` would write, as its bits."""
    largest = np.int32(0)
    m, v = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for start in range(0, grad.size, BLOCK):
        part = grad[start : start + BLOCK]
        m[: part.size] = momentum[start : start + BLOCK]
        v[: part.size] = velocity[start : start + BLOCK]
        found = _correct(part, factor, mu, nesterov, m[: part.size], v[: part.size])
        largest = max(largest, found)
    return largest


@kernel
def _correct(
    grad: FloatArray,
    factor: np.float32,
    mu: np.float32,
    nesterov: bool,
    momentum: FloatArray,
    velocity: FloatArray,
) -> np.int32:
    """Writes momentum and velocity; returns the largest magnitude of both, as its bits."""
    ahead = mu if nesterov else np.float32(1.0)
    own = np.float32(1.0) if nesterov else np.float32(0.0)
    largest = np.int32(0)
    for i in range(grad.size):
        g = grad[i] * factor
        m = mu * momentum[i] + ahead * g
        momentum[i] = m
        v = np.float32(velocity[i] + (m + own * g))
        velocity[i] = v
        bits = max(np.float32(m).view(np.int32) & ABS_BITS, v.view(np.int32) & ABS_BITS)
        largest = max(largest, np.int32(bits))
    return largest


@kernel
def _mask(indices: np.ndarray, momentum: FloatArray) -> None:
    for j in range(indices.size):
        momentum[np.int64(indices[j])] = np.float32(0.0)
