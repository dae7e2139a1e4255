"""Local updates on a GPU: one kernel for each segment that has a gradient, one pass over memory.

The formulas, and the rounding of their factors to float32, are those of `pscore/local` and
`pscore/optimizers/sgd.py`, so that a worker on a GPU computes the same bits as one on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pscore.cuda.encoders import EACH, THREADS, Launch
from pscore.cuda.runtime import launcher
from pscore.optimizers.base import DeviceStep
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable

MAX_BLOCKS = 1 << 16


def kernels_for(weights: Any) -> DeviceKernels | None:
    """Returns the kernels for a tensor's device; None if torch has to do their work."""
    launch = launcher(weights.device)
    return None if launch is None else DeviceKernels(launch)


class DeviceKernels:
    """The kernels of one device, as `pscore.local.base.LocalKernels`."""

    def __init__(self, launch: Launch) -> None:
        """Starts kernels by `launch`."""
        self._launch = launch

    def sgd(
        self,
        part: Any,
        grad: Any,
        lr_scale: float,
        decay_column: int,
        sign_column: int,
    ) -> None:
        """Makes the plain local step of `pscore/local/sgd.py`."""
        for start, n, row in _active(part.segments, part.active, part.hyper):
            sign, decay = _sign(row, sign_column), _decay(row, decay_column)
            lr = np.float32(lr_scale * row[0])
            self._start(
                "local_sgd", n, _at(part.weights, start), _at(grad, start), n, sign, decay, lr
            )

    def glu(
        self,
        part: Any,
        grad: Any,
        before: Any,
        factors: tuple[float, float, float],
        inverse: FloatArray,
        columns: tuple[int, int],
    ) -> None:
        """Makes the local step of `pscore/local/glu.py`.

        Args:
            part: The slice.
            grad: `(numel,) float32`.
            before: The weights before the last local step.
            factors: alpha, beta and lr_scale.
            inverse: `(num_groups,)`, 1 / D.
            columns: Columns of weight decay and of maximize; -1 for none.
        """
        alpha, beta, lr_scale = factors
        for index, (start, n, row) in _numbered(part.segments, part.active, part.hyper):
            own, decay = np.float32(alpha) * _sign(row, columns[1]), _decay(row, columns[0])
            lr = np.float32(lr_scale * row[0])
            shrink = np.float32(1.0) - lr * decay
            where = (_at(part.weights, start), _at(grad, start), _at(before, start), n)
            tail = (decay, lr, shrink, inverse[part.segments.groups[index]])
            self._start("local_glu", n, *where, own, np.float32(beta), *tail)

    def secant(
        self,
        part: Any,
        grad: Any,
        sync: Any,
        factors: tuple[float, float, float],
        columns: tuple[int, int],
    ) -> None:
        """Makes the local step of `pscore/local/secant.py`; factors: alpha, beta and lr_scale."""
        alpha, beta, lr_scale = factors
        for start, n, row in _active(part.segments, part.active, part.hyper):
            own = np.float32(alpha) * _sign(row, columns[1])
            where = (_at(part.weights, start), _at(grad, start), _at(sync, start), n)
            decay, lr = _decay(row, columns[0]), np.float32(lr_scale * row[0])
            self._start("local_secant", n, *where, own, np.float32(beta), decay, lr)

    def secant_rebase(
        self,
        part: Any,
        pulled: Any,
        old: Any,
        sync: Any,
        shrinks: FloatArray,
        rates: FloatArray,
    ) -> None:
        """Computes the global update from two pulls, as `pscore/local/secant.py` does."""
        every = np.ones(len(part.segments), dtype=np.int64)
        for index, (start, n, _) in _numbered(part.segments, every, part.hyper):
            group = part.segments.groups[index]
            tensors = (part.weights, pulled, old, sync)
            where = tuple(_at(tensor, start) for tensor in tensors)
            self._start("secant_rebase", n, *where, n, shrinks[group], rates[group])

    def dc(
        self,
        part: Any,
        grad: Any,
        arrays: tuple[Any, Any],
        factors: tuple[float, float, float],
        columns: tuple[int, int],
        *,
        is_adaptive: bool,
    ) -> None:
        """Makes the local step of `pscore/local/dc.py`.

        Args:
            part: The slice.
            grad: `(numel,) float32`.
            arrays: `w_old` and the mean square.
            factors: Control, decay of the mean square, and lr_scale.
            columns: Columns of weight decay and of maximize; -1 for none.
            is_adaptive: The form.
        """
        old, square = arrays
        control, keep, lr_scale = factors
        for (start, stop), active in zip(part.segments.bounds.tolist(), part.active, strict=True):
            if not active:
                old[start:stop].copy_(part.weights[start:stop])
        for start, n, row in _active(part.segments, part.active, part.hyper):
            tail = (_sign(row, columns[1]), _decay(row, columns[0]), np.float32(lr_scale * row[0]))
            where = (_at(part.weights, start), _at(grad, start), _at(old, start))
            if is_adaptive:
                mean = (np.float32(control), np.float32(keep), np.float32(1.0 - keep))
                self._start("local_dc_adaptive", n, *where, _at(square, start), n, *mean, *tail)
            else:
                self._start("local_dc", n, *where, n, np.float32(control), *tail)

    def sgd_step(self, step: DeviceStep) -> None:
        """Makes the shard's SGD step in place, as `pscore/optimizers/sgd.py` does."""
        for index, row, part, grad, (buffer,) in step.parts():
            lr, momentum, dampening, decay, nesterov, maximize = row
            n, factor = np.int32(part.numel()), np.float32(-1.0 if maximize else 1.0)
            tail = (np.float32(decay), np.float32(lr))
            where = (_at(part, 0), _at(grad, 0))
            if momentum == 0.0:
                self._start("local_sgd", n, *where, n, factor, *tail)
            else:
                first = step.counts[index] == 0
                keep = np.float32(0.0 if first else momentum)
                take = np.float32(1.0 if first else 1.0 - dampening)
                ahead, along = (1.0, momentum) if nesterov else (0.0, 1.0)
                mix = (keep, take, np.float32(ahead), np.float32(along))
                self._start("sgd_momentum", n, *where, _at(buffer, 0), n, factor, *tail, *mix)
            step.counts[index] += 1

    def _start(self, kernel: str, n: np.int32, *arguments: Any) -> None:
        self._launch(kernel, min(MAX_BLOCKS, -(-int(n) // (THREADS * EACH))), arguments)


def _active(
    segments: SegmentTable, active: IntArray, hyper: HyperArray
) -> Iterator[tuple[int, np.int32, list[float]]]:
    """Yields start, length and hyper-parameters of each segment that is active."""
    for _, segment in _numbered(segments, active, hyper):
        yield segment


def _numbered(
    segments: SegmentTable, active: IntArray, hyper: HyperArray
) -> Iterator[tuple[int, tuple[int, np.int32, list[float]]]]:
    """Yields the same with each segment's number."""
    for index in np.flatnonzero(active).tolist():
        start, stop = segments.bounds[index].tolist()
        yield index, (start, np.int32(stop - start), hyper[segments.groups[index]].tolist())


def _at(tensor: Any, start: int) -> np.uint64:
    return np.uint64(tensor.data_ptr() + 4 * start)


def _sign(row: list[float], column: int) -> np.float32:
    return np.float32(-1.0 if column >= 0 and row[column] != 0.0 else 1.0)


def _decay(row: list[float], column: int) -> np.float32:
    return np.float32(row[column] if column >= 0 else 0.0)
