"""Half precision: each element as IEEE binary16, little-endian, 2 bytes.

Paulius Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740 (the number format and
its range); as a compressor in Horovod and BytePS.

    u = g + r;  h = half(clip(u, -65504, 65504)), to the nearest, ties to even;  r = u - float(h)

Payload of n elements: 2 * n bytes, none of them NaN or Inf.

Differs from Horovod and BytePS: the error of rounding and range stays in the residual (error
feedback, arXiv:1901.09847), so that no loss scale is needed, and sums are made in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import uint32

from pscore.compressors import blocks
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, note_largest
from pscore.compressors.blocks import BLOCK
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

MAX_BITS = uint32(0x477FE000)  # Bits of 65504, the largest half, in float32.
SMALL = np.float32(2.0**-14)  # The smallest normal half.
NORMAL_MIN = uint32(113 << 23)  # Its bits.
HALF_ULP = np.float32(0.5)  # Its last bit is the last bit of a subnormal half: 2^-24.
HALF_ULP_BITS = uint32(126 << 23)
ABS_BITS = uint32(0x7FFFFFFF)
REBIAS = uint32((127 - 15) << 23)


@dataclass(frozen=True)
class FP16(Compressor):
    """IEEE half precision with error feedback."""

    name = "fp16"
    source = "Micikevicius et al., arXiv:1710.03740"

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
        self.require_room(grad, state)
        note_largest(state, _encode(read_only(grad), state[RESIDUAL], half), self.name)
        return 2 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Widens and adds."""
        _decode(aligned(payload, "<u2"), out, np.float32(scale), assign)


@kernel
def _encode(grad: FloatArray, residual: FloatArray, out: np.ndarray) -> np.uint32:
    largest = uint32(0)
    for i in range(grad.size):
        u = np.float32(residual[i] + grad[i])
        bits = blocks.bits_of(u)
        largest = max(largest, uint32(bits & ABS_BITS))
        half = _half_of(bits)
        out[i] = np.uint16(half)
        residual[i] = u - _float_of(half)
    return largest


@kernel
def _half_of(bits: np.uint32) -> np.uint32:
    """Rounds on the bits: Numba has no half on the CPU, and CUDA has to agree."""
    sign = uint32(uint32(bits >> uint32(16)) & uint32(0x8000))
    b = min(uint32(bits & ABS_BITS), MAX_BITS)
    # Nearest, ties to even: half of the last bit less one, and one more if the last bit is odd.
    odd = uint32(uint32(b >> uint32(13)) & uint32(1))
    normal = uint32(uint32(uint32(b - REBIAS) + uint32(0xFFF)) + odd)
    # Below 2^-14 the addition of 0.5 rounds, and leaves the half in the lowest bits.
    below = uint32(blocks.bits_of(blocks.float_of(b) + HALF_ULP) - HALF_ULP_BITS)
    return uint32(sign | (below if b < NORMAL_MIN else uint32(normal >> uint32(13))))


@kernel
def _float_of(half: np.uint32) -> np.float32:
    magnitude = uint32(uint32(half & uint32(0x7FFF)) << uint32(13))
    sign = uint32(uint32(half & uint32(0x8000)) << uint32(16))
    is_small = magnitude < uint32(0x400 << 13)
    raised = blocks.float_of(magnitude + (NORMAL_MIN if is_small else REBIAS))
    # A subnormal half has become 2^-14 * (1 + fraction): take the one away again.
    value = raised - (SMALL if is_small else np.float32(0.0))
    return blocks.float_of(blocks.bits_of(value) | sign)


@kernel
def _decode(half: np.ndarray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    for start in range(0, out.size, BLOCK):
        part, sent = out[start : start + BLOCK], half[start : start + BLOCK]
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += _float_of(uint32(sent[i])) * scale


@kernel
def _has_special(half: np.ndarray) -> np.bool:
    largest = np.uint16(0)
    for i in range(half.size):
        largest = max(largest, half[i] & np.uint16(0x7FFF))
    return largest >= np.uint16(0x7C00)
