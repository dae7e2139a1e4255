"""Numba loops over memory for both sides: one pass each, without the GIL, compiled once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from pscore.memory.compiled import take_compiled
from pscore.types import FloatArray, IntArray

if folder := vars(numba.config).get("CACHE_DIR"):  # The value of NUMBA_CACHE_DIR.
    take_compiled(Path(folder))

log = logging.getLogger("paceline")
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A", bound=npt.NDArray[Any])


def _make_floats_at(typing_context: Any, address: Any) -> Any:
    """Returns an address as a pointer to float32."""

    def generate(context: BaseContext, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.intp), generate


floats_at = cast(Callable[[int], Any], intrinsic(_make_floats_at))


def _make_prefetch(typing_context: Any, address: Any) -> Any:
    """Fetches the cache line at an address, which a loop reads or writes some turns later."""

    def generate(context: BaseContext, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        is_write, nearness, is_data = number(0), number(3), number(1)
        place = builder.inttoptr(args[0], pointer)
        builder.call(function, [place, is_write, nearness, is_data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


prefetch = cast(Callable[[Any], None], intrinsic(_make_prefetch))


def kernel(function: F) -> F:
    """Compiles a loop at its first call and caches the code on disk; it runs without the GIL.

    Where the disk is full or read-only, each process compiles it again.
    """
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        made.enable_caching()
    except RuntimeError:  # Numba finds no folder that it may write to.
        warn_of_compiling()
        return cast(F, made)
    made._cache.save_overload = partial(_save, made._cache.save_overload)
    return cast(F, made)


@cache
def warn_of_compiling() -> None:
    """Logs once that code is not kept."""
    log.warning(
        "no folder for compiled loops can be written to, so each process compiles them again; set "
        "NUMBA_CACHE_DIR to one that this user may write to"
    )


def _save(save: Callable[..., None], *code: Any) -> None:
    with suppress(OSError):
        save(*code)


def inlined(function: F) -> F:
    """Makes a loop a part of each kernel that calls it; other kernels may be its arguments.

    In a call such an argument would be an address in this process, and Numba would then keep no
    code of the caller on disk.
    """
    return cast(F, numba.njit(inline="always")(function))


@kernel
def bf16_of(bits: np.uint32) -> np.uint16:
    """Returns the bits of bfloat16 for those of a float32; for kernels."""
    if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(
            np.uint32(bits >> np.uint32(16)) | np.uint32(0x40)
        )  # Quiet, as processors do it.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@kernel
def copy_checked_loop(source: FloatArray, out: FloatArray) -> bool:
    """Copies, and returns whether all is finite (x - x is 0 for finite x only); for kernels."""
    bad = 0
    for i in range(len(source)):
        value = source[i]
        out[i] = value
        bad |= value - value != np.float32(0.0)
    return bad == 0


@kernel
def all_finite_loop(source: FloatArray) -> bool:
    """Returns whether `(numel,) float32` holds neither NaN nor Inf; for other kernels."""
    bad = 0
    for i in range(len(source)):
        bad |= source[i] - source[i] != np.float32(0.0)
    return bad == 0


@kernel
def _assign_scaled(source: FloatArray, out: FloatArray, scale: np.float32) -> None:
    for i in range(len(source)):
        out[i] = source[i] * scale


@kernel
def _add_scaled(source: FloatArray, out: FloatArray, scale: np.float32) -> None:
    for i in range(len(source)):
        out[i] += source[i] * scale


@kernel
def _assign_two(
    one: FloatArray, other: FloatArray, out: FloatArray, scale: np.float32, weight: np.float32
) -> None:
    for i in range(len(out)):
        out[i] = one[i] * scale + other[i] * weight


@kernel
def _add_two(
    one: FloatArray, other: FloatArray, out: FloatArray, scale: np.float32, weight: np.float32
) -> None:
    for i in range(len(out)):
        out[i] = (out[i] + one[i] * scale) + other[i] * weight


@kernel
def _sum_all(places: IntArray, scales: FloatArray, out: FloatArray) -> None:
    # Two at a time: several streams read side by side get more of the memory bandwidth.
    is_begun = places[0] == out.ctypes.data
    k = 1 if is_begun else 0
    while k < len(places):
        source = carray(floats_at(places[k]), len(out))
        if k + 1 < len(places):
            other = carray(floats_at(places[k + 1]), len(out))
            if is_begun:
                _add_two(source, other, out, scales[k], scales[k + 1])
            else:
                _assign_two(source, other, out, scales[k], scales[k + 1])
        elif is_begun:
            _add_scaled(source, out, scales[k])
        else:
            _assign_scaled(source, out, scales[k])
        is_begun = True
        k += 2


@kernel
def sum_block(
    first: FloatArray, others: IntArray, scales: FloatArray, low: int, out: FloatArray
) -> None:
    """Sets `out` to a part of the sum of `scale * source`, with the bits of `sum_all`.

    For other kernels, which then use it while it is in the cache.

    Args:
        first: The first source, `(numel,) float32`, contiguous.
        others: `(n,) int64`, addresses of the other ones.
        scales: `(1 + n,) float32`, one for each source.
        low: The part's first element.
        out: `(size,) float32`, contiguous; it receives the part.
    """
    source = carray(floats_at(first.ctypes.data + 4 * low), out.size)
    if others.size == 0:
        _assign_scaled(source, out, scales[0])
        return
    other = carray(floats_at(others[0] + 4 * low), out.size)
    _assign_two(source, other, out, scales[0], scales[1])
    k = 1
    while k < others.size:
        source = carray(floats_at(others[k] + 4 * low), out.size)
        if k + 1 < others.size:
            other = carray(floats_at(others[k + 1] + 4 * low), out.size)
            _add_two(source, other, out, scales[k + 1], scales[k + 2])
        else:
            _add_scaled(source, out, scales[k + 1])
        k += 2


@kernel
def _sum_is_finite(one: FloatArray, other: FloatArray) -> bool:
    bad = 0
    for i in range(len(one)):
        total = one[i] + other[i]
        bad |= total - total != np.float32(0.0)
    return bad == 0


@kernel
def move(source: FloatArray, target: FloatArray) -> None:
    """Copies `(numel,) float32`, unless both are the same memory; for other kernels."""
    if source.ctypes.data != target.ctypes.data:
        for i in range(target.size):
            target[i] = source[i]


@kernel
def move_idle(source: FloatArray, target: FloatArray, bounds: IntArray, active: IntArray) -> None:
    """Copies the inactive segments of a slice; for other kernels.

    Args:
        source: `(numel,) float32`.
        target: `(numel,) float32`; nothing is copied if it is the same memory.
        bounds: `(num_segments, 2) int64`, start and stop of each segment, in order.
        active: `(num_segments,) int64`, not 0 where the segment has a gradient.
    """
    written = 0
    for index in range(active.size):
        if active[index] != 0:
            move(source[written : bounds[index, 0]], target[written : bounds[index, 0]])
            written = bounds[index, 1]
    move(source[written:], target[written:])


def read_only(array: A) -> A:
    """Returns a read-only view, so that a kernel is compiled for one kind of array only."""
    view = array.view()
    view.setflags(write=False)
    return view


def copy_checked(source: FloatArray, out: FloatArray) -> bool:
    """Copies `(numel,) float32` and returns whether all of it is finite."""
    return bool(copy_checked_loop(read_only(source), out))


def all_finite(source: FloatArray) -> bool:
    """Returns whether `(numel,) float32` holds neither NaN nor Inf."""
    return bool(all_finite_loop(read_only(source)))


def sum_is_finite(one: FloatArray, other: FloatArray) -> bool:
    """Returns whether float32 holds every sum of two `(numel,) float32`; changes neither."""
    return bool(_sum_is_finite(read_only(one), read_only(other)))


def assign_scaled(source: FloatArray, out: FloatArray, scale: float) -> None:
    """Sets `out = scale * source`; scale 1 is exact."""
    _assign_scaled(read_only(source), out, np.float32(scale))


def add_scaled(source: FloatArray, out: FloatArray, scale: float) -> None:
    """Adds `scale * source` to `out`."""
    _add_scaled(read_only(source), out, np.float32(scale))


def sum_all(sources: Sequence[FloatArray], scales: Sequence[float], out: FloatArray) -> None:
    """Sets `out` to the sum of `scale * source`; the bits are those of adding one by one.

    Args:
        sources: One or more `(numel,) float32`, contiguous; the first may be `out`, at scale 1.
        scales: One for each source.
        out: `(numel,) float32`, contiguous.
    """
    _sum_all(addresses(sources), np.array(scales, np.float32), out)


def addresses(arrays: Sequence[FloatArray]) -> IntArray:
    """Returns where contiguous arrays lie, `(len(arrays),) int64`; they must outlive its use."""
    return np.array([array.ctypes.data for array in arrays], np.int64)
