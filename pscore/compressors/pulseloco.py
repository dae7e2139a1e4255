r"""PULSELoCo: the elements of a move that bfloat16 weights show; the others wait in the residual.

Erfan Miahi and Eugene Belilovsky, "Understanding and Exploiting Weight Update Sparsity for
Communication-Efficient Distributed RL", arXiv:2602.03839, for the moves of rounds (a digest). At
the learning rates of reinforcement learning few moves change a weight by as much as bfloat16 shows.

    u = g + r;  S = {i: bf16(w[i] - u[i]) != bf16(w[i])};  send u[i] for i in S;  r = u, and 0 in S

w are the weights at the begin of the round, bf16 rounds to the nearest, ties to even. Where no
move begins (a gradient) w is 0, and all is sent. For pulls u = W - X, and S are the elements of X
that bfloat16 shows to change: bf16(X) is bf16(W) afterwards.

Payload of n elements, little-endian: 4 * ceil(n / 32) bytes, a bit for each element that is sent,
the lowest first; then these as float32. Bits behind the last element are 0.

Differs from the paper: the form of the payload, and the residual of elements that were sent is 0,
since they travel in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import ORIGIN, RESIDUAL, Compressor, State, aligned, note_largest
from pscore.compressors.blocks import ABS_BITS
from pscore.errors import DecodeError
from pscore.memory.kernels import bf16_of, kernel, read_only
from pscore.types import ByteArray, FloatArray

WORD = 32


def mask_nbytes(numel: int) -> int:
    """Returns the bytes of the bits."""
    return 4 * -(-numel // WORD)


@dataclass(frozen=True)
class PulseLoCo(Compressor):
    """The elements that change a weight in bfloat16."""

    name = "pulseloco"
    source = "Miahi and Belilovsky, arXiv:2602.03839"
    needs_origin = True

    def payload_nbytes_max(self, numel: int) -> int:
        """All elements, and their bits."""
        return mask_nbytes(numel) + 4 * numel

    def payload_nbytes(self, buffer: ByteArray, numel: int) -> int:
        """Returns the length that follows from the bits."""
        mask = buffer[: mask_nbytes(numel)]
        return mask.nbytes + 4 * int(np.unpackbits(mask).sum())

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, no bits behind the last element, values that are numbers."""
        head = mask_nbytes(numel)
        if payload.nbytes < head:
            raise DecodeError(f"{self.name} payload of {payload.nbytes} bytes has no bits")
        blocks.check_nbytes(self.name, payload, self.payload_nbytes(payload, numel), numel)
        if np.unpackbits(payload[:head][numel // 8 :], bitorder="little")[numel % 8 :].any():
            raise DecodeError(f"{self.name} payload has bits behind its last element")
        if not np.isfinite(aligned(payload[head:], "<f4")).all():
            raise DecodeError(f"{self.name} payload holds a value that is NaN or Inf")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Selects and clears."""
        self.require_room(grad, state)
        residual, origin = state[RESIDUAL], state.get(ORIGIN)
        if origin is None:
            origin = np.zeros_like(residual)
        head = mask_nbytes(len(grad))
        out[:head] = 0
        values = out[head : self.payload_nbytes_max(len(grad))].view("<f4")
        count, largest = _encode(read_only(grad), residual, read_only(origin), out[:head], values)
        note_largest(state, largest, self.name)
        return head + 4 * count

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Scatters."""
        if assign:
            blocks.clear(out)
        head = mask_nbytes(len(out))
        mask, values = aligned(payload[:head], "<u1"), aligned(payload[head:], "<f4")
        _decode_add(mask, values, out, np.float32(scale))


@kernel
def _encode(
    grad: FloatArray, residual: FloatArray, origin: FloatArray, mask: ByteArray, values: FloatArray
) -> tuple[int, np.int32]:
    """Returns the number of elements sent, and the largest magnitude's bits."""
    largest, count = np.int32(0), 0
    for i in range(grad.size):
        u = residual[i] + grad[i]
        largest = max(largest, np.float32(u).view(np.int32) & ABS_BITS)
        before = np.float32(origin[i])
        after = np.float32(before - u)
        residual[i] = u
        if bf16_of(after.view(np.uint32)) != bf16_of(before.view(np.uint32)):
            mask[i >> 3] |= np.uint8(1 << (i & 7))
            values[count] = u
            count += 1
            residual[i] = np.float32(0.0)
    return count, largest


@kernel
def _decode_add(mask: ByteArray, values: FloatArray, out: FloatArray, scale: np.float32) -> None:
    count = 0
    for i in range(out.size):
        if mask[i >> 3] >> (i & 7) & 1:
            out[i] += values[count] * scale
            count += 1
