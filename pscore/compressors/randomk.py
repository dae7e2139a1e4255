"""Random-k: elements drawn from a seed that travels, so that no index does; the others wait.

Sebastian Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599; the shared
seed as in GRACE (Xu et al., ICDCS 2021).

    u = g + r;  S = k elements drawn from the seed;  send u[i] for i in S;  r = u, and 0 in S

Payload of n elements, little-endian: the seed, uint64, then k float32 values, k being `ratio` of
n, rounded up. Value j is of element b(j) + draw.bits_32(j) mod (b(j + 1) - b(j)), where
b(j) = floor(j n / k): one from each of k equal parts of the slice.

Differs from the papers: one element from each part and not k of all, so that indices are distinct
and in order, and nothing is kept of them; each element's chance is the same. Values are not scaled
by n / k, because the residual brings the others later. The seed is that of the worker, slice and
step, so that workers send different elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pscore.compressors import blocks, draw, sparse
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, note_largest
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_range
from pscore.types import ByteArray, FloatArray

RATIO_MIN = 1e-6
SEED_NBYTES = 8


@dataclass(frozen=True)
class RandomK(Compressor):
    """Elements drawn from a seed.

    Attributes:
        ratio: Share of the elements that are sent.
    """

    name = "randomk"
    source = "Stich et al., arXiv:1809.07599"
    examples = ("(ratio=0.03)",)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        require_range("randomk.ratio", self.ratio, RATIO_MIN, 1.0)

    def payload_nbytes_max(self, numel: int) -> int:
        """Four bytes per element that is sent, and the seed."""
        return SEED_NBYTES + 4 * sparse.num_sent(self.ratio, numel)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, and values that are numbers; any seed leads to indices in range."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        if not np.isfinite(payload[SEED_NBYTES:].view("<f4")).all():
            raise DecodeError(f"{self.name} payload holds a value that is NaN or Inf")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Gathers and clears."""
        residual, nbytes = state[RESIDUAL], self.payload_nbytes_max(len(grad))
        self.require_room(grad, state)
        note_largest(state, blocks.take_max(read_only(grad), residual), self.name)
        out[:SEED_NBYTES].view("<u8")[0] = seed
        _gather(residual, *draw.halves(seed), out[SEED_NBYTES:nbytes].view("<f4"))
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Draws the same elements, and scatters."""
        if assign:
            blocks.clear(out)
        seed = int(payload[:SEED_NBYTES].view("<u8")[0])
        values = aligned(payload[SEED_NBYTES:], "<f4")
        _scatter_add(values, *draw.halves(seed), out, np.float32(scale))


@kernel
def _position(j: int, k: int, numel: int, low: np.uint32, high: np.uint32) -> int:
    first, behind = j * numel // k, (j + 1) * numel // k
    return first + int(draw.bits_32(np.uint32(j), low, high)) % (behind - first)


@kernel
def _gather(residual: FloatArray, low: np.uint32, high: np.uint32, values: FloatArray) -> None:
    for j in range(values.size):
        position = _position(j, values.size, residual.size, low, high)
        values[j] = residual[position]
        residual[position] = np.float32(0.0)


@kernel
def _scatter_add(
    values: FloatArray, low: np.uint32, high: np.uint32, out: FloatArray, scale: np.float32
) -> None:
    for j in range(values.size):
        out[_position(j, values.size, out.size, low, high)] += values[j] * scale
