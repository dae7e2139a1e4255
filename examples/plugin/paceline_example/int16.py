"""Whole numbers of 16 bits: half the bytes of float32, and more digits than half precision.

Paceline's own example. An element becomes the nearest multiple of the slice's largest magnitude
over 32767; the rounding error stays in the residual.

    u = gradient + residual;  q = round(u / s), s = max |u| / 32767;  residual = u - s * q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscore.compressors.base import RESIDUAL, Compressor, State, note_largest
from pscore.errors import DecodeError
from pscore.types import ByteArray, FloatArray

HEAD = 4  # Bytes of the scale s, float32; the elements follow, 2 bytes each.
LEVELS = 32767
# The largest scale, rounded down: each multiple of it is finite in float32.
SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(LEVELS), np.float32(0.0))


@dataclass(frozen=True)
class Int16(Compressor):
    """Multiples of the largest magnitude over 32767, with error feedback."""

    name: ClassVar[str] = "int16"
    source: ClassVar[str] = "Paceline's example"

    def payload_nbytes_max(self, numel: int) -> int:
        """Returns 4 bytes and 2 for each element."""
        return HEAD + 2 * numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """Checks the length, and that the scale is a finite size."""
        if len(payload) != self.payload_nbytes_max(numel):
            raise DecodeError(f"int16 payload of {len(payload)} bytes for {numel} elements")
        scale = payload[:HEAD].copy().view("<f4")[0]
        if not 0.0 <= scale <= SCALE_MAX:
            raise DecodeError(f"int16 payload has scale {scale}")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Rounds to the nearest multiple."""
        self.require_room(grad, state)
        given = grad + state[RESIDUAL]
        largest = np.abs(given).max(initial=np.float32(0.0))
        note_largest(state, largest.view(np.int32), self.name)
        scale = min(largest / np.float32(LEVELS), SCALE_MAX)
        whole = np.rint(given / scale) if scale else np.zeros_like(given)
        whole = np.clip(whole, -LEVELS, LEVELS).astype("<i2")
        out[:HEAD].view("<f4")[0] = scale
        out[HEAD : HEAD + 2 * len(grad)].view("<i2")[:] = whole
        state[RESIDUAL][:] = given - whole * scale
        return HEAD + 2 * len(grad)

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Multiplies and adds."""
        one = payload[:HEAD].copy().view("<f4")[0]
        sent = payload[HEAD:].copy().view("<i2") * one * np.float32(scale)
        np.copyto(out, sent) if assign else np.add(out, sent, out=out)
