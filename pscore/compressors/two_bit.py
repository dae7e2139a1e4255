r"""2-bit: each element as +threshold, 0 or -threshold; the rest waits in the residual.

MXNet's 2-bit compressor (Apache MXNet, "Gradient Compression", 2018; its code at b84609d3,
`gradient_compression-inl.h`); the idea goes back to Nikko Strom, "Scalable distributed DNN training
using commodity GPU cloud computing", Interspeech 2015.

    u = g + r
    u >=  t: send +v, r = u - v      u <= -t: send -v, r = u + v      else: send 0, r = u

With a fixed threshold v = t, as in MXNet. With `threshold=0`, the default, each block has its own,
in the form of ternary weights (Li et al., "Ternary Weight Networks", arXiv:1605.04711):

    t = 2 * sqrt(mean(u^2));  v = mean of the |u| that are t or more

both over a sample, elements 0 to 255 and 1024 to 1279 of the block; where none of these is t or
more and not zero, t = v = max(|u|) of the whole block.

Payload of n elements: with adapted thresholds, ceil(n / 2048) float32 values v, one for each block
of 2048 elements, little-endian; then 4 * ceil(n / 16) bytes of codes. Element i of a group of 16 is
in byte i / 4 of its word, the first in the highest two bits: 11 is +v, 10 is -v, 00 is 0. 01 is
refused, and so are codes behind the last element that are not 00. A v below 2^-100 is sent as 0,
and so are its block's elements. Squares are added as float32 if that holds them (`blocks.py`).

Differs from MXNet: gradients are means over a batch and not sums, so that MXNet's default of 0.5
would be about 0.5 / batch. With a fixed threshold the residual of an element that stays beyond it
grows more and more; with v, large elements leave at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, note_largest
from pscore.compressors.blocks import BLOCK, SCALE_MIN
from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_range
from pscore.types import ByteArray, FloatArray

THRESHOLD_MAX = 1e30
FACTOR = 2.0  # Multiple of a block's root mean square.


@dataclass(frozen=True)
class TwoBit(Compressor):
    """Two bits an element.

    Attributes:
        threshold: In units of mean gradients; 0 adapts it to each block.
    """

    name = "2bit"
    source = "MXNet gradient compression; Strom, Interspeech 2015"
    examples = ("", "(threshold=0.02)")

    threshold: float = 0.0

    def __post_init__(self) -> None:
        require_range("2bit.threshold", self.threshold, 0.0, THRESHOLD_MAX)

    def payload_nbytes_max(self, numel: int) -> int:
        """A quarter of a byte per element, and the thresholds."""
        return self._scales_nbytes(numel) + 4 * -(-numel // 16)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, thresholds that are numbers, and no unused code."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = self._split(payload, numel)
        blocks.check_scales(self.name, scales)
        blocks.check_ternary(self.name, data, numel)

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Compares with the threshold in one pass."""
        nbytes, head = self.payload_nbytes_max(len(grad)), self._scales_nbytes(len(grad))
        data = out[head:nbytes]
        data[-4:] = 0
        self.require_room(grad, state)
        if self.threshold:
            fixed = np.float32(self.threshold)
            largest = _encode_fixed(read_only(grad), state[RESIDUAL], fixed, data)
        else:
            scales = out[:head].view("<f4")
            largest = _encode_adapted(read_only(grad), state[RESIDUAL], scales, data)
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds the thresholds."""
        scales, data = self._split(payload, len(out))
        blocks.decode_ternary(scales, data, out, np.float32(scale), assign)

    def _scales_nbytes(self, numel: int) -> int:
        return 0 if self.threshold else 4 * blocks.num_blocks(numel)

    def _split(self, payload: ByteArray, numel: int) -> tuple[FloatArray, ByteArray]:
        if not self.threshold:
            return blocks.split(payload, numel)
        scales = np.array([self.threshold], dtype=np.float32)
        return read_only(scales), aligned(payload, "<u1")


@kernel
def _encode_fixed(
    grad: FloatArray, residual: FloatArray, threshold: np.float32, out: ByteArray
) -> np.int32:
    codes = np.empty(BLOCK, np.uint8)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        _take_and_quantise(grad[start:stop], r, threshold, codes)
        largest = max(largest, blocks.max_bits(r))
        blocks.clear_tail(codes, stop - start)
        blocks.pack_2(codes, out[start // 4 : (stop + 3) // 4])
    return largest


@kernel
def _encode_adapted(
    grad: FloatArray, residual: FloatArray, scales: FloatArray, out: ByteArray
) -> np.int32:
    codes, lanes = np.empty(BLOCK, np.uint8), np.empty(blocks.LANES)
    sums, limit = np.empty(blocks.LANES, np.float32), np.empty(1, np.float32)
    count = np.empty(1, np.int32)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        limit.view(np.int32)[0] = blocks.take_max(grad[start:stop], r)
        largest = max(largest, limit.view(np.int32)[0])
        squares = blocks.sample_squares(r, sums, lanes)
        threshold = np.float32(FACTOR * math.sqrt(squares / blocks.num_sampled(r.size)))
        value = blocks.mean_beyond(r, threshold, sums, lanes, count)
        if count[0] == 0:
            threshold = value = limit[0]
        is_sent = value >= SCALE_MIN
        scales[start // BLOCK] = value if is_sent else np.float32(0.0)
        _quantise(r, threshold if is_sent else np.float32(np.inf), value, codes)
        blocks.clear_tail(codes, stop - start)
        blocks.pack_2(codes, out[start // 4 : (stop + 3) // 4])
    return largest


@kernel
def _take_and_quantise(
    g: FloatArray, r: FloatArray, threshold: np.float32, codes: ByteArray
) -> None:
    zero = np.float32(0.0)
    for i in range(g.size):
        u = r[i] + g[i]
        up, down = u >= threshold, u <= -threshold
        codes[i] = np.uint8(3) if up else (np.uint8(2) if down else np.uint8(0))
        r[i] = u - (threshold if up else (-threshold if down else zero))


@kernel
def _quantise(r: FloatArray, threshold: np.float32, value: np.float32, codes: ByteArray) -> None:
    zero = np.float32(0.0)
    for i in range(r.size):
        u = r[i]
        up, down = u >= threshold, u <= -threshold
        codes[i] = np.uint8(3) if up else (np.uint8(2) if down else np.uint8(0))
        r[i] = u - (value if up else (-value if down else zero))
