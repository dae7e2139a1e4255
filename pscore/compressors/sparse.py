"""The largest elements of a slice by index and value: shared by `topk` and `dgc`. Paceline's own.

Payload, little-endian: count k, uint32; k indices, uint32, strictly increasing and below the number
of elements; k values, float32, finite. Its length is exactly 4 + 8 * k, and k is at most the
compressor's limit for that number of elements.

Magnitudes are compared as their bits, which order like the numbers. `exact` sends the k largest, of
equals those with the lowest indices. `sampled` takes the threshold from every s-th element (Lin et
al., arXiv:1712.01887), s such that about 1 % or at least 4096 are looked at, and sends what reaches
it: at most 2 k elements, else `exact`'s k.

`exact` too takes a bound from the sample first, on the CPU: a little below what it wants, so that
few more than k elements reach it. Only among these the k-th largest is found, by three histograms
over 11, 11 and 9 bits; if fewer than k reach it, among all.
"""

from __future__ import annotations

import math

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import aligned
from pscore.compressors.blocks import ABS_BITS, BLOCK
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel
from pscore.types import ByteArray, FloatArray

SELECTS = ("exact", "sampled")
SAMPLE_MIN = 4096
SAMPLE_SHARE = 100  # One in so many is looked at.
HEAD_NBYTES = 4
PAIR_NBYTES = 8
SAMPLE_SLACK = 4.0  # Standard deviations of a rank in the sample.
WORD = 8  # Flags that are looked at together: most hold nothing to send.


def num_sent(ratio: float, numel: int) -> int:
    """Returns k: `ratio` of the elements, rounded up, at least one."""
    return min(numel, max(1, int(np.ceil(ratio * numel))))


def limit(ratio: float, numel: int, select: str) -> int:
    """Returns how many elements a payload holds at most."""
    return min(numel, num_sent(ratio, numel) * (1 if select == "exact" else 2))


