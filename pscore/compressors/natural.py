"""Natural compression: each element rounded at random to one of the two nearest powers of two.

Samuel Horvath et al., "Natural Compression for Distributed Deep Learning", arXiv:1905.10988.

    |u| = 2^e * (1 + f), 0 <= f < 1
    send sign(u) * 2^(e + 1) with probability f, else sign(u) * 2^e

It is unbiased, and E[C(u)^2] <= 9/8 u^2. Payload of n elements: n bytes. The highest bit is the
sign, the lower seven are c: 0 is zero, 1 to 127 is 2^(c - 110), that is 2^-109 to 2^17. 0x80 (minus
zero) is refused. The exponent goes up where the lowest 23 bits of `draw.bits_32(i)` and the 23 bits
of the fraction, added, carry; i is the element's number in the slice.

Differs from the paper: exponents take 7 bits as in GRACE's code and not 8, which makes a byte with
the sign: what is above 2^17 is sent as 2^17, what rounds below 2^-109 as zero. With `feedback=True`
what rounding cuts off is kept and sent later (arXiv:1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import int32, uint32

from pscore.compressors import blocks, draw
from pscore.compressors.base import EMPTY, RESIDUAL, Compressor, State, aligned, require_finite
from pscore.compressors.blocks import BLOCK, INF_BITS
from pscore.errors import DecodeError
from pscore.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

OFFSET = np.int32(127 - 110)  # From a code to the exponent's bits in float32.
CODE_MAX = np.int32(127)
FRACTION = np.uint32((1 << 23) - 1)


@dataclass(frozen=True)
class Natural(Compressor):
    """Powers of two, one byte an element.

    Attributes:
        feedback: Whether what rounding cuts off is kept and sent later.
    """

    name: ClassVar[str] = "natural"
    source: ClassVar[str] = "Horvath et al., arXiv:1905.10988"

    feedback: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """A residual with `feedback` only."""
        return (RESIDUAL,) if self.feedback else ()

    def payload_nbytes_max(self, numel: int) -> int:
        """One byte per element."""
        return numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, and no minus zero."""
        blocks.check_nbytes(self.name, payload, numel, numel)
        if _has_minus_zero(aligned(payload, "<u1")):
            raise DecodeError(f"{self.name} payload holds 0x80, minus zero")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Draws one number for each element."""
        residual, data = state.get(RESIDUAL, EMPTY), out[: len(grad)]
        require_finite(_encode(read_only(grad), residual, *draw.halves(seed), data), self.name)
        return len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds the powers."""
        _decode(aligned(payload, "<u1"), out, np.float32(scale), assign)


@kernel
def _encode(
    grad: FloatArray, residual: FloatArray, low: np.uint32, high: np.uint32, out: ByteArray
) -> np.bool:
    scratch, sent = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        if residual.size:
            owed = residual[start:stop]
            blocks.take(grad[start:stop], owed)
        else:
            owed = scratch[: stop - start]
            blocks.copy(grad[start:stop], owed)
        largest = max(largest, blocks.max_bits(owed))
        _round(owed, start, low, high, out[start:stop])
        if residual.size:
            _widen(out[start:stop], sent[: stop - start])
            for i in range(owed.size):
                owed[i] -= sent[i]
    return largest < INF_BITS


@kernel
def _round(owed: FloatArray, start: int, low: np.uint32, high: np.uint32, out: ByteArray) -> None:
    bits = owed.view(np.uint32)
    for i in range(bits.size):
        magnitude = uint32(bits[i] & uint32(0x7FFFFFFF))
        index = uint32(uint32(start) + uint32(i))
        noise = uint32(draw.bits_32(index, low, high) & FRACTION)
        exponent = int32(uint32(uint32(magnitude + noise) >> uint32(23)))
        code = int32(exponent - OFFSET)
        code = CODE_MAX if code > CODE_MAX else code
        sign = int32(int32(uint32(bits[i] >> uint32(24))) & int32(0x80))
        out[i] = np.uint8(int32(sign | code)) if code > int32(0) else np.uint8(0)


@kernel
def _widen(data: ByteArray, out: FloatArray) -> None:
    bits = out.view(np.uint32)
    for i in range(data.size):
        code = uint32(uint32(data[i]) & uint32(CODE_MAX))
        sign = uint32(uint32(uint32(data[i]) & uint32(0x80)) << uint32(24))
        power = uint32(uint32(code + uint32(OFFSET)) << uint32(23))
        bits[i] = uint32(sign | power) if code > uint32(0) else uint32(0)


@kernel
def _decode(data: ByteArray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        part, wide = out[start:stop], scratch[: stop - start]
        _widen(data[start:stop], wide)
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += wide[i] * scale


@kernel
def _has_minus_zero(data: ByteArray) -> bool:
    found = False
    for i in range(data.size):
        found |= data[i] == np.uint8(0x80)
    return found
