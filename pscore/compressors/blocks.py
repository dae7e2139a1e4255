"""Blocks of 2048 elements: shared by the compressors with a scale for each block. Paceline's own.

Tim Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, has this
size. A block fits the first-level cache, so that it is read from memory once although statistics,
quantisation and packing are loops of their own, each of which the compiler turns into SIMD code.

Payload of a compressor with scales: `num_blocks` float32 scales, then the codes of all elements,
packed; both little-endian. The last block may be short; unused bits are zero.

Sums over a block have one order, which is part of the contract because CUDA makes the same payload
bit for bit. Magnitudes are added as float32, and where that gives Inf as float64; squares as
float64, or where it says so as float32 if that gives 2^-60 to 2^60; zeros stand behind a short
block:

    lane[t] = ((x[t]        + x[t + 256])  + (x[t + 512]  + x[t + 768]))
            + ((x[t + 1024] + x[t + 1280]) + (x[t + 1536] + x[t + 1792]))       t < 256
    for s in 128, 64 ... 1:  lane[t] += lane[t + s]                             t < s
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import int32

from pscore.compressors.base import INF_BITS as INF_BITS
from pscore.compressors.base import aligned
from pscore.errors import DecodeError
from pscore.memory.kernels import kernel
from pscore.types import ByteArray, FloatArray

BLOCK = 2048
LANES = 256
SCALE_MIN = np.float32(2.0**-100)  # Below it a block is sent as zeros: 127 / scale must be finite.
SQUARES_MIN, SQUARES_MAX = np.float32(2.0**-60), np.float32(2.0**60)
ABS_BITS = np.int32(0x7FFFFFFF)
INFINITE = np.float32(np.inf)
PACK_2 = np.uint32(0x40100401)  # Moves bits 0..1 of bytes 0, 1, 2, 3 to bits 30, 28, 26, 24.
PACK_1 = np.uint64(0x8040201008040201)  # Moves bit 0 of bytes 0..7 to bits 63..56.
SPREAD_1 = np.uint64(0x0101010101010101)
SELECT_1 = np.uint64(0x0102040810204080)  # Byte k of eight keeps bit 7 - k.


def num_blocks(numel: int) -> int:
    """Returns how many blocks hold `numel` elements."""
    return -(-numel // BLOCK)


def split(payload: ByteArray, numel: int) -> tuple[FloatArray, ByteArray]:
    """Returns scales `(num_blocks,) float32` and codes of a payload whose length was checked."""
    nbytes = 4 * num_blocks(numel)
    return aligned(payload[:nbytes], "<f4"), aligned(payload[nbytes:], "<u1")


def check_nbytes(name: str, payload: ByteArray, wanted: int, numel: int) -> None:
    """Raises DecodeError for a payload of another length."""
    if payload.nbytes != wanted:
        raise DecodeError(
            f"{name} payload of {payload.nbytes} bytes, {wanted} wanted for {numel} elements"
        )


def largest_scale(levels: float) -> np.float32:
    """Returns the largest scale whose product with `levels` float32 can hold."""
    most = np.float32(levels)
    scale = np.finfo(np.float32).max / most
    with np.errstate(over="ignore"):
        return scale if np.isfinite(scale * most) else np.nextafter(scale, np.float32(0.0))


def check_scales(name: str, scales: FloatArray, levels: float = 1.0) -> None:
    """Raises DecodeError for a scale that is negative or not finite, also times `levels`."""
    most = largest_scale(levels)
    bad = ~((scales >= 0) & (scales <= most))
    if bad.any():
        block = int(bad.argmax())
        raise DecodeError(
            f"{name} scale of block {block} is {float(scales[block])!r}, must be 0 to {most:g}"
        )


@kernel
def bits_of(x: np.float32) -> np.uint32:
    """Returns a number's bits."""
    return np.float32(x).view(np.uint32)


@kernel
def float_of(bits: np.uint32) -> np.float32:
    """Returns the number that has these bits."""
    return np.uint32(bits).view(np.float32)


# ----- one block


@kernel
def take(grad: FloatArray, residual: FloatArray) -> None:
    """Sets `residual += grad`."""
    for i in range(grad.size):
        residual[i] += grad[i]


@kernel
def take_max(grad: FloatArray, residual: FloatArray) -> np.int32:
    """Sets `residual += grad`, and returns what `max_bits` does, in one pass."""
    largest = np.int32(0)
    for i in range(grad.size):
        u = residual[i] + grad[i]
        residual[i] = u
        largest = max(largest, np.float32(u).view(np.int32) & ABS_BITS)
    return largest


