"""bfloat16: the upper half of each float32, little-endian, 2 bytes.

Dhiraj Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.

    u = g + r;  b = bfloat16(u), to the nearest, ties to even;  r = u - float(b)

Payload of n elements: 2 * n bytes, none of them NaN or Inf. A number that would round to Inf is
sent as the largest finite number, 0x7f7f.

Differs from the paper: the rounding error stays in the residual (arXiv:1901.09847), which makes
up for the 8 bits of precision; sums are made in float32.
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

LARGEST = uint32(0x7F7F)


@dataclass(frozen=True)
class BF16(Compressor):
    """bfloat16 with error feedback."""

    name = "bf16"
    source = "Kalamkar et al., arXiv:1905.12322"

    def payload_nbytes_max(self, numel: int) -> int:
        """2 bytes per element."""
        return 2 * numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """2 bytes per element, all of them finite."""
        blocks.check_nbytes(self.name, payload, 2 * numel, numel)
        if _has_special(aligned(payload, "<u2")):
            raise DecodeError("bf16 payload holds NaN or Inf")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Rounds to the nearest bfloat16."""
        upper = out[: 2 * len(grad)].view("<u2")
        self.require_room(grad, state)
        note_largest(state, _encode(read_only(grad), state[RESIDUAL], upper), self.name)
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
        b = uint32(bits & uint32(0x7FFFFFFF))
        largest = max(largest, b)
        sign = uint32(uint32(bits >> uint32(16)) & uint32(0x8000))
        odd = uint32(uint32(b >> uint32(16)) & uint32(1))
        rounded = uint32(uint32(uint32(b + uint32(0x7FFF)) + odd) >> uint32(16))
        upper = uint32(sign | min(rounded, LARGEST))
        out[i] = np.uint16(upper)
        residual[i] = u - _float_of(upper)
    return largest


@kernel
def _float_of(upper: np.uint32) -> np.float32:
    return blocks.float_of(upper << uint32(16))


@kernel
def _decode(upper: np.ndarray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    for start in range(0, out.size, BLOCK):
        part, sent = out[start : start + BLOCK], upper[start : start + BLOCK]
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += _float_of(uint32(sent[i])) * scale


@kernel
def _has_special(upper: np.ndarray) -> np.bool:
    largest = np.uint16(0)
    for i in range(upper.size):
        largest = max(largest, upper[i] & np.uint16(0x7FFF))
    return largest >= np.uint16(0x7F80)
