"""1-bit: the sign of each element, and for each block of 2048 the mean magnitude, with feedback.

Shuai Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with
Error-Feedback", arXiv:1905.10936 (blocks with a scale each); Sai Praneeth Karimireddy et al.,
"Error Feedback Fixes SignSGD", arXiv:1901.09847.

    u = g + r;  s = mean(|u|) of the block;  send sign(u) * s;  r = u - sign(u) * s

Payload of n elements, little-endian: ceil(n / 2048) float32 scales, then 4 * ceil(n / 32) bytes of
signs, element i in byte i / 8, the first in the highest bit. A set bit is u < 0; zero counts as
positive. Bits behind the last element are zero. A mean below 2^-100 is sent as 0.

Differs from the papers: blocks are 2048 elements of the flat vector and not tensors; momentum is
the shard's optimizer's, behind the mean; the learning rate is applied there as well. Not MXNet's
1-bit, which sends +-1, nor Seide et al. (2014), who send two values, one for each sign.
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


@dataclass(frozen=True)
class OneBit(Compressor):
    """One bit an element."""

    name = "1bit"
    source = "Zheng et al., arXiv:1905.10936; Karimireddy et al., arXiv:1901.09847"

    def payload_nbytes_max(self, numel: int) -> int:
        """An eighth of a byte per element, and the scales."""
        return 4 * blocks.num_blocks(numel) + 4 * -(-numel // 32)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, scales that are numbers, and no bits behind the last element."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = blocks.split(payload, numel)
        blocks.check_scales(self.name, scales)
        used, rest = divmod(numel, 8)
        behind = data[used:].copy()
        if rest:
            behind[0] &= 0xFF >> rest
        if behind.any():
            raise DecodeError(f"{self.name} payload holds signs behind its {numel} elements")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Encodes block by block, while each block is in the cache."""
        nbytes, head = self.payload_nbytes_max(len(grad)), 4 * blocks.num_blocks(len(grad))
        data = out[head:nbytes]
        data[-4:] = 0
        self.require_room(grad, state)
        largest = _encode(read_only(grad), state[RESIDUAL], out[:head].view("<f4"), data)
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds or takes away each block's scale."""
        scales, data = blocks.split(payload, len(out))
        _decode(scales, data, out, np.float32(scale), assign)


@kernel
def _encode(grad: FloatArray, residual: FloatArray, scales: FloatArray, out: ByteArray) -> np.int32:
    codes, lanes = np.empty(BLOCK, np.uint8), np.empty(blocks.LANES, np.float32)
    wide_lanes, largest = np.empty(blocks.LANES), np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        largest = max(largest, blocks.take_max(grad[start:stop], r))
        mean = blocks.mean_abs(r, lanes, wide_lanes)
        scale = mean if mean >= SCALE_MIN else np.float32(0.0)
        scales[start // BLOCK] = scale
        _signs(r, scale, codes)
        blocks.clear_tail(codes, stop - start)
        blocks.pack_1(codes, out[start // 8 : (stop + 7) // 8])
    return largest


@kernel
def _signs(r: FloatArray, scale: np.float32, codes: ByteArray) -> None:
    for i in range(r.size):
        u = r[i]
        is_negative = u < np.float32(0.0)
        codes[i] = np.uint8(1) if is_negative else np.uint8(0)
        r[i] = u - (-scale if is_negative else scale)


@kernel
def _decode(
    scales: FloatArray, data: ByteArray, out: FloatArray, scale: np.float32, assign: bool
) -> None:
    codes = np.empty(BLOCK, np.uint8)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        blocks.unpack_1(data[start // 8 : (stop + 7) // 8], codes)
        part = out[start:stop]
        if assign:
            blocks.clear(part)
        value = scales[start // BLOCK] * scale
        for i in range(part.size):
            part[i] += -value if codes[i] else value