def stride(numel: int) -> int:
    """Returns which elements are looked at by `sampled`: every so many, from the first."""
    return max(1, min(SAMPLE_SHARE, numel // SAMPLE_MIN))


def sample_rank(k: int, numel: int) -> int:
    """Returns the rank in a sample that corresponds to the k-th largest of all; 0 of none."""
    num_samples = -(-numel // stride(numel))
    return min(num_samples, -(-k * num_samples // max(1, numel)))


def payload_nbytes(count: int) -> int:
    """Returns the length of a payload of `count` elements."""
    return HEAD_NBYTES + PAIR_NBYTES * count


def count_in(payload: ByteArray) -> int:
    """Returns how many elements a payload declares."""
    return int(payload[:HEAD_NBYTES].view("<u4")[0])


def check(name: str, payload: ByteArray, numel: int, count_max: int) -> None:
    """Refuses a payload that is not exactly what it declares.

    Raises:
        DecodeError: Its length, its count, an index or a value is wrong.
    """
    if payload.nbytes < HEAD_NBYTES:
        raise DecodeError(f"{name} payload of {payload.nbytes} bytes has no count")
    count = count_in(payload)
    if count > count_max:
        raise DecodeError(f"{name} payload declares {count} elements, at most {count_max}")
    blocks.check_nbytes(name, payload, payload_nbytes(count), numel)
    indices, values = parts(payload)
    if count and not (indices[1:] > indices[:-1]).all():
        raise DecodeError(f"{name} indices are not strictly increasing")
    if count and indices[-1] >= numel:
        raise DecodeError(f"{name} index {int(indices[-1])} of {numel} elements")
    if not np.isfinite(values).all():
        raise DecodeError(f"{name} payload holds a value that is NaN or Inf")


def parts(payload: ByteArray) -> tuple[np.ndarray, FloatArray]:
    """Returns indices and values of a payload whose length was checked."""
    middle = HEAD_NBYTES + (payload.nbytes - HEAD_NBYTES) // 2
    return aligned(payload[HEAD_NBYTES:middle], "<u4"), aligned(payload[middle:], "<f4")


def encode(residual: FloatArray, k: int, select: str, out: ByteArray) -> tuple[int, np.ndarray]:
    """Moves the largest elements from `residual` to a payload, leaving zeros.

    Args:
        residual: `(numel,) float32`, finite.
        select: `exact` or `sampled`.

    Returns:
        Its length in bytes, and the indices as a view on it.
    """
    bits, rank, found = residual.view(np.int32), sample_rank(k, len(residual)), None
    sample = bits[:: stride(len(residual))] & ABS_BITS
    if select == "sampled":
        threshold, _ = select_kth(sample, rank)
        found = reaching(bits, max(2, threshold), 2 * k)
    if found is None:
        found = _largest(bits, sample, rank, k)
    count = len(found)
    out[:HEAD_NBYTES].view("<u4")[0] = count
    room = out[HEAD_NBYTES : payload_nbytes(count)].view("<u4")
    _move(residual, found, room[:count], room[count:].view("<f4"))
    return payload_nbytes(count), room[:count]


def _largest(bits: np.ndarray, sample: np.ndarray, rank: int, k: int) -> np.ndarray:
    """Returns the indices of the k largest magnitudes that are not zero, in order."""
    lower = rank + int(SAMPLE_SLACK * math.sqrt(rank)) + 1
    bound = max(1, select_kth(sample, lower)[0]) if lower <= len(sample) else 1
    found = reaching(bits, bound, len(bits))
    assert found is not None
    if len(found) < k and bound > 1:
        found = reaching(bits, 1, len(bits))
        assert found is not None
    if len(found) <= k:
        return found
    magnitudes = bits[found]
    threshold, ties = select_kth(magnitudes, k)
    chosen: np.ndarray = found[_chosen(magnitudes, threshold, ties, k)]
    return chosen


def reaching(bits: np.ndarray, bound: int, count_max: int) -> np.ndarray | None:
    """Returns the indices of magnitudes of `bound` or more, `(count,) uint32`, in order.

    Args:
        bits: `(numel,) int32`.
        bound: At least 1.
        count_max: How many may be found; None is returned if there are more.
    """
    # A block is looked at as a whole; pages of memory that nothing is written to cost nothing.
    found = np.empty(count_max + BLOCK + 1, dtype=np.uint32)
    count = _reaching(bits, bound, count_max, found)
    return None if count > count_max else found[:count]


def decode_add(payload: ByteArray, out: FloatArray, scale: float, *, assign: bool) -> None:
    """Adds `scale` times the values at their indices, or assigns and clears the rest."""
    if assign:
        blocks.clear(out)
    scatter_add(*parts(payload), out, np.float32(scale))


@kernel
def scatter_add(
    indices: np.ndarray, values: FloatArray, out: FloatArray, scale: np.float32
) -> None:
    """Sets `out[indices] += values * scale`; the indices were checked."""
    for j in range(indices.size):
        out[np.int64(indices[j])] += values[j] * scale


@kernel
def select_kth(bits: np.ndarray, k: int) -> tuple[int, int]:
    """Returns the k-th largest magnitude as bits, and how many of the k are equal to it."""
    prefix, left = 0, k
    for shift, width in ((20, 11), (9, 11), (0, 9)):
        counts = np.zeros(1 << width, np.int64)
        mask = (1 << width) - 1
        above = shift + width
        for i in range(bits.size):
            magnitude = np.int64(bits[i] & ABS_BITS)
            if magnitude >> above == prefix:
                counts[magnitude >> shift & mask] += 1
        digit = mask
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = prefix << width | digit
    return prefix, left


@kernel
def _reaching(bits: np.ndarray, bound: int, count_max: int, found: np.ndarray) -> int:
    """Flags a block's elements in SIMD, then finds the flags; no branch for each element."""
    flags, least, count = np.zeros(BLOCK, np.uint8), np.int32(bound), 0
    words = flags.view(np.uint64)
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        blocks.clear_tail(flags, part.size)
        for i in range(part.size):
            flags[i] = (part[i] & ABS_BITS) >= least
        for word in range(words.size):
            if words[word]:
                for i in range(word * WORD, (word + 1) * WORD):
                    found[count] = start + i  # Overwritten by the next, unless it is flagged.
                    count += flags[i]
        if count > count_max:
            break
    return count


@kernel
def _chosen(bits: np.ndarray, threshold: int, ties: int, k: int) -> np.ndarray:
    """Returns which of the candidates are above the threshold, or the first `ties` at it."""
    chosen, count = np.empty(k + 1, np.int64), 0
    for j in range(bits.size):
        magnitude = bits[j] & ABS_BITS
        is_tie = magnitude == threshold and ties > 0
        ties -= is_tie
        chosen[count] = j
        count += is_tie or magnitude > threshold
    return chosen[:count]


@kernel
def _move(residual: FloatArray, found: np.ndarray, indices: np.ndarray, values: FloatArray) -> None:
    for j in range(found.size):
        position = np.int64(found[j])
        indices[j] = found[j]
        values[j] = residual[position]
        residual[position] = np.float32(0.0)
