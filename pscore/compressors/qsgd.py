"""QSGD: each element rounded at random to one of `levels` steps of its block's scale, unbiased.

Dan Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, arXiv:1610.02132.

    m = max(|u|) of the block;  x = u * (levels / m);  l = floor(x)
    q = l + 1 with probability x - l, else l;  send q;  D = q * (m / levels)

Payload of n elements, little-endian: ceil(n / 2048) float32 scales m / levels, then n signed bytes
of at most `levels`. A block with m below 2^-100 is sent as zeros; a scale is at most the largest
of which float32 holds `levels`, and is refused beyond. In integers, so that the same is
drawn everywhere: X = u * (65536 * levels / m) in float32, towards zero, and q = (X + noise) >> 16
with the element's noise (`draw.py`) of the push's seed. |X| is at most 65536 * levels, because that
is less than 2^23 and floats are closer there than its rounding errors add up to: so q fits.

Differs from the paper: scaled by the bucket's largest magnitude and not by its L2 norm, which is
never smaller, so that the same number of levels has less variance; buckets are 2048 elements; a
level takes a byte and no Elias code. With `feedback=True` the rounding error is kept and sent
later, as in arXiv:1901.09847; without, as in the paper, it is left to the mean over steps and
workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import int32

from pscore.compressors import blocks, draw
from pscore.compressors.base import EMPTY, RESIDUAL, Compressor, State, note_largest
from pscore.compressors.blocks import BLOCK, SCALE_MIN
from pscore.compressors.int8 import decode_levels, level_max
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_range
from pscore.types import ByteArray, FloatArray

LEVELS_MAX = 127
# With so many levels E|u - D|^2 < |u|^2 in any block: the worst has 2047 elements of a quarter of a
# level beside its largest, m, and then the difference is 2047 * (3/16 - 1/16) * (m/levels)^2 - m^2.
CONTRACTING_MIN = 17
UNIT = np.float32(65536.0)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic levels, one byte an element.

    Attributes:
        levels: Steps between zero and a block's largest magnitude, 1 to 127.
        feedback: Whether the rounding error is kept and sent later.
    """

    name = "qsgd"
    source = "Alistarh et al., arXiv:1610.02132"
    examples = ("", "(levels=5, feedback=True)")

    levels: int = 127
    feedback: bool = False

    def __post_init__(self) -> None:
        require_range("qsgd.levels", self.levels, 1, LEVELS_MAX)

    @property
    def state_names(self) -> tuple[str, ...]:
        """A residual with `feedback` only."""
        return (RESIDUAL,) if self.feedback else ()

    @property
    def bounds_residual(self) -> bool:
        """True with enough levels; with fewer, small elements become larger noise."""
        return self.feedback and self.levels >= CONTRACTING_MIN

    def payload_nbytes_max(self, numel: int) -> int:
        """One byte per element, and the scales."""
        return 4 * blocks.num_blocks(numel) + numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, scales that are numbers, and levels in range."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = blocks.split(payload, numel)
        blocks.check_scales(self.name, scales, self.levels)
        largest = int(level_max(data))
        if largest > self.levels:
            raise DecodeError(
                f"{self.name} payload holds the level {largest}, at most {self.levels}"
            )

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Draws one number for each element."""
        nbytes, head = self.payload_nbytes_max(len(grad)), 4 * blocks.num_blocks(len(grad))
        self.require_room(grad, state)
        largest = _encode(
            read_only(grad),
            state.get(RESIDUAL, EMPTY),
            np.float32(self.levels),
            blocks.largest_scale(self.levels),
            *draw.halves(seed),
            out[:head].view("<f4"),
            out[head:nbytes].view(np.int8),
        )
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Multiplies and adds."""
        scales, data = blocks.split(payload, len(out))
        decode_levels(scales, data, out, np.float32(scale), assign)


@kernel
def _encode(
    grad: FloatArray,
    residual: FloatArray,
    levels: np.float32,
    scale_max: np.float32,
    low: np.uint32,
    high: np.uint32,
    scales: FloatArray,
    out: np.ndarray,
) -> np.int32:
    zero = np.float32(0.0)
    largest = np.int32(0)
    limit, words = np.empty(1, np.float32), np.empty(BLOCK // 2, np.uint32)
    noise = words.view(np.uint16)
    for start in range(0, grad.size, BLOCK):
        part, sent = grad[start : start + BLOCK], out[start : start + BLOCK]
        u = residual[start : start + BLOCK]
        bits = blocks.take_max(part, u) if residual.size else blocks.max_bits(part)
        largest = max(largest, bits)
        limit.view(np.int32)[0] = bits
        is_sent = limit[0] >= SCALE_MIN
        scale = min(limit[0] / levels, scale_max) if is_sent else zero
        scales[start // BLOCK] = scale
        inverse = levels * UNIT / limit[0] if is_sent else zero
        draw.fill(start, low, high, words)
        if residual.size:
            _round(u, inverse, noise, sent)
            for i in range(u.size):
                u[i] -= np.float32(sent[i]) * scale
        else:
            _round(part, inverse, noise, sent)
    return largest


@kernel
def _round(u: FloatArray, inverse: np.float32, noise: np.ndarray, out: np.ndarray) -> None:
    for i in range(u.size):
        x = int32(u[i] * inverse)
        out[i] = np.int8(int32(x + int32(noise[i])) >> int32(16))
