"""Loops over memory that both sides need, in Numba: one pass, without the GIL, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from pscore.types import FloatArray

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compiles a loop at its first call; keeps the machine code on disk; lets the GIL go."""
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


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
def _sum_scaled(first: FloatArray, source: FloatArray, out: FloatArray, scale: np.float32) -> None:
    for i in range(len(source)):
        out[i] = first[i] + source[i] * scale


def read_only(array: FloatArray) -> FloatArray:
    """Returns a view that cannot be written, so that a kernel is compiled for one kind only."""
    view = array.view()
    view.flags.writeable = False
    return view


def copy_checked(source: FloatArray, out: FloatArray) -> bool:
    """Copies `(numel,) float32` and returns whether all of it is finite."""
    return bool(copy_checked_loop(read_only(source), out))


def all_finite(source: FloatArray) -> bool:
    """Returns whether `(numel,) float32` holds neither NaN nor Inf."""
    return bool(all_finite_loop(read_only(source)))


def assign_scaled(source: FloatArray, out: FloatArray, scale: float) -> None:
    """Sets `out = scale * source`; scale 1 is exact."""
    _assign_scaled(read_only(source), out, np.float32(scale))


def add_scaled(source: FloatArray, out: FloatArray, scale: float) -> None:
    """Adds `scale * source` to `out`."""
    _add_scaled(read_only(source), out, np.float32(scale))


def sum_scaled(first: FloatArray, source: FloatArray, out: FloatArray, scale: float) -> None:
    """Sets `out = first + scale * source`, the same bits as `add_scaled` to a copy of `first`."""
    _sum_scaled(read_only(first), read_only(source), out, np.float32(scale))
