"""Hashes of ids: bucket, place and first values of a row come from the hash of its id.

The function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from pscore.memory.kernels import kernel

IdArray = npt.NDArray[np.uint64]  # Ids; any 64 bits are one.

FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Odd: 2^64 over the golden ratio.
U27, U30, U31 = np.uint64(27), np.uint64(30), np.uint64(31)


@numba.njit(inline="always", error_model="numpy")
def mix(value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Returns the hash of one uint64; for kernels."""
    value = (value ^ (value >> U30)) * FIRST
    value = (value ^ (value >> U27)) * SECOND
    return value ^ (value >> U31)


@kernel
def _mix_all(values: IdArray, mask: np.uint64, out: IdArray) -> None:
    for i in range(len(values)):
        out[i] = mix(values[i] ^ mask)


def mix64(values: IdArray) -> IdArray:
    """Returns the hash of each value, `(n,) uint64`."""
    values = np.ascontiguousarray(values, np.uint64)
    out = np.empty_like(values)
    _mix_all(values, np.uint64(0), out)
    return out


def mask_of(seed: int) -> np.uint64:
    """Returns the hash of a seed, with which ids are combined before they are hashed."""
    value: np.uint64 = mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))[0]
    return value


def hashes(ids: IdArray, seed: int) -> IdArray:
    """Returns the hashes of ids, `(n,) uint64`, in a table with this seed."""
    ids = np.ascontiguousarray(ids, np.uint64)
    out = np.empty_like(ids)
    _mix_all(ids, mask_of(seed), out)
    return out
