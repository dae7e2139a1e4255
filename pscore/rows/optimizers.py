"""Optimizers of rows: a step changes the rows that it names, and no others.

Each computes in float32, element by element. t counts the steps in which the table had a gradient,
perhaps one without rows; g is the mean gradient of a row.

    sgd              w -= lr (g + weight_decay w)
    adagrad          s += g^2; w -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
    rowwise_adagrad  s += mean_j g_j^2; w -= lr g / (sqrt(s) + eps), one s for a row (FBGEMM)
    sparse_adam      m += (1 - b1) (g - m); v += (1 - b2) (g^2 - v);
                     w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)
    ftrl             n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr w; w = 0 if |z| <= l1, else
                     -(z - sign(z) l1) / ((beta + sqrt(n')) / lr + l2)  (McMahan and others 2013)

`sgd`, `adagrad` and `sparse_adam` are torch's for sparse gradients, except that duplicates are
summed first. With `maximize` g changes its sign.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pscore.memory.kernels import kernel
from pscore.rows.hashing import IdArray
from pscore.rows.init import Init, fill, project
from pscore.types import FloatArray, HyperArray, IntArray

HEADER_WORDS = 4  # Each of 4 bytes: id, id, version, flags.
ZERO = np.float32(0.0)
VERSION_WORD = 2
FLAGS_WORD = 3
KNOWN, NEW, LOADED = 0, 1, 2
USED, FRESH = np.uint32(1), np.uint32(2)  # Flags of a place: it has a row; the row has no state.


class RowStep(NamedTuple):
    """One step on the rows of one table."""

    floats: FloatArray  # `(rows_max * stride,) float32`, the slab of rows.
    words: npt.NDArray[np.uint32]  # The same memory as uint32.
    stride: int  # Words from one row to the next.
    dim: int  # Elements of a row.
    width: int  # Elements of a row and its state.
    places: IntArray  # `(n,) int64`, the places of the rows.
    # `(n,) uint8`, `KNOWN` for a row with contents, `NEW` for one without, which begins with its
    # first values, `LOADED` for one with weights whose state begins.
    begins: npt.NDArray[np.uint8]
    ids: IdArray  # `(n,) uint64`.
    grads: FloatArray  # `(n * dim,) float32`, sums of gradients.
    scale: np.float32  # Factor on them.
    version: np.uint32
    init: Init
    first_state: np.float32  # First value of each element of the state.


class RowOptimizer(ABC):
    """One kind of step of rows."""

    name: ClassVar[str]  # Its name in `ROW_OPTIMIZERS` and on the wire.
    hyper_names: ClassVar[tuple[str, ...]]  # Columns of the hyper-parameters.
    # Its state, each as long as the row or one number for a row.
    state_names: ClassVar[tuple[str, ...]] = ()
    assigns: ClassVar[bool] = False
    divisors: ClassVar[tuple[str, ...]] = ()  # Hyper-parameters by which a step divides.
    is_rowwise: ClassVar[bool] = False  # Whether the state is one number for a row.

    def state_widths(self, dim: int) -> list[int]:
        """Returns the elements of each state array of a row of `dim`."""
        return [1 if self.is_rowwise else dim for _ in self.state_names]

    def width(self, dim: int) -> int:
        """Returns the elements of a row of `dim` with its state, which follows the weights."""
        return dim + sum(self.state_widths(dim))

    def first_state(self, hyper: HyperArray) -> float:
        """Returns the first value of each element of the state."""
        names = self.hyper_names
        at = "initial_accumulator_value"
        return float(hyper[names.index(at)]) if at in names else 0.0

    def step(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        """Makes a step without holding the GIL.

        Args:
            step: The rows and their gradients.
            t: Steps of the table with this one, from 1.
            hyper: `(len(hyper_names),) float64`.
        """
        _begin(step)
        self._move(step, t, hyper)
        _end(step)

    @abstractmethod
    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        """Changes the rows, all of which have weights and state, by the optimizer's formula."""


