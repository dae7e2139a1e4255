r"""2-bit: each element as +threshold, 0 or -threshold; what is left waits in the residual.

MXNet's 2-bit compressor (Apache MXNet, "Gradient Compression", 2018; its code at b84609d3,
`gradient_compression-inl.h`); the idea goes back to Nikko Strom, "Scalable distributed DNN training
using commodity GPU cloud computing", Interspeech 2015.

    u = g + r
    u >=  t: send +t, r = u - t      u <= -t: send -t, r = u + t      else: send 0, r = u

Payload of n elements: with an adapted threshold, ceil(n / 2048) float32 thresholds, one for each
block of 2048 elements, little-endian; then 4 * ceil(n / 16) bytes of codes. Element i of a group of
16 is in byte i / 4 of its word, the first in the highest two bits: 11 is +t, 10 is -t, 00 is 0. 01
is refused, and so are codes behind the last element that are not 00.

Differs from MXNet: gradients are means over a batch and not sums, so that MXNet's default of 0.5
would be about 0.5 / batch; with `threshold=0`, the default, the threshold of a block is 1.25 times
the mean of |u| in it, which for Gaussian and Laplacian u is near the one that leaves the least
residual (t = 1.13 and 1.41 times the mean of |u|, from E[(2|u|t - t^2); |u| >= t]). With a fixed
one, an element that stays beyond it owes more and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, require_finite
from pscore.compressors.blocks import BLOCK, INF_BITS, SCALE_MIN
from pscore.kernels import kernel, read_only
from pscore.rules.base import require_range
from pscore.types import ByteArray, FloatArray

THRESHOLD_MAX = 1e30
FACTOR = np.float32(1.25)  # Of the mean of |u| in a block.


@dataclass(frozen=True)
class TwoBit(Compressor):
    """Two bits an element.

    Attributes:
        threshold: In units of mean gradients; 0 adapts it to each block.
    """

    name: ClassVar[str] = "2bit"
    source: ClassVar[str] = "MXNet gradient compression; Strom, Interspeech 2015"

    threshold: float = 0.0

    def __post_init__(self) -> None:
        require_range("2bit.threshold", self.threshold, 0.0, THRESHOLD_MAX)

    def payload_nbytes_max(self, numel: int) -> int:
        """A quarter of a byte per element, and the thresholds."""
        return self._scales_nbytes(numel) + 4 * -(-numel // 16)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, thresholds that are numbers, and codes that there are."""
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
        ok: bool | np.bool
        if self.threshold:
            fixed = np.float32(self.threshold)
            ok = _encode_fixed(read_only(grad), state[RESIDUAL], fixed, data)
        else:
            scales = out[:head].view("<f4")
            ok = _encode_adapted(read_only(grad), state[RESIDUAL], scales, data)
        require_finite(ok, self.name)
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
) -> np.bool:
    codes = np.empty(BLOCK, np.uint8)
    largest = np.int32(0)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        _take_and_quantise(grad[start:stop], r, threshold, codes)
        largest = max(largest, blocks.max_bits(r))
        blocks.clear_tail(codes, stop - start)
        blocks.pack_2(codes, out[start // 4 : (stop + 3) // 4])
    return largest < INF_BITS


@kernel
def _encode_adapted(
    grad: FloatArray, residual: FloatArray, scales: FloatArray, out: ByteArray
) -> bool:
    codes, lanes = np.empty(BLOCK, np.uint8), np.empty(blocks.LANES, np.float32)
    is_finite = True
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        r = residual[start:stop]
        blocks.take(grad[start:stop], r)
        total = blocks.sum_abs(r, lanes)
        is_finite &= np.isfinite(total)
        threshold = FACTOR * (total / np.float32(r.size))
        is_sent = threshold >= SCALE_MIN
        scales[start // BLOCK] = threshold if is_sent else np.float32(0.0)
        _quantise(r, threshold if is_sent else np.float32(np.inf), codes)
        blocks.clear_tail(codes, stop - start)
        blocks.pack_2(codes, out[start // 4 : (stop + 3) // 4])
    return is_finite


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
def _quantise(r: FloatArray, threshold: np.float32, codes: ByteArray) -> None:
    zero = np.float32(0.0)
    for i in range(r.size):
        u = r[i]
        up, down = u >= threshold, u <= -threshold
        codes[i] = np.uint8(3) if up else (np.uint8(2) if down else np.uint8(0))
        r[i] = u - (threshold if up else (-threshold if down else zero))
