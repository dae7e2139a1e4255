"""bfloat16: the upper half of each float32, little-endian, 2 bytes.

Dhiraj Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.

    u = g + r;  b = bfloat16(u), to the nearest, ties to even;  r = u - float(b)

Payload of n elements: 2 * n bytes, none of them NaN or Inf. What would round to Inf is sent as the
largest finite number, 0x7f7f.

Differs from the paper: what rounding cuts off stays in the residual (arXiv:1901.09847), which makes
up for the 8 bits of precision; sums are made in float32.
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

LARGEST = uint32(0x7F7F)


@dataclass(frozen=True)
class BF16(Compressor):
    """bfloat16 with error feedback."""

    name: ClassVar[str] = "bf16"
    source: ClassVar[str] = "Kalamkar et al., arXiv:1905.12322"

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
        require_finite(_encode(read_only(grad), state[RESIDUAL], upper), self.name)
        return 2 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Widens and adds."""
        _decode(aligned(payload, "<u2"), out, np.float32(scale), assign)


@kernel
def _encode(grad: FloatArray, residual: FloatArray, out: np.ndarray) -> np.bool:
    scratch = np.empty(BLOCK, np.float32)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r, upper, sent = residual[start:stop], out[start:stop], scratch[: stop - start]
        largest = max(largest, blocks.take_max(grad[start:stop], r))
        _narrow(r, upper)
        _widen(upper, sent)
        for i in range(r.size):
            r[i] -= sent[i]
    return largest < INF_BITS


@kernel
def _narrow(r: FloatArray, upper: np.ndarray) -> None:
    bits = r.view(np.uint32)
    for i in range(bits.size):
        b = uint32(bits[i] & uint32(0x7FFFFFFF))
        sign = uint32(uint32(bits[i] >> uint32(16)) & uint32(0x8000))
        odd = uint32(uint32(b >> uint32(16)) & uint32(1))
        rounded = uint32(uint32(uint32(b + uint32(0x7FFF)) + odd) >> uint32(16))
        magnitude = LARGEST if rounded > LARGEST else rounded
        upper[i] = np.uint16(uint32(sign | magnitude))


@kernel
def _widen(upper: np.ndarray, out: FloatArray) -> None:
    bits = out.view(np.uint32)
    for i in range(upper.size):
        bits[i] = uint32(uint32(upper[i]) << uint32(16))


@kernel
def _decode(upper: np.ndarray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        part, wide = out[start:stop], scratch[: stop - start]
        _widen(upper[start:stop], wide)
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += wide[i] * scale


@kernel
def _has_special(upper: np.ndarray) -> np.bool:
    largest = np.uint16(0)
    for i in range(upper.size):
        largest = max(largest, upper[i] & np.uint16(0x7FFF))
    return largest >= np.uint16(0x7F80)