# Each pass is a loop of its own, and takes a row as an array of its own: a call with a `RowStep`
# for each row, or a base that may be negative, makes the loop over a row five times as slow.


@kernel
def _begin(step: RowStep) -> None:
    """Gives new rows their first values, and rows without state their first state."""
    for i in range(len(step.places)):
        if step.begins[i] != KNOWN:
            base = step.places[i] * step.stride + HEADER_WORDS
            if step.begins[i] == NEW:
                fill(step.floats, base, step.dim, step.ids[i], step.init)
            for j in range(step.dim, step.width):
                step.floats[base + j] = step.first_state


@kernel
def _end(step: RowStep) -> None:
    """Bounds the norms of the rows, and notes their version."""
    if step.init.max_norm > 0.0:
        for i in range(len(step.places)):
            base = step.places[i] * step.stride + HEADER_WORDS
            project(step.floats, base, step.dim, step.init.max_norm)
    for i in range(len(step.places)):
        base = step.places[i] * step.stride
        step.words[base + VERSION_WORD] = step.version
        step.words[base + FLAGS_WORD] &= ~FRESH


@kernel
def _sgd(step: RowStep, lr: np.float32, weight_decay: np.float32) -> None:
    dim = step.dim
    for i in range(len(step.places)):
        base = step.places[i] * step.stride + HEADER_WORDS
        weights, grads = step.floats[base : base + dim], step.grads[i * dim : (i + 1) * dim]
        for j in range(len(weights)):
            value = weights[j]
            weights[j] = value - lr * (grads[j] * step.scale + weight_decay * value)


@kernel
def _adagrad(step: RowStep, lr: np.float32, eps: np.float32) -> None:
    dim = step.dim
    for i in range(len(step.places)):
        base = step.places[i] * step.stride + HEADER_WORDS
        weights, grads = step.floats[base : base + dim], step.grads[i * dim : (i + 1) * dim]
        sums = step.floats[base + dim : base + 2 * dim]
        for j in range(len(weights)):
            grad = grads[j] * step.scale
            total = sums[j] + grad * grad
            sums[j] = total
            weights[j] -= lr * (grad / (np.sqrt(total) + eps))


@kernel
def _rowwise_adagrad(step: RowStep, lr: np.float32, eps: np.float32) -> None:
    dim = step.dim
    for i in range(len(step.places)):
        base = step.places[i] * step.stride + HEADER_WORDS
        weights, grads = step.floats[base : base + dim], step.grads[i * dim : (i + 1) * dim]
        # Four sums by turns: each addition to a single one would wait for the last.
        squares, second, third, fourth = ZERO, ZERO, ZERO, ZERO
        whole = len(grads) // 4 * 4
        for j in range(0, whole, 4):
            one, two = grads[j] * step.scale, grads[j + 1] * step.scale
            three, four = grads[j + 2] * step.scale, grads[j + 3] * step.scale
            squares += one * one
            second += two * two
            third += three * three
            fourth += four * four
        for j in range(whole, len(grads)):
            grad = grads[j] * step.scale
            squares += grad * grad
        sums = step.floats[base + dim : base + dim + 1]
        total = sums[0] + ((squares + second) + (third + fourth)) / np.float32(dim)
        sums[0] = total
        denominator = np.sqrt(total) + eps
        for j in range(len(weights)):
            weights[j] -= lr * (grads[j] * step.scale / denominator)


@kernel
def _sparse_adam(
    step: RowStep, lr: np.float32, rate1: np.float32, rate2: np.float32, eps: np.float32
) -> None:
    dim = step.dim
    for i in range(len(step.places)):
        base = step.places[i] * step.stride + HEADER_WORDS
        weights, grads = step.floats[base : base + dim], step.grads[i * dim : (i + 1) * dim]
        means = step.floats[base + dim : base + 2 * dim]
        squares = step.floats[base + 2 * dim : base + 3 * dim]
        for j in range(len(weights)):
            grad = grads[j] * step.scale
            mean = means[j] + rate1 * (grad - means[j])
            square = squares[j] + rate2 * (grad * grad - squares[j])
            means[j], squares[j] = mean, square
            weights[j] -= lr * (mean / (np.sqrt(square) + eps))


