"""TernGrad: each element as +s, 0 or -s at random, unbiased but for its clipping.

Wei Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
NeurIPS 2017, arXiv:1705.07878.

    sigma = sqrt(mean(u^2)) of the block;  s = min(max(|u|), 2.5 * sigma);  x = min(|u|, s)
    send sign(u) * s with probability x / s, else 0

Payload of n elements, little-endian: ceil(n / 2048) float32 scales s, then 4 * ceil(n / 16) bytes
of codes as in `two_bit.py`: 11 is +s, 10 is -s, 00 is 0. A block with s below 2^-100 is sent as
zeros. An element is sent where |u| * (65536 / s), in float32 and towards zero, is more than its
noise (`draw.py`) with the push's seed. Squares are added as float32 if that holds them
(`blocks.py`).

Differs from the paper: blocks of 2048 elements stand for layers; sigma is taken around zero; scales
are not shared between workers. With `feedback=True` the error is kept and sent later, which
the paper does not do: rounding to 0 or s adds more error than it removes, so that it helps only
where the gradient is small against the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy import int32

from pscore.compressors import blocks, draw
from pscore.compressors.base import EMPTY, RESIDUAL, Compressor, State, note_largest
from pscore.compressors.blocks import BLOCK, SCALE_MIN
from pscore.memory.kernels import kernel, read_only
from pscore.types import ByteArray, FloatArray

CLIP = 2.5  # Standard deviations.
UNIT = np.float32(65536.0)


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Two bits an element, at random.

    Attributes:
        feedback: Whether the error is kept and sent later.
    """

    name = "terngrad"
    source = "Wen et al., arXiv:1705.07878"
    examples = ("", "(feedback=True)")
    # Not even with a residual: rounding to 0 or s adds more error than it removes.
    bounds_residual = False

    feedback: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """A residual with `feedback` only."""
        return (RESIDUAL,) if self.feedback else ()

    def payload_nbytes_max(self, numel: int) -> int:
        """A quarter of a byte per element, and the scales."""
        return 4 * blocks.num_blocks(numel) + 4 * -(-numel // 16)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, scales that are numbers, and no unused code."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = blocks.split(payload, numel)
        blocks.check_scales(self.name, scales)
        blocks.check_ternary(self.name, data, numel)

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Draws one number for each element."""
        nbytes, head = self.payload_nbytes_max(len(grad)), 4 * blocks.num_blocks(len(grad))
        data = out[head:nbytes]
        data[-4:] = 0
        residual, scales = state.get(RESIDUAL, EMPTY), out[:head].view("<f4")
        self.require_room(grad, state)
        largest = _encode(read_only(grad), residual, *draw.halves(seed), scales, data)
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Adds or takes away each block's scale."""
        scales, data = blocks.split(payload, len(out))
        blocks.decode_ternary(scales, data, out, np.float32(scale), assign)


@kernel
def _encode(
    grad: FloatArray,
    residual: FloatArray,
    low: np.uint32,
    high: np.uint32,
    scales: FloatArray,
    out: ByteArray,
) -> np.int32:
    codes, words = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 2, np.uint32)
    sums, lanes = np.empty(blocks.LANES, np.float32), np.empty(blocks.LANES)
    limit, noise = np.empty(1, np.float32), words.view(np.uint16)
    largest, zero = np.int32(0), np.float32(0.0)
    for start in range(0, grad.size, BLOCK):
        part, u = grad[start : start + BLOCK], residual[start : start + BLOCK]
        bits = blocks.take_max(part, u) if residual.size else blocks.max_bits(part)
        largest = max(largest, bits)
        limit.view(np.int32)[0] = bits
        if residual.size:
            squares = blocks.squares(u, sums, lanes)
        else:
            squares = blocks.squares(part, sums, lanes)
        scale = min(limit[0], np.float32(CLIP * math.sqrt(squares / part.size)))
        is_sent = scale >= SCALE_MIN
        scale = scale if is_sent else zero
        scales[start // BLOCK] = scale
        inverse = UNIT / scale if is_sent else zero
        draw.fill(start, low, high, words)
        if residual.size:
            _draw(u, inverse, noise, codes)
            for i in range(u.size):
                code = codes[i]
                up, down = code == np.uint8(3), code == np.uint8(2)
                u[i] -= scale if up else (-scale if down else zero)
        else:
            _draw(part, inverse, noise, codes)
        blocks.clear_tail(codes, part.size)
        blocks.pack_2(codes, out[start // 4 : start // 4 + (part.size + 3) // 4])
    return largest


@kernel
def _draw(u: FloatArray, inverse: np.float32, noise: np.ndarray, codes: ByteArray) -> None:
    for i in range(u.size):
        is_sent = int32(noise[i]) < int32(abs(u[i]) * inverse)
        code = np.uint8(2) if u[i] < np.float32(0.0) else np.uint8(3)
        codes[i] = code if is_sent else np.uint8(0)
