"""The largest elements of a slice by index and value: what `topk` and `dgc` share. Paceline's own.

Payload, little-endian: count k, uint32; k indices, uint32, strictly increasing and below the number
of elements; k values, float32, finite. Its length is exactly 4 + 8 * k, and k is at most the
compressor's limit for that number of elements.

Magnitudes are compared as their bits, which order like the numbers. `exact` finds the k-th largest
by three histograms over 11, 11 and 9 bits of it; of equals the lowest indices are sent. `sampled`
takes the threshold from every s-th element (Lin et al., arXiv:1712.01887), s such that about 1 % or
at least 4096 are looked at, and sends what reaches it: at most 2 k elements, else `exact`'s k.
"""

from __future__ import annotations

import numpy as np

from pscore.compressors import blocks
from pscore.compressors.base import aligned
from pscore.compressors.blocks import ABS_BITS
from pscore.errors import DecodeError
from pscore.kernels import kernel
from pscore.types import ByteArray, FloatArray

SELECTS = ("exact", "sampled")
SAMPLE_MIN = 4096
SAMPLE_SHARE = 100  # One in so many is looked at.
HEAD_NBYTES = 4
PAIR_NBYTES = 8
RUN = 64  # Elements whose maximum is looked at first: most runs hold nothing to send.


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
    """Returns which largest of the sample stands for the k-th largest of all."""
    num_samples = -(-numel // stride(numel))
    return min(num_samples, -(-k * num_samples // numel))


def payload_nbytes(count: int) -> int:
    """Returns the length of a payload of `count` elements."""
    return HEAD_NBYTES + PAIR_NBYTES * count


def check(name: str, payload: ByteArray, numel: int, count_max: int) -> None:
    """Refuses a payload that is not exactly what it declares.

    Raises:
        DecodeError: Its length, its count, an index or a value is wrong.
    """
    if payload.nbytes < HEAD_NBYTES:
        raise DecodeError(f"{name} payload of {payload.nbytes} bytes has no count")
    count = int(payload[:HEAD_NBYTES].view("<u4")[0])
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


def encode(owed: FloatArray, k: int, select: str, out: ByteArray) -> tuple[int, np.ndarray]:
    """Moves the largest elements from `owed` to a payload, leaving zeros.

    Args:
        owed: `(numel,) float32`, finite.
        k: How many.
        select: `exact` or `sampled`.
        out: Receives the payload.

    Returns:
        Its length in bytes, and the indices as a view on it.
    """
    bits = owed.view(np.int32)
    count_max = k if select == "exact" else min(len(owed), 2 * k)
    room = out[HEAD_NBYTES : payload_nbytes(count_max)].view("<u4")
    indices, values = room[:count_max], room[count_max:].view("<f4")
    count = -1
    if select == "sampled":
        sample = bits[:: stride(len(owed))] & ABS_BITS
        threshold, _ = select_kth(sample, sample_rank(k, len(owed)))
        count = move(bits, owed, max(1, threshold - 1), 0, indices, values)
    if count < 0:
        threshold, ties = select_kth(bits, k)
        count = move(bits, owed, threshold, ties, indices, values)
    out[:HEAD_NBYTES].view("<u4")[0] = count
    if count < count_max:
        # The values follow the indices without a gap; numpy copies overlapping parts rightly.
        room[count : 2 * count] = values[:count].view("<u4")
    return payload_nbytes(count), room[:count]


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
def move(
    bits: np.ndarray,
    owed: FloatArray,
    threshold: int,
    ties: int,
    indices: np.ndarray,
    values: FloatArray,
) -> int:
    """Moves elements above a threshold, and the first `ties` that equal it, in order.

    Returns:
        How many; -1 if there are more than fit, and then nothing was changed.
    """
    count, equal = 0, 0
    for start in range(0, bits.size, RUN):
        stop = min(start + RUN, bits.size)
        largest = np.int32(0)
        run = bits[start:stop]
        for i in range(run.size):
            largest = max(largest, run[i] & ABS_BITS)
        if largest < threshold or largest == 0:
            continue
        for i in range(run.size):
            magnitude = run[i] & ABS_BITS
            if magnitude == threshold and magnitude > 0 and equal < ties:
                equal += 1
            elif magnitude <= threshold:
                continue
            if count == indices.size:
                return -1
            indices[count] = start + i
            count += 1
    for j in range(count):
        position = np.int64(indices[j])
        values[j] = owed[position]
        owed[position] = np.float32(0.0)
    return count
