"""QSGD: each element rounded at random to one of `levels` steps of its block's scale, unbiased.

Dan Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, arXiv:1610.02132.

    m = max(|u|) of the block;  x = |u| * (levels / m);  l = floor(x)
    q = l + 1 with probability x - l, else l;  send sign(u) * q;  D = sign(u) * q * (m / levels)

Payload of n elements, little-endian: ceil(n / 2048) float32 scales m / levels, then n signed bytes
of at most `levels`. A block with m below 2^-100 is sent as zeros. The probability is compared with
`draw.unit(i)` of the push's seed, i the element's number in the slice.

Differs from the paper: scaled by the bucket's largest magnitude and not by its L2 norm, which is
never smaller, so that the same number of levels has less variance; buckets are 2048 elements; a
level takes a byte and no Elias code. With `feedback=True` what rounding cuts off is kept and sent
later, as in arXiv:1901.09847; without, as in the paper, it is left to the mean over steps and
workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import int32, uint32

from pscore.compressors import blocks, draw
from pscore.compressors.base import EMPTY, RESIDUAL, Compressor, State, require_finite
from pscore.compressors.blocks import BLOCK, INF_BITS, SCALE_MIN
from pscore.compressors.int8 import decode_levels, level_max
from pscore.errors import DecodeError
from pscore.kernels import kernel, read_only
from pscore.rules.base import require_range
from pscore.types import ByteArray, FloatArray

LEVELS_MAX = 127


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic levels, one byte an element.

    Attributes:
        levels: Steps between zero and a block's largest magnitude, 1 to 127.
        feedback: Whether what rounding cuts off is kept and sent later.
    """

    name: ClassVar[str] = "qsgd"
    source: ClassVar[str] = "Alistarh et al., arXiv:1610.02132"

    levels: int = 127
    feedback: bool = False

    def __post_init__(self) -> None:
        require_range("qsgd.levels", self.levels, 1, LEVELS_MAX)

    @property
    def state_names(self) -> tuple[str, ...]:
        """A residual with `feedback` only."""
        return (RESIDUAL,) if self.feedback else ()

    def payload_nbytes_max(self, numel: int) -> int:
        """One byte per element, and the scales."""
        return 4 * blocks.num_blocks(numel) + numel

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, scales that are numbers, levels that there are."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, data = blocks.split(payload, numel)
        blocks.check_scales(self.name, scales)
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
        ok = _encode(
            read_only(grad),
            state.get(RESIDUAL, EMPTY),
            np.float32(self.levels),
            *draw.halves(seed),
            out[:head].view("<f4"),
            out[head:nbytes].view(np.int8),
        )
        require_finite(ok, self.name)
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
    low: np.uint32,
    high: np.uint32,
    scales: FloatArray,
    out: np.ndarray,
) -> np.bool:
    zero = np.float32(0.0)
    largest = np.int32(0)
    scratch, limit = np.empty(BLOCK, np.float32), np.empty(1, np.float32)
    for start in range(0, grad.size, BLOCK):
        stop = min(start + BLOCK, grad.size)
        if residual.size:
            owed = residual[start:stop]
            blocks.take(grad[start:stop], owed)
        else:
            owed = scratch[: stop - start]
            blocks.copy(grad[start:stop], owed)
        limit.view(np.int32)[0] = blocks.max_bits(owed)
        largest = max(largest, limit.view(np.int32)[0])
        is_sent = limit[0] >= SCALE_MIN
        scale = limit[0] / levels if is_sent else zero
        scales[start // BLOCK] = scale
        inverse = levels / limit[0] if is_sent else zero
        _round(owed, inverse, scale, np.int32(levels), start, low, high, out[start:stop])
    return largest < INF_BITS


@kernel
def _round(
    owed: FloatArray,
    inverse: np.float32,
    scale: np.float32,
    levels: np.int32,
    start: int,
    low: np.uint32,
    high: np.uint32,
    out: np.ndarray,
) -> None:
    for i in range(owed.size):
        u = owed[i]
        x = abs(u) * inverse
        floor = int32(x)
        goes_up = draw.unit(uint32(uint32(start) + uint32(i)), low, high) < x - np.float32(floor)
        level = int32(floor + int32(1)) if goes_up else floor
        level = levels if level > levels else level
        level = int32(-level) if u < np.float32(0.0) else level
        out[i] = np.int8(level)
        owed[i] = u - np.float32(level) * scale
