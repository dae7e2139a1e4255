"""int8: each element as a multiple of its block's scale, -127 to 127.

Tim Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861 (blocks of
2048, each with its own largest magnitude).

    u = g + r;  m = max(|u|) of the block;  s = m / 127, or the largest of which float32 holds 127
    q = round(u * (127 / m)), ties to even;  send q;  r = u - q * s

Payload of n elements, little-endian: ceil(n / 2048) float32 scales s, then n bytes q; -128 is
refused, and so is an s of which float32 does not hold 127. A block with m below 2^-100 is sent as
zeros.

Differs from the paper: the levels are linear and not "dynamic", and the rounding error stays in
the residual (arXiv:1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import RESIDUAL, Compressor, State, note_largest
from pscore.compressors.blocks import BLOCK, SCALE_MIN
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

LEVELS = np.float32(127.0)
SCALE_MAX = blocks.largest_scale(127.0)
ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer.


@dataclass(frozen=True)
class Int8(Compressor):
    """One byte an element."""

    name = "int8"
    source = "Dettmers et al., arXiv:2110.02861"

    def payload_nbytes_max(self, numel: int) -> int:
        """One byte per element, and the scales."""
        return 4 * blocks.num_blocks(numel) + numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, scales that are numbers, and levels in range."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = blocks.split(payload, numel)
        blocks.check_scales(self.name, scales, float(LEVELS))
        if level_max(data) > LEVELS:
            raise DecodeError(f"{self.name} payload holds the level -128")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Rounds each block while it is in the cache."""
        nbytes, head = self.payload_nbytes_max(len(grad)), 4 * blocks.num_blocks(len(grad))
        levels = out[head:nbytes].view(np.int8)
        self.require_room(grad, state)
        largest = _encode(read_only(grad), state[RESIDUAL], out[:head].view("<f4"), levels)
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Multiplies and adds."""
        scales, data = blocks.split(payload, len(out))
        decode_levels(scales, data, out, np.float32(scale), assign)


@kernel
def _encode(
    grad: FloatArray, residual: FloatArray, scales: FloatArray, out: np.ndarray
) -> np.int32:
    zero = np.float32(0.0)
    largest = np.int32(0)
    limit = np.empty(1, np.float32)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        limit.view(np.int32)[0] = blocks.take_max(grad[start:stop], r)
        largest = max(largest, limit.view(np.int32)[0])
        is_sent = limit[0] >= SCALE_MIN
        scale = min(limit[0] / LEVELS, SCALE_MAX) if is_sent else zero
        scales[start // BLOCK] = scale
        _round(r, LEVELS / limit[0] if is_sent else zero, scale, out[start:stop])
    return largest


@kernel
def _round(r: FloatArray, inverse: np.float32, scale: np.float32, out: np.ndarray) -> None:
    for i in range(r.size):
        u = r[i]
        level = (u * inverse + ROUND) - ROUND
        out[i] = np.int8(np.int32(level))
        r[i] = u - level * scale


@kernel
def decode_levels(
    scales: FloatArray, data: ByteArray, out: FloatArray, scale: np.float32, assign: bool
) -> None:
    """Adds signed bytes times their block's scale."""
    levels = data.view(np.int8)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        part, q = out[start:stop], levels[start:stop]
        if assign:
            blocks.clear(part)
        unit = scales[start // BLOCK]
        for i in range(part.size):
            part[i] += (np.float32(q[i]) * unit) * scale


@kernel
def level_max(data: ByteArray) -> np.int32:
    """Returns the largest magnitude of signed bytes."""
    levels = data.view(np.int8)
    largest = np.int32(0)
    for i in range(levels.size):
        largest = max(largest, abs(np.int32(levels[i])))
    return largest
