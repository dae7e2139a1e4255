"""Copies that go past the caches: for much more memory than a cache holds.

An ordinary store first reads the line that it is about to overwrite, and puts out of the cache what
will be read sooner. A non-temporal one does neither: a third less traffic of memory. What is
copied is then not in the cache, which is right for a large model's gradients and weights, and wrong
for a small one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from pscore.memory import kernels
from pscore.memory.kernels import floats_at, kernel, read_only
from pscore.types import FloatArray, IntArray

NBYTES_MIN = 32 << 20  # As a large cache of the third level.
LINE_NBYTES = 64
LANES = LINE_NBYTES // 4  # Elements in one line.


def _make_copy_line(typing_context: Any, source: Any, out: Any) -> Any:
    """Copies 16 floats between two addresses, the second of a line; returns 0 if all are finite."""

    def generate(context: BaseContext, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        values = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=4)
        store = builder.store(
            values, builder.inttoptr(args[1], vector.as_pointer()), align=LINE_NBYTES
        )
        one = ir.Constant(ir.IntType(32), 1)
        store.set_metadata("nontemporal", builder.module.add_metadata([one]))
        difference = builder.fsub(values, values)  # 0, or NaN for NaN and Inf.
        unordered = builder.fcmp_unordered("uno", difference, difference)
        mask = builder.bitcast(unordered, ir.IntType(LANES))
        return builder.zext(mask, ir.IntType(64))

    return types.int64(types.intp, types.intp), generate


def _make_fence(typing_context: Any) -> Any:
    """Makes all that was stored past the caches visible before what is stored next."""

    def generate(context: BaseContext, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_copy_line = cast(Callable[[int, int], int], intrinsic(_make_copy_line))
_fence = cast(Callable[[], None], intrinsic(_make_fence))


@kernel
def _copy_checked(source: FloatArray, out: FloatArray) -> bool:
    begin, end = source.ctypes.data, out.ctypes.data
    head = min(len(source), (-end & (LINE_NBYTES - 1)) // 4)
    num_lines = (len(source) - head) // LANES
    tail = head + LANES * num_lines
    bad = 0
    for i in range(head):
        out[i] = source[i]
        bad |= source[i] - source[i] != np.float32(0.0)
    for line in range(num_lines):
        offset = 4 * head + LINE_NBYTES * line
        bad |= _copy_line(begin + offset, end + offset)
    for i in range(tail, len(source)):
        out[i] = source[i]
        bad |= source[i] - source[i] != np.float32(0.0)
    _fence()
    return bad == 0


@kernel
def _gather(addresses: IntArray, spans: IntArray, flat: FloatArray, streams: bool) -> int:
    home = flat.ctypes.data
    for i in range(len(addresses)):
        start, stop = spans[i, 0], spans[i, 1]
        source = carray(floats_at(addresses[i]), stop - start)
        if addresses[i] == home + 4 * start:
            is_finite = kernels.all_finite_loop(source)
        elif streams:
            is_finite = _copy_checked(source, flat[start:stop])
        else:
            is_finite = kernels.copy_checked_loop(source, flat[start:stop])
        if not is_finite:
            return i
    return -1


def gather(addresses: IntArray, spans: IntArray, flat: FloatArray) -> int:
    """Copies several arrays into one, each that does not lie there already.

    Args:
        addresses: `(num,) int64`, of contiguous float32 that stays where it is meanwhile.
        spans: `(num, 2) int64`, from where to where each of them lies in `flat`.
        flat: `(numel,) float32`, contiguous.

    Returns:
        The first of them in which an element is not finite, else -1. What stands behind it has
        not been copied.
    """
    return int(_gather(addresses, spans, flat, flat.nbytes >= NBYTES_MIN))


def copy_checked(source: FloatArray, out: FloatArray) -> bool:
    """Copies `(numel,) float32`, contiguous, and returns whether all of it is finite."""
    return bool(_copy_checked(read_only(source), out))


def copier(nbytes: int) -> Callable[[FloatArray, FloatArray], bool]:
    """Returns how to copy arrays that are `nbytes` in all, as `copy_checked`."""
    return copy_checked if nbytes >= NBYTES_MIN else kernels.copy_checked
