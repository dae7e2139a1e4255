"""Random numbers that are a function of (seed, index): the same on any processor, in any order.

Paceline's own: Chris Wellons' integer hash `lowbias32` (2018, public domain) on a counter, with the
halves of the seed mixed in before each of its two multiplications.

    x = index * 0x9e3779b1 ^ low(seed);  x ^= x >> 16;  x *= 0x7feb352d;  x += high(seed)
    x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16                           (all modulo 2^32)

Random rounding draws 16 bits for each element, two elements from one hash: the noise of
element i is the lower half of `bits_32(i / 2)` for an even i, the upper half for an odd one. So a
probability is a multiple of 2^-16, which is finer than float32's rounding of a block's sum, and
half as many hashes are made: they, and not memory, are what an encoder waits for.

Numba widens an integer operation to 64 bits; each cast back lets the compiler fill a SIMD register
with twice as many.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32

from pscore.memory.kernels import kernel


@kernel
def bits_32(index: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """Returns 32 random bits for an element."""
    x = uint32(uint32(index * uint32(0x9E3779B1)) ^ low)
    x = uint32(x ^ uint32(x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x + high)
    x = uint32(x ^ uint32(x >> uint32(15)))
    x = uint32(x * uint32(0x846CA68B))
    return uint32(x ^ uint32(x >> uint32(16)))


@kernel
def fill(start: int, low: np.uint32, high: np.uint32, words: np.ndarray) -> None:
    """Draws for elements `start`, an even number, to `start + 2 * words.size`.

    Args:
        start: Number of the first element.
        low: Lower half of the seed.
        high: Upper half of the seed.
        words: `(count,) uint32`; as `uint16` it is the noise of each element.
    """
    first = uint32(start // 2)
    for j in range(words.size):
        words[j] = bits_32(uint32(first + uint32(j)), low, high)


def halves(seed: int) -> tuple[np.uint32, np.uint32]:
    """Returns the low and the high 32 bits of a seed."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
