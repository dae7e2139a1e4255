"""Random numbers that are a function of (seed, index): the same on any processor, in any order.

Paceline's own: Chris Wellons' integer hash `lowbias32` (2018, public domain) on a counter, with the
halves of the seed mixed in before each of its two multiplications.

    x = index * 0x9e3779b1 ^ low(seed);  x ^= x >> 16;  x *= 0x7feb352d;  x += high(seed)
    x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16                           (all modulo 2^32)
"""

from __future__ import annotations

import numpy as np

from pscore.kernels import kernel


@kernel
def bits_32(index: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """Returns 32 random bits for an element."""
    x = np.uint32(index * np.uint32(0x9E3779B1)) ^ low
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x + high)
    x ^= x >> np.uint32(15)
    x = np.uint32(x * np.uint32(0x846CA68B))
    return x ^ (x >> np.uint32(16))


@kernel
def unit(index: np.uint32, low: np.uint32, high: np.uint32) -> np.float32:
    """Returns a number in [0, 1), a multiple of 2^-24, for an element."""
    return np.float32(np.int32(bits_32(index, low, high) >> np.uint32(8))) * np.float32(2.0**-24)


def halves(seed: int) -> tuple[np.uint32, np.uint32]:
    """Returns the low and the high 32 bits of a seed."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