@kernel
def _ftrl(step: RowStep, lr: np.float32, beta: np.float32, l1: np.float32, l2: np.float32) -> None:
    dim = step.dim
    for i in range(len(step.places)):
        base = step.places[i] * step.stride + HEADER_WORDS
        weights, grads = step.floats[base : base + dim], step.grads[i * dim : (i + 1) * dim]
        sums = step.floats[base + dim : base + 2 * dim]
        squares = step.floats[base + 2 * dim : base + 3 * dim]
        for j in range(len(weights)):
            grad = grads[j] * step.scale
            before = squares[j]
            after = before + grad * grad
            root = np.sqrt(after)
            z = sums[j]
            z += grad - (root - np.sqrt(before)) / lr * weights[j]
            sums[j], squares[j] = z, after
            if abs(z) <= l1:
                weights[j] = np.float32(0.0)
            else:
                rest = z - l1 if z > 0 else z + l1
                weights[j] = -rest / ((beta + root) / lr + l2)


def _signed(step: RowStep, maximize: float) -> RowStep:
    return step._replace(scale=-step.scale) if maximize else step


class RowSGD(RowOptimizer):
    """Stochastic gradient descent; weight decay of the rows of a step only."""

    name = "sgd"
    hyper_names = ("lr", "weight_decay", "maximize")

    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        lr, weight_decay, maximize = hyper.tolist()
        _sgd(_signed(step, maximize), np.float32(lr), np.float32(weight_decay))


class RowAdagrad(RowOptimizer):
    """torch's Adagrad of sparse gradients."""

    name = "adagrad"
    hyper_names = (
        "lr", "lr_decay", "eps", "initial_accumulator_value", "maximize"
    )  # fmt: skip
    state_names = ("sum",)

    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        lr, lr_decay, eps, _, maximize = hyper.tolist()
        rate = np.float32(lr / (1.0 + (t - 1) * lr_decay))
        _adagrad(_signed(step, maximize), rate, np.float32(eps))


class RowAdagradByRow(RowOptimizer):
    """Adagrad with one accumulator for each row."""

    name = "rowwise_adagrad"
    hyper_names = (
        "lr", "eps", "initial_accumulator_value", "maximize"
    )  # fmt: skip
    state_names = ("sum",)
    is_rowwise = True

    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        lr, eps, _, maximize = hyper.tolist()
        _rowwise_adagrad(_signed(step, maximize), np.float32(lr), np.float32(eps))


class RowSparseAdam(RowOptimizer):
    """torch's SparseAdam: its t is the table's, its eps stands outside the bias correction."""

    name = "sparse_adam"
    hyper_names = ("lr", "beta1", "beta2", "eps", "maximize")
    state_names = ("exp_avg", "exp_avg_sq")

    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        lr, beta1, beta2, eps, maximize = hyper.tolist()
        rate = lr * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)
        _sparse_adam(
            _signed(step, maximize),
            np.float32(rate),
            np.float32(1.0 - beta1),
            np.float32(1.0 - beta2),
            np.float32(eps),
        )


class RowFTRL(RowOptimizer):
    """Follow the regularised leader, proximal, with a rate for each coordinate."""

    name = "ftrl"
    hyper_names = ("lr", "beta", "l1", "l2", "maximize")
    state_names = ("z", "n")
    divisors = ("lr",)

    def _move(self, step: RowStep, t: int, hyper: HyperArray) -> None:
        lr, beta, l1, l2, maximize = hyper.tolist()
        _ftrl(
            _signed(step, maximize),
            np.float32(lr),
            np.float32(beta),
            np.float32(l1),
            np.float32(l2),
        )


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    optimizer.name: optimizer
    for optimizer in (RowSGD, RowAdagrad, RowAdagradByRow, RowSparseAdam, RowFTRL)
}
