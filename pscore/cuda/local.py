"""Local updates on a GPU: one kernel for each slice, one pass over the segments with a gradient.

The formulas, and the rounding of their factors to float32, are those of `pscore/local` and
`pscore/optimizers`, so that a worker on a GPU computes the same bits as one on a CPU. The factors
of all segments travel to the device as one small table, again only when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pscore.cuda.encoders import EACH, THREADS, Launch, pointer
from pscore.cuda.runtime import launcher
from pscore.optimizers.adam import corrections
from pscore.optimizers.base import DeviceStep
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable

MAX_BLOCKS = 1 << 16
ROW = np.dtype([("start", "<i4"), ("numel", "<i4"), ("factors", "<f4", 10)])  # As in local.cu.
NONE = np.uint64(0)  # The address of an array that a kernel does without.


def kernels_for(weights: Any) -> DeviceKernels | None:
    """Returns the kernels for a tensor's device; None if torch has to do their work."""
    launch = launcher(weights.device)
    return None if launch is None else DeviceKernels(launch)


class DeviceKernels:
    """The kernels of one device, as `pscore.local.base.LocalKernels`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._tables: dict[tuple[str, int], tuple[bytes, torch.Tensor]] = {}  # The last ones.

    def change(
        self,
        kernel: str,
        part: Any,
        arrays: Sequence[Any],
        factors: FloatArray,
        *,
        whole: bool = False,
    ) -> None:
        """Makes a local step of `pscore/local`, or the part of it that a kernel is.

        Args:
            arrays: `(numel,) float32` tensors behind the weights, in the kernel's order.
            factors: `(num_groups, n) float32`.
            whole: Whether segments without a gradient are changed too.
        """
        groups = part.segments.groups
        active = np.ones(len(part.segments), np.int64) if whole else part.active
        rows = (
            (start, numel, *factors[groups[index]])
            for index, start, numel, _ in _segments(part.segments, active, part.hyper)
        )
        self._start(kernel, rows, part.weights, *arrays)

    def sgd_step(self, step: DeviceStep) -> None:
        """Makes the shard's SGD step in place, as `pscore/optimizers/sgd.py` does."""
        plain: list[tuple[Any, ...]] = []
        moving: list[tuple[Any, ...]] = []
        for index, start, numel, row in _segments(step.segments, step.active, step.hyper):
            lr, momentum, dampening, decay, nesterov, maximize = row
            factor = np.float32(-1.0 if maximize else 1.0)
            common = (start, numel, factor, np.float32(decay), np.float32(lr))
            if momentum == 0.0:
                plain.append(common)
            else:
                first = step.counts[index] == 0
                keep = np.float32(0.0 if first else momentum)
                take = np.float32(1.0 if first else 1.0 - dampening)
                ahead, along = (1.0, momentum) if nesterov else (0.0, 1.0)
                moving.append((*common, keep, take, np.float32(ahead), np.float32(along)))
            step.counts[index] += 1
        self._start("local_sgd", plain, step.weights, step.grad)
        self._start("sgd_momentum", moving, step.weights, step.grad, step.state[0])

    def adam_step(self, step: DeviceStep, *, decoupled: bool) -> None:
        """Makes the step of `pscore/optimizers/adam.py`, or with a third array of `amsgrad.py`.

        Args:
            decoupled: Whether weight decay shrinks the weights and is not a part of the gradient.
        """
        rows: list[tuple[Any, ...]] = []
        for index, start, numel, row in _segments(step.segments, step.active, step.hyper):
            lr, beta1, beta2, eps, decay, maximize = row
            step.counts[index] += 1
            first, second = corrections(beta1, beta2, step.counts[index])
            rows.append(
                (
                    *(start, numel, -1.0 if maximize else 1.0, 0.0 if decoupled else decay),
                    *(1.0 - lr * decay if decoupled else 1.0, 1.0 - beta1, beta2, 1.0 - beta2),
                    *(lr / first, second, eps),
                )
            )
        largest = step.state[2:] or [NONE]
        self._start("adam", rows, step.weights, step.grad, *step.state[:2], *largest)

    def _start(self, kernel: str, rows: Iterable[tuple[Any, ...]], *arrays: Any) -> None:
        """Starts a kernel on the segments of a slice, if there are any.

        Args:
            rows: Start, length and factors of each segment.
            arrays: Tensors of the slice, in the kernel's order; the first one is written to.
        """
        table = np.array([_row(*row) for row in rows], dtype=ROW)
        if len(table):
            where = self._on_device(kernel, table.tobytes(), arrays[0])
            longest = int(table["numel"].max())
            addresses = [one if one is NONE else pointer(one) for one in arrays]
            arguments = (pointer(where), np.int32(len(table)), *addresses)
            self._launch(kernel, min(MAX_BLOCKS, -(-longest // (THREADS * EACH))), arguments)

    def _on_device(self, kernel: str, table: bytes, weights: torch.Tensor) -> torch.Tensor:
        """Returns a table on the device of a slice; it is copied if it is not the last one."""
        key = kernel, weights.data_ptr()
        known = self._tables.get(key)
        if known is None or known[0] != table:
            host = torch.frombuffer(bytearray(table), dtype=torch.uint8)
            if weights.device.type == "cuda":
                host = host.pin_memory()  # Torch keeps it until it is copied.
            known = self._tables[key] = table, host.to(weights.device, non_blocking=True)
        return known[1]


def _row(start: int, numel: int, *factors: Any) -> tuple[int, int, list[float]]:
    """Returns a row of a table of segments; factors are rounded to float32."""
    (width,) = ROW["factors"].shape
    return start, numel, [*factors, *[0.0] * (width - len(factors))]


def _segments(
    segments: SegmentTable, active: IntArray, hyper: HyperArray
) -> Iterator[tuple[int, int, int, list[float]]]:
    """Yields number, start, length and hyper-parameters of each segment that is active."""
    for index in np.flatnonzero(active).tolist():
        start, stop = segments.bounds[index].tolist()
        yield index, start, stop - start, hyper[segments.groups[index]].tolist()
