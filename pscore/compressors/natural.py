"""Natural compression: each element rounded at random to one of the two nearest powers of two.

Samuel Horvath et al., "Natural Compression for Distributed Deep Learning", arXiv:1905.10988.

    |u| = 2^e * (1 + f), 0 <= f < 1
    send sign(u) * 2^(e + 1) with probability f, else sign(u) * 2^e

It is unbiased, and E[C(u)^2] <= 9/8 u^2. Payload of n elements: n bytes. The highest bit is the
sign, the lower seven are c: 0 is zero, 1 to 127 is 2^(c - 110), that is 2^-109 to 2^17. 0x80, minus
zero, is refused. The exponent goes up where the noise of the element (`draw.py`, with the push's
seed), times 2^7, and the 23 bits of the fraction, added, carry.

Differs from the paper: exponents take 7 bits as in GRACE's code and not 8, which makes a byte with
the sign: numbers above 2^17 are sent as 2^17, those that round below 2^-109 as zero. With
`feedback=True` the rounding error is kept and sent later (arXiv:1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import int32, uint32

from pscore.compressors import blocks, draw
from pscore.compressors.base import EMPTY, RESIDUAL, Compressor, State, aligned, note_largest
from pscore.compressors.blocks import BLOCK
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

OFFSET = np.int32(127 - 110)  # From a code to the exponent's bits in float32.
CODE_MAX = np.int32(127)
ABS_BITS = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Natural(Compressor):
    """Powers of two, one byte an element.

    Attributes:
        feedback: Whether the rounding error is kept and sent later.
    """

    name = "natural"
    source = "Horvath et al., arXiv:1905.10988"
    examples = ("", "(feedback=True)")

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
        self.require_room(grad, state)
        largest = _encode(read_only(grad), residual, *draw.halves(seed), data)
        note_largest(state, largest, self.name)
        return len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds the powers."""
        _decode(aligned(payload, "<u1"), out, np.float32(scale), assign)


@kernel
def _encode(
    grad: FloatArray, residual: FloatArray, low: np.uint32, high: np.uint32, out: ByteArray
) -> np.int32:
    largest = np.int32(0)
    words = np.empty(BLOCK // 2, np.uint32)
    noise = words.view(np.uint16)
    for start in range(0, grad.size, BLOCK):
        part, sent = grad[start : start + BLOCK], out[start : start + BLOCK]
        draw.fill(start, low, high, words)
        if residual.size:
            u = residual[start : start + BLOCK]
            largest = max(largest, blocks.take_max(part, u))
            _round(u, noise, sent)
            for i in range(u.size):
                u[i] -= _float_of(uint32(sent[i]))
        else:
            largest = max(largest, blocks.max_bits(part))
            _round(part, noise, sent)
    return largest


@kernel
def _round(u: FloatArray, noise: np.ndarray, out: ByteArray) -> None:
    for i in range(u.size):
        bits = blocks.bits_of(u[i])
        raised = uint32(uint32(bits & ABS_BITS) + uint32(uint32(noise[i]) << uint32(7)))
        code = int32(int32(raised >> uint32(23)) - OFFSET)
        sign = int32(int32(bits >> uint32(24)) & int32(0x80))
        out[i] = np.uint8(int32(sign | min(code, CODE_MAX))) if code > int32(0) else np.uint8(0)


@kernel
def _float_of(byte: np.uint32) -> np.float32:
    code = uint32(byte & uint32(CODE_MAX))
    sign = uint32(uint32(byte & uint32(0x80)) << uint32(24))
    power = uint32(uint32(code + uint32(OFFSET)) << uint32(23))
    return blocks.float_of(uint32(sign | power) if code > uint32(0) else uint32(0))


@kernel
def _decode(data: ByteArray, out: FloatArray, scale: np.float32, assign: bool) -> None:
    for start in range(0, out.size, BLOCK):
        part, sent = out[start : start + BLOCK], data[start : start + BLOCK]
        if assign:
            blocks.clear(part)
        for i in range(part.size):
            part[i] += _float_of(uint32(sent[i])) * scale


@kernel
def _has_minus_zero(data: ByteArray) -> bool:
    found = False
    for i in range(data.size):
        found |= data[i] == np.uint8(0x80)
    return found