@kernel
def clear(out: FloatArray) -> None:
    """Sets `out = 0`."""
    for i in range(out.size):
        out[i] = np.float32(0.0)


@kernel
def max_bits(residual: FloatArray) -> np.int32:
    """Returns the bits of the largest `abs(residual)`; they order like the numbers, Inf highest."""
    bits = residual.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & ABS_BITS)
    return largest


@kernel
def mean_abs(residual: FloatArray, lanes: FloatArray, wide_lanes: np.ndarray) -> Any:
    """Returns the mean magnitude, added up in the order of the contract.

    Both kinds of lanes are scratch, `(256,)`.
    """
    x = padded(residual)
    for t in range(LANES):
        lanes[t] = ((abs(x[t]) + abs(x[t + 256])) + (abs(x[t + 512]) + abs(x[t + 768]))) + (
            (abs(x[t + 1024]) + abs(x[t + 1280])) + (abs(x[t + 1536]) + abs(x[t + 1792]))
        )
    total = _fold(lanes)
    if total < INFINITE:
        return total / np.float32(residual.size)
    for t in range(LANES):
        wide_lanes[t] = (
            (_wide(x[t]) + _wide(x[t + 256])) + (_wide(x[t + 512]) + _wide(x[t + 768]))
        ) + ((_wide(x[t + 1024]) + _wide(x[t + 1280])) + (_wide(x[t + 1536]) + _wide(x[t + 1792])))
    return np.float32(_fold(wide_lanes) / np.float64(residual.size))


@kernel
def mean_beyond(
    residual: FloatArray,
    threshold: np.float32,
    lanes: FloatArray,
    wide_lanes: np.ndarray,
    count: np.ndarray,
) -> Any:
    """Returns the mean of the sample's magnitudes that are `threshold` or more; NaN without any.

    The sample is elements 0 to 255 and 1024 to 1279. How many of the magnitudes are not zero is put
    into `count`, `(1,) int32`.
    """
    x = padded(residual)
    found = int32(0)
    for t in range(LANES):
        a, b = _if(x[t], threshold), _if(x[t + 1024], threshold)
        lanes[t] = a + b
        found = int32(found + int32(_one(a) + _one(b)))
    count[0] = found
    total = _fold(lanes)
    if total < INFINITE:
        return total / np.float32(found)
    for t in range(LANES):
        wide_lanes[t] = _wide(_if(x[t], threshold)) + _wide(_if(x[t + 1024], threshold))
    return np.float32(_fold(wide_lanes) / np.float64(found))


@kernel
def sample_squares(residual: FloatArray, lanes: FloatArray, wide_lanes: np.ndarray) -> float:
    """Returns the sum of the sample's squares, added as float32 if that holds it."""
    x = padded(residual)
    for t in range(LANES):
        lanes[t] = x[t] * x[t] + x[t + 1024] * x[t + 1024]
    total = _fold(lanes)
    if SQUARES_MIN <= total <= SQUARES_MAX:
        return np.float64(total)
    for t in range(LANES):
        wide_lanes[t] = _square(x[t]) + _square(x[t + 1024])
    return np.float64(_fold(wide_lanes))


@kernel
def num_sampled(numel: int) -> int:
    """Returns how many elements of a block of `numel` are in the sample."""
    return min(numel, LANES) + min(max(numel - 1024, 0), LANES)


@kernel
def _if(x: np.float32, threshold: np.float32) -> np.float32:
    size = abs(x)
    return size if size >= threshold else np.float32(0.0)


@kernel
def _one(size: np.float32) -> np.int32:
    return int32(1) if size > np.float32(0.0) else int32(0)


@kernel
def sum_squares(residual: FloatArray, lanes: np.ndarray) -> Any:
    """Returns the sum of squares in the order of the contract; `lanes` is scratch, `(256,)`."""
    x = padded(residual)
    for t in range(LANES):
        lanes[t] = (
            (_square(x[t]) + _square(x[t + 256])) + (_square(x[t + 512]) + _square(x[t + 768]))
        ) + (
            (_square(x[t + 1024]) + _square(x[t + 1280]))
            + (_square(x[t + 1536]) + _square(x[t + 1792]))
        )
    return _fold(lanes)


