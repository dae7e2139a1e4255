"""The pass of an optimizer over a slice, written once: idle parameters, blocks, state arrays.

An optimizer gives two kernels: one computes the factors of a parameter in this step, the other one
changes a block in place. Its own file calls the pass from a kernel of its own, so that Numba keeps
the compiled code beside that file, and compiles again when the formula there has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from pscore.memory.kernels import floats_at, inlined, kernel, move, move_idle, sum_block
from pscore.types import FloatArray, HyperArray, IntArray

# Elements that a kernel copies to its output and then changes there: small enough to stay in the
# first-level cache, so that memory is passed over once although the loops work in place.
BLOCK = 1024

Arrays = tuple[FloatArray, ...]
Factors = tuple[Any, ...]  # Mostly float32, as the loops need them.


class KernelStep(NamedTuple):
    """A `SliceStep` as kernels take it, as `SliceStep.for_kernel` returns it."""

    weights: FloatArray
    out: FloatArray
    grad: FloatArray  # The first gradient; the step is made with the sum of all.
    scale: float
    state: Arrays
    state_out: Arrays
    bounds: IntArray
    groups: IntArray
    counts: IntArray
    active: IntArray
    hyper: HyperArray
    others: IntArray  # `(n,) int64`, addresses of the other ones.
    shares: FloatArray  # `(1 + n,) float32`, the factor of each gradient in the sum.
    # Whether weight decay shrinks the weights, in optimizers for which the hyper-parameters do not
    # say it.
    decoupled: bool


@inlined
def change_blocks(
    step: KernelStep, compute_factors: Callable[..., Factors], change: Callable[..., None]
) -> None:
    """Makes a step of every active segment block by block, and copies all else.

    Several gradients are added block by block too: each is read once, and their sum is nowhere.

    Args:
        step: One to three state arrays.
        compute_factors: A kernel that gets `step` and the index of a segment, before its step is
            counted, and returns the arguments of `change` that are the same in all its blocks.
        change: A kernel that gets the weights of a block, its gradient, its state arrays as a tuple
            and those factors, and changes weights and state in place.
    """
    move_idle(step.weights, step.out, step.bounds, step.active)
    for k in range(len(step.state)):
        move_idle(step.state[k], step.state_out[k], step.bounds, step.active)
    weights, out, grad = step.weights, step.out, step.grad
    is_sum = is_summed(step.shares)
    total = np.empty(BLOCK if is_sum else 0, np.float32)
    before, after = step.state, step.state_out
    for index in range(step.groups.size):
        if step.active[index] == 0:
            continue
        factors = compute_factors(step, index)
        step.counts[index] += 1
        start, stop = step.bounds[index, 0], step.bounds[index, 1]
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            w, state, g = _cut(out, low, high), cut_each(after, low, high), _cut(grad, low, high)
            if is_sum:
                g = _cut(total, 0, high - low)
                sum_block(grad, step.others, step.shares, low, g)
            move(_cut(weights, low, high), w)
            _move_each(cut_each(before, low, high), state)
            change(w, g, state, factors)


@kernel
def is_summed(shares: FloatArray) -> bool:
    """Returns whether a step's gradient differs from the first one; for other kernels."""
    return shares.size > 1 or shares[0] != np.float32(1.0)


@kernel
def _cut(array: FloatArray, low: int, high: int) -> FloatArray:
    """Returns a block. Unlike a slice it does not count as a reference: that would cost time."""
    return carray(floats_at(array.ctypes.data + 4 * low), high - low)


@kernel
def cut_each(arrays: Arrays, low: int, high: int) -> Arrays:
    """Returns a block of each of one to three arrays; for other kernels."""
    if len(arrays) == 1:
        return (_cut(arrays[0], low, high),)
    if len(arrays) == 2:  # noqa: PLR2004
        return _cut(arrays[0], low, high), _cut(arrays[1], low, high)
    return _cut(arrays[0], low, high), _cut(arrays[1], low, high), _cut(arrays[2], low, high)


@kernel
def _move_each(sources: Arrays, targets: Arrays) -> None:
    move(sources[0], targets[0])
    if len(sources) >= 2:  # noqa: PLR2004
        move(sources[1], targets[1])
    if len(sources) >= 3:  # noqa: PLR2004
        move(sources[2], targets[2])
