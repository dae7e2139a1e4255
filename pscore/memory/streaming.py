"""Copies that bypass the caches, for much more memory than a cache holds.

An ordinary store first reads the line that it is about to overwrite, and evicts lines that will be
read sooner. A non-temporal store does neither, which saves a third of the memory traffic. The copy
is then not in the cache: right for the gradients and weights of a large model, wrong for a small
one's.
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
from pscore.placement import WORKER
from pscore.types import FloatArray, IntArray

LINE_NBYTES = 64
LANES = LINE_NBYTES // 4  # Elements of a line.


def _make_copy_line(typing_context: Any, source: Any, out: Any) -> Any:
    """Copies 16 floats to the address of a cache line; returns 0 if all of them are finite."""

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
    """Makes all non-temporal stores visible before any later store."""

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
    """Copies several arrays into one; skips those that are views of their place in it.

    Args:
        addresses: `(num,) int64`, of contiguous float32 that stays in place during the call.
        spans: `(num, 2) int64`, start and stop of each array in `flat`, in elements.
        flat: `(numel,) float32`, contiguous.

    Returns:
        The index of the first array with an element that is not finite, else -1. The arrays behind
        it are not copied.
    """
    return int(_gather(addresses, spans, flat, flat.nbytes >= WORKER.streamed_nbytes_min))


def copy_checked(source: FloatArray, out: FloatArray) -> bool:
    """Copies `(numel,) float32`, contiguous, and returns whether all of it is finite."""
    return bool(_copy_checked(read_only(source), out))


def copier(nbytes: int) -> Callable[[FloatArray, FloatArray], bool]:
    """Returns the faster form of `copy_checked` for arrays of `nbytes` together."""
    return copy_checked if nbytes >= WORKER.streamed_nbytes_min else kernels.copy_checked
