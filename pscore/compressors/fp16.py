"""Half precision: each element as IEEE binary16, little-endian, 2 bytes.

Paulius Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740 (the number format and
its range); as a compressor in Horovod and BytePS.

    u = g + r;  h = half(clip(u, -65504, 65504)), to the nearest, ties to even;  r = u - float(h)

Payload of n elements: 2 * n bytes, none of them NaN or Inf.

Differs from Horovod and BytePS: what rounding and the range cut off stays in the residual (error
feedback, arXiv:1901.09847), so that no loss scale is needed, and sums are made in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import uint32

from pscore.compressors import blocks
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, require_finite
from pscore.compressors.blocks import BLOCK, INF_BITS
from pscore.errors import DecodeError
from pscore.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

MAX = np.float32(65504.0)
SMALL = np.float32(2.0**-14)  # The smallest normal half.
NORMAL_MIN = uint32(113 << 23)  # Its bits in float32.
HALF_ULP = np.float32(0.5)  # Its last bit is the last bit of a subnormal half: 2^-24.
HALF_ULP_BITS = uint32(126 << 23)
REBIAS = uint32((127 - 15) << 23)


@dataclass(frozen=True)
class FP16(Compressor):
    """IEEE half precision with error feedback."""

    name: ClassVar[str] = "fp16"
    source: ClassVar[str] = "Micikevicius et al., arXiv:1710.03740"

    def payload_nbytes_max(self, numel: int) -> int:
        """2 bytes per element."""
        return 2 * numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """2 bytes per element, all of them finite."""
        blocks.check_nbytes(self.name, payload, 2 * numel, numel)
        if _has_special(aligned(payload, "<u2")):
            raise DecodeError("fp16 payload holds NaN or Inf")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Rounds to the nearest half."""
        half = out[: 2 * len(grad)].view("<u2")
        require_finite(_encode(read_only(grad), state[RESIDUAL], half), self.name)
        return 2 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Widens and adds."""
        _decode(aligned(payload, "<u2"), out, np.float32(scale), assign)


@kernel
def _encode(grad: FloatArray, residual: FloatArray, out: np.ndarray) -> np.bool:
    clipped, raised = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r, half = residual[start:stop], out[start:stop]
        largest = max(largest, blocks.take_max(grad[start:stop], r))
        for i in range(r.size):
            # Below 2^-14 the addition of 0.5 rounds, and leaves the half in the lowest bits.
            clipped[i] = min(max(r[i], -MAX), MAX)
            raised[i] = min(abs(r[i]), MAX) + HALF_ULP
        _narrow(clipped, raised, half)
        _widen(half, clipped)
        for i in range(r.size):
            r[i] -= clipped[i]
    return largest < INF_BITS


@kernel
def _narrow(clipped: FloatArray, raised: FloatArray, half: np.ndarray) -> None:
    """Rounds on the bits: Numba has no half on the CPU, and CUDA has to agree."""
    bits, small = clipped.view(np.uint32), raised.view(np.uint32)
    for i in range(half.size):
        b = uint32(bits[i] & uint32(0x7FFFFFFF))
        sign = uint32(uint32(bits[i] >> uint32(16)) & uint32(0x8000))
        # Nearest, ties to even: half of the last bit less one, and one more if the last bit is odd.
        odd = uint32(uint32(b >> uint32(13)) & uint32(1))
        normal = uint32(uint32(uint32(b - REBIAS) + uint32(0xFFF)) + odd)
        below = uint32(small[i] - HALF_ULP_BITS)
        magnitude = below if b < NORMAL_MIN else uint32(normal >> uint32(13))
        half[i] = np.uint16(uint32(sign | magnitude))


@kernel
def _widen(half: np.ndarray, out: FloatArray) -> None:
    bits = out.view(np.uint32)
    zero = np.float32(0.0)
    for i in range(half.size):
        magnitude = uint32(uint32(uint32(half[i]) & uint32(0x7FFF)) << uint32(13))
        is_small = magnitude < uint32(0x400 << 13)
        bits[i] = uint32(magnitude + (NORMAL_MIN if is_small else REBIAS))
    for i in range(half.size):
        # A subnormal half has become 2^-14 * (1 + fraction): take the one away again.
        is_small = (half[i] & np.uint16(0x7FFF)) < np.uint16(0x400)
        value = out[i] - (SMALL if is_small else zero)
        out[i] = -value if half[i] >= np.uint16(0x8000) else value


@kernel
def _decode(half: np.ndarray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        part, wide = out[start:stop], scratch[: stop - start]
        _widen(half[start:stop], wide)
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += wide[i] * scale


@kernel
def _has_special(half: np.ndarray) -> np.bool:
    largest = np.uint16(0)
    for i in range(half.size):
        largest = max(largest, half[i] & np.uint16(0x7FFF))
    return largest >= np.uint16(0x7C00)