@kernel
def squares(residual: FloatArray, lanes: FloatArray, wide_lanes: np.ndarray) -> float:
    """Returns the sum of squares, added as float32 if that holds it."""
    x = padded(residual)
    for t in range(LANES):
        lanes[t] = (
            (x[t] * x[t] + x[t + 256] * x[t + 256])
            + (x[t + 512] * x[t + 512] + x[t + 768] * x[t + 768])
        ) + (
            (x[t + 1024] * x[t + 1024] + x[t + 1280] * x[t + 1280])
            + (x[t + 1536] * x[t + 1536] + x[t + 1792] * x[t + 1792])
        )
    total = _fold(lanes)
    if SQUARES_MIN <= total <= SQUARES_MAX:
        return float(total)
    return float(sum_squares(residual, wide_lanes))


@kernel
def padded(residual: FloatArray) -> FloatArray:
    """Returns a block, or a copy of a short one with zeros behind it."""
    if residual.size == BLOCK:
        return residual
    whole = np.zeros(BLOCK, np.float32)
    whole[: residual.size] = residual
    return whole


@kernel
def _wide(x: np.float32) -> np.float64:
    return np.float64(abs(x))


@kernel
def _square(x: np.float32) -> np.float64:
    return np.float64(x) * np.float64(x)


@kernel
def _fold(lanes: np.ndarray) -> Any:
    half = LANES // 2
    while half:
        for t in range(half):
            lanes[t] += lanes[t + half]
        half >>= 1  # As `// 2`, but the compiler sees that it ends and unrolls all of it.
    return lanes[0]


# ----- codes, one byte each, and bits


@kernel
def clear_tail(codes: ByteArray, numel: int) -> None:
    """Sets the codes behind a short last block to zero."""
    for i in range(numel, codes.size):
        codes[i] = np.uint8(0)


@kernel
def pack_2(codes: ByteArray, out: ByteArray) -> None:
    """Packs 4 codes of 2 bits into each byte of `out`, first code in the highest bits."""
    words = codes.view(np.uint32)
    for i in range(out.size):
        out[i] = np.uint8((words[i] * PACK_2) >> np.uint32(24))


@kernel
def unpack_2(data: ByteArray, codes: ByteArray) -> None:
    """Undoes `pack_2`."""
    words = codes.view(np.uint32)
    for i in range(data.size):
        x = np.uint32(data[i])
        words[i] = (
            x >> np.uint32(6)
            | (x & np.uint32(0x30)) << np.uint32(4)
            | (x & np.uint32(0x0C)) << np.uint32(14)
            | (x & np.uint32(0x03)) << np.uint32(24)
        )


@kernel
def pack_1(codes: ByteArray, out: ByteArray) -> None:
    """Packs 8 codes of 1 bit into each byte of `out`, first code in the highest bit."""
    words = codes.view(np.uint64)
    for i in range(out.size):
        out[i] = np.uint8((words[i] * PACK_1) >> np.uint64(56))


@kernel
def unpack_1(data: ByteArray, codes: ByteArray) -> None:
    """Undoes `pack_1`, but for a code that is not zero where the bit is set."""
    words = codes.view(np.uint64)
    for i in range(data.size):
        words[i] = (np.uint64(data[i]) * SPREAD_1) & SELECT_1


@kernel
def add_ternary(codes: ByteArray, value: np.float32, out: FloatArray) -> None:
    """Adds `value` where the code is 3 and takes it away where it is 2."""
    zero = np.float32(0.0)
    for i in range(out.size):
        code = codes[i]
        out[i] += value if code == np.uint8(3) else (-value if code == np.uint8(2) else zero)


def check_ternary(name: str, data: ByteArray, numel: int) -> None:
    """Raises DecodeError for a 2-bit code that is 01, or is behind the last element and not 00."""
    if _has_unused(data):
        raise DecodeError(f"{name} payload holds the unused code 01")
    used, rest = divmod(numel, 4)
    behind = data[used:].copy()
    if rest:
        behind[0] &= 0xFF >> 2 * rest
    if behind.any():
        raise DecodeError(f"{name} payload holds codes behind its {numel} elements")


@kernel
def _has_unused(data: ByteArray) -> bool:
    found = np.uint8(0)
    for i in range(data.size):
        found |= data[i] & ~(data[i] >> np.uint8(1)) & np.uint8(0x55)
    return bool(found)


@kernel
def decode_ternary(
    scales: FloatArray, data: ByteArray, out: FloatArray, scale: np.float32, assign: bool
) -> None:
    """Adds packed ternary codes times their block's scale; one scale serves all blocks."""
    codes = np.empty(BLOCK, np.uint8)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        unpack_2(data[start // 4 : (stop + 3) // 4], codes)
        part = out[start:stop]
        if assign:
            clear(part)
        value = scales[start // BLOCK] if scales.size > 1 else scales[0]
        add_ternary(codes, value * scale, part)
