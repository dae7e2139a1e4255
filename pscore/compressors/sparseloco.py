r"""SparseLoCo: the largest elements of each chunk in 2 bits, and error feedback that decays.

Amir Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706, for
the moves of rounds (digest: chunk, k, 2 bits and decay are those that are reported of it).

    u = g + b * r;  S = the k largest |u| of each chunk;  send (i, Q(u[i])) for i in S
    r = u, and u[i] - Q(u[i]) in S

Q has four values for each chunk: -high, -low, low, high. m is the mean of the |u[i]| in S; low is
the mean of those below m and high that of the others, so that Q keeps the sum of the magnitudes.
With b = 1 the sum of everything sent and r is the sum of all g; with b < 1 each push keeps b of r.

A chunk has 4096 elements, the last one of a slice the rest; it sends c = min(k, its elements), of
equals those with the lowest indices. Payload of n elements, E of which are sent, little-endian:

    8 * ceil(n / 4096) bytes    low and high of each chunk, float32, 0 <= low <= high
    ceil(E / 4) bytes           codes, the first in the highest two bits: 00 low, 01 high, 10 -low,
                                11 -high
    3 * ceil(E / 2) bytes       indices within the chunk, 12 bits each, the first in the highest
                                bits; strictly increasing within a chunk

Bits behind the last code and index are 0. Magnitudes are added as float64, in halves: element t to
t + P / 2, then to P / 4 and so on, P the power of two from k on. A level below 2^-100 is sent as 0.

Differs from the paper: Q, of which the digest has only the number of bits. For pulls b must be 1:
the residual is then the difference of the weights to the estimate (pscore/estimate.py). An answer
is as small as a push; the paper's peers each receive the payloads of all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pscore.compressors import blocks, sparse
from pscore.compressors.base import RESIDUAL, Compressor, State, aligned, note_largest
from pscore.compressors.blocks import ABS_BITS, SCALE_MIN
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_range
from pscore.types import ByteArray, FloatArray

CHUNK = 4096
INDEX_BITS = 12
LEVELS = 2  # Magnitudes of a chunk.
HEAD_NBYTES = 4 * LEVELS  # Bytes of a chunk.


def num_chunks(numel: int) -> int:
    """Returns the chunks of a slice."""
    return -(-numel // CHUNK)


def power_of_two(k: int) -> int:
    """Returns P, the smallest power of two that is k or more."""
    return 1 << (k - 1).bit_length()


@dataclass(frozen=True)
class SparseLoCo(Compressor):
    """The largest elements of each chunk, in 2 bits.

    Attributes:
        k: Elements of a chunk of 4096 that are sent, 1 to 4096.
        decay: b, factor on the residual at each push, 0 to 1; 1 forgets nothing.
    """

    name = "sparseloco"
    source = "Sarfi et al., arXiv:2508.15706"
    examples = ("(k=5)", "(decay=1.0)")

    k: int = 64
    decay: float = 0.95

    def __post_init__(self) -> None:
        require_range("sparseloco.k", self.k, 1, CHUNK)
        require_range("sparseloco.decay", self.decay, 0.0, 1.0)

    @property
    def bounds_residual(self) -> bool:
        """A residual that decays is no difference of weights: pulls would lose a part of it."""
        return self.decay == 1.0

    def num_sent(self, numel: int) -> int:
        """Returns E, the elements of a slice that are sent."""
        return numel // CHUNK * self.k + min(self.k, numel % CHUNK)

    def payload_nbytes_max(self, numel: int) -> int:
        """Fourteen bits an element that is sent, and eight bytes a chunk."""
        head, codes = self._parts(numel)
        return head + codes + 3 * -(-self.num_sent(numel) // 2)

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, levels that are numbers in order, indices in range and increasing."""
        blocks.check_nbytes(self.name, payload, self.payload_nbytes_max(numel), numel)
        scales, codes, indices = self._split(payload, numel)
        low, high = scales[::LEVELS], scales[1::LEVELS]
        blocks.check_scales(self.name, low)
        blocks.check_scales(self.name, high)
        if (low > high).any():
            raise DecodeError(f"{self.name} levels of a chunk are not in order")
        fault = _fault(codes, indices, numel, self.k)
        if fault:
            raise DecodeError(f"{self.name} {FAULTS[fault]}")

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Selects and rounds chunk by chunk."""
        self.require_room(grad, state)
        numel = len(grad)
        nbytes, (head, _) = self.payload_nbytes_max(numel), self._parts(numel)
        out[head:nbytes] = 0
        parts = self._split(out[:nbytes], numel, writable=True)
        sums = np.empty(power_of_two(self.k))
        decay = np.float32(self.decay)
        largest = _encode(read_only(grad), state[RESIDUAL], decay, self.k, sums, *parts)
        note_largest(state, largest, self.name)
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Scatters."""
        if assign:
            blocks.clear(out)
        _decode_add(*self._split(payload, len(out)), out, np.float32(scale), self.k)

    def _parts(self, numel: int) -> tuple[int, int]:
        """Returns the bytes of the levels and of the codes."""
        return HEAD_NBYTES * num_chunks(numel), -(-self.num_sent(numel) // 4)

    def _split(
        self, payload: ByteArray, numel: int, *, writable: bool = False
    ) -> tuple[FloatArray, ByteArray, ByteArray]:
        """Returns levels, codes and indices as views on a payload."""
        head, codes = self._parts(numel)
        if writable:
            return payload[:head].view("<f4"), payload[head : head + codes], payload[head + codes :]
        return (
            aligned(payload[:head], "<f4"),
            aligned(payload[head : head + codes], "<u1"),
            aligned(payload[head + codes :], "<u1"),
        )


FAULTS = {
    1: "index beyond its chunk",
    2: "indices of a chunk are not strictly increasing",
    3: "payload has bits behind its last element",
}


@kernel
def _code_at(codes: ByteArray, place: int) -> Any:
    return np.int64(codes[place >> 2] >> (6 - 2 * (place & 3))) & 3


@kernel
def _index_at(indices: ByteArray, place: int) -> Any:
    at = place // 2 * 3
    if place & 1:
        return (np.int64(indices[at + 1] & 15) << 8) | np.int64(indices[at + 2])
    return (np.int64(indices[at]) << 4) | np.int64(indices[at + 1] >> 4)


@kernel
def _put(codes: ByteArray, indices: ByteArray, place: int, code: int, index: int) -> None:
    """Writes a code and an index into zeros."""
    codes[place >> 2] |= np.uint8(code << (6 - 2 * (place & 3)))
    at = place // 2 * 3
    if place & 1:
        indices[at + 1] |= np.uint8(index >> 8)
        indices[at + 2] = np.uint8(index & 255)
    else:
        indices[at] = np.uint8(index >> 4)
        indices[at + 1] = np.uint8((index & 15) << 4)


@kernel
def _take(grad: FloatArray, residual: FloatArray, decay: np.float32) -> np.int32:
    """Sets `residual = decay * residual + grad`; returns the largest magnitude's bits."""
    largest = np.int32(0)
    for i in range(grad.size):
        u = decay * residual[i] + grad[i]
        residual[i] = u
        largest = max(largest, np.float32(u).view(np.int32) & ABS_BITS)
    return largest


@kernel
def _select(part: FloatArray, count: int, found: np.ndarray) -> None:
    """Writes the indices of the `count` largest magnitudes, in order."""
    bits = part.view(np.int32)
    threshold, ties = sparse.select_kth(bits, count)
    place = 0
    for i in range(part.size):
        magnitude = bits[i] & ABS_BITS
        is_tie = magnitude == threshold and ties > 0
        ties -= is_tie
        if is_tie or magnitude > threshold:
            found[place] = i
            place += 1


@kernel
def _fold(sums: np.ndarray) -> float:
    half = sums.size // 2
    while half:
        for t in range(half):
            sums[t] += sums[t + half]
        half >>= 1
    return float(sums[0])


@kernel
def _mean(part: FloatArray, found: np.ndarray, least: float, below: float, sums: np.ndarray) -> Any:
    """Returns the mean of the magnitudes from `least` to less than `below`; 0 of none."""
    sums[:] = 0.0
    count = 0
    for j in range(found.size):
        magnitude = np.float64(abs(part[found[j]]))
        if least <= magnitude < below:
            sums[j] = magnitude
            count += 1
    return np.float32(_fold(sums) / count) if count else np.float32(0.0)


@kernel
def _encode(
    grad: FloatArray,
    residual: FloatArray,
    decay: np.float32,
    k: int,
    sums: np.ndarray,
    scales: FloatArray,
    codes: ByteArray,
    indices: ByteArray,
) -> np.int32:
    largest, place = np.int32(0), 0
    room = np.empty(k, np.int64)
    for chunk in range(scales.size // LEVELS):
        start = chunk * CHUNK
        stop = min(start + CHUNK, grad.size)
        part = residual[start:stop]
        largest = max(largest, _take(grad[start:stop], part, decay))
        found = room[: min(k, stop - start)]
        _select(part, found.size, found)
        mean = _mean(part, found, 0.0, np.inf, sums)
        low = _mean(part, found, 0.0, mean, sums)
        high = _mean(part, found, mean, np.inf, sums)
        low = low if low >= SCALE_MIN else np.float32(0.0)
        high = high if high >= SCALE_MIN else np.float32(0.0)
        scales[LEVELS * chunk], scales[LEVELS * chunk + 1] = low, high
        for j in range(found.size):
            u = part[found[j]]
            is_high = abs(u) >= mean
            level = high if is_high else low
            _put(codes, indices, place, 2 * (u < 0.0) + is_high, found[j])
            part[found[j]] = u - (-level if u < 0.0 else level)
            place += 1
    return largest


@kernel
def _decode_add(
    scales: FloatArray,
    codes: ByteArray,
    indices: ByteArray,
    out: FloatArray,
    scale: np.float32,
    k: int,
) -> None:
    place = 0
    for chunk in range(scales.size // LEVELS):
        start = chunk * CHUNK
        for _ in range(min(k, out.size - start)):
            code = _code_at(codes, place)
            level = scales[LEVELS * chunk + (code & 1)] * scale
            out[start + _index_at(indices, place)] += -level if code & 2 else level
            place += 1


@kernel
def _fault(codes: ByteArray, indices: ByteArray, numel: int, k: int) -> int:
    """Returns the first of `FAULTS` that a payload of the right length has; 0: none."""
    place = 0
    for start in range(0, numel, CHUNK):
        size, before = min(CHUNK, numel - start), -1
        for _ in range(min(k, size)):
            index = _index_at(indices, place)
            if index >= size:
                return 1
            if index <= before:
                return 2
            before = index
            place += 1
    for behind in range(place, 4 * codes.size):
        if _code_at(codes, behind):
            return 3
    if place & 1 and _index_at(indices, place):
        return 3
    return 0
