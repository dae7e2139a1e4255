"""The protocol of a local update: a worker's own steps between two pulls. One file each.

A worker keeps one `LocalSlice` per slice. When a pull has arrived, `rebase` stores the global
weights; at each later step `update` moves them by the worker's own gradient until the next pull.
Tensors are on the model's device: Numba on the CPU, kernels or torch on a GPU.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pscore.memory.kernels import inlined
from pscore.optimizers.base import Optimizer, StepKernels
from pscore.optimizers.driver import cut_each
from pscore.placement import WORKER
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable


class LocalKernels(StepKernels, Protocol):
    """The local updates of this folder as kernels of one device, started without waiting."""

    def change(
        self,
        kernel: str,
        part: LocalSlice,
        arrays: Sequence[Any],
        factors: FloatArray,
        *,
        whole: bool = False,
    ) -> None:
        """Changes each active segment by one kernel, in place and with the same bits as the CPU.

        Args:
            kernel: Its name, `ElementwiseUpdate.device_kernel`.
            arrays: `(numel,) float32` tensors behind the weights, in the kernel's order.
            factors: `(num_groups, n) float32`.
            whole: Whether segments without a gradient are changed too.
        """


@dataclass(slots=True, kw_only=True)
class LocalSlice:
    """The part of a worker's model that is one slice."""

    weights: Any  # (numel,) float32 tensor: the weights of the next forward pass.
    segments: SegmentTable
    optimizer: Optimizer  # The server's, with the hyper-parameters of this step in `hyper`.
    hyper: HyperArray  # (num_groups, num_hyper) float64; replaced at each step.
    active: IntArray  # (num_segments,) int64; replaced at each step.
    counts: IntArray  # (num_segments,) int64: optimizer steps the weights have had.
    version: int = -1  # Version of the newest pull that has landed; -1 before the first.
    past: list[HyperArray] = field(default_factory=list)  # Local updates since that pull.
    num_made: int = 0  # Local updates since the worker began, or came back.
    state: dict[str, Any] = field(default_factory=dict)  # Tensors of the local update by name.
    origin: Any = None  # (numel,) float32 tensor in modes with rounds: the weights at their start.
    num_workers: int = 1  # That the job was made for.
    kernels: LocalKernels | None = None  # Those of the device; None: torch, or Numba on a CPU.
    largest_rates: np.ndarray = field(init=False)  # (num_groups,) float64: of local updates so far.

    def __post_init__(self) -> None:
        assert self.counts.dtype == np.int64
        self.largest_rates = np.zeros(len(self.hyper))

    @property
    def num_local(self) -> int:
        """Local updates since the newest pull that has landed."""
        return len(self.past)

    def restart(self) -> None:
        """Forgets everything but the weights: the next pull counts as the first one."""
        self.version, self.num_made = -1, 0
        self.counts[:], self.largest_rates[:] = 0, 0.0
        self.past.clear()
        self.state.clear()


def zeros_like(weights: Any) -> Any:
    """Returns zeros of the shape, dtype and device of a `(numel,) float32` tensor.

    On the CPU large ones are mapped: in the heap they would lie between gradients, and the
    allocator could neither join nor return the memory of those.
    """
    if weights.device.type != "cpu" or weights.nbytes < WORKER.mapped_nbytes_min:
        return weights.new_zeros(weights.shape)
    import torch  # Shards have none.

    mapped = mmap.mmap(-1, weights.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.float32))


def state_array(part: LocalSlice, name: str, like: Any = None) -> Any:
    """Returns an array of the local update's state; at first a copy of `like`, or zeros."""
    if name not in part.state:
        fresh = zeros_like(part.weights)
        part.state[name] = fresh if like is None else fresh.copy_(like)
    return part.state[name]


def optimizer_state(part: LocalSlice) -> list[Any]:
    """Returns the arrays of the shards' optimizer's state that a worker keeps; zeros at first."""
    return [state_array(part, name) for name in part.optimizer.state_names]


class LocalUpdate(ABC):
    """One kind of step between two pulls."""

    name: ClassVar[str]  # Its name in `LOCAL_UPDATES`.
    pulls_state: bool = False  # Whether the server optimizer's state comes with every pull.

    @abstractmethod
    def update(self, part: LocalSlice, grad: Any) -> None:
        """Moves `part.weights` in place by the worker's own gradient.

        Args:
            part: The slice; `hyper` and `active` are this step's.
            grad: `(numel,) float32` tensor, the mean gradient of this worker's minibatch.
        """

    def wants_state(self, *, last_of_warmup: bool) -> bool:
        """Returns whether a pull that is used one step late, or ends the warm-up, needs the state.

        Args:
            last_of_warmup: Whether it is the last blocking pull before the delay starts.
        """
        return self.pulls_state

    def needs_state(self, part: LocalSlice) -> bool:
        """Returns whether the next pull of a slice needs the state whatever `wants_state` says."""
        return False

    def room(self, part: LocalSlice) -> Any:
        """Returns an array of the state as the buffer of the next pull, or None.

        Nothing may read it between the step's `update` and the `rebase` to that pull, whose
        `weights` it is. A separate buffer would be one more copy of the model.
        """
        return None

    def state_room(self, part: LocalSlice) -> Sequence[Any]:
        """Returns the arrays of the optimizer's state as buffers of the next pull, in its order.

        Empty: there are none. Nothing may read them between `update` and `rebase`.
        """
        return ()

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Stores a pull that has arrived; `part.version` is still the previous pull's.

        Args:
            weights: `(numel,) float32` tensor, the global weights; only valid during the call. It
                may be the array that `room` has returned.
            state: The optimizer's state arrays in the order of `state_names`, or empty. They may be
                the arrays that `state_room` has returned.
            version: Their version, in updates.
        """
        part.weights.copy_(weights)


class SegmentsStep(NamedTuple):
    """One local step on a slice as kernels of the CPU take it; `arrays` has one or two."""

    weights: FloatArray
    grad: FloatArray
    arrays: tuple[FloatArray, ...]
    bounds: IntArray
    groups: IntArray
    active: IntArray
    factors: FloatArray


@inlined
def change_segments(step: SegmentsStep, change: Callable[..., None]) -> None:
    """Changes every active segment by a kernel of weights, gradient, arrays and its factors."""
    for index in range(step.groups.size):
        if step.active[index] != 0:
            start, stop = step.bounds[index, 0], step.bounds[index, 1]
            change(
                step.weights[start:stop],
                step.grad[start:stop],
                cut_each(step.arrays, start, stop),
                step.factors[step.groups[index]],
            )


def empty_step(num_arrays: int) -> SegmentsStep:
    """Returns a step of no segment, whose arrays have the types of a real one's."""
    weights, grad, *arrays = np.zeros((2 + num_arrays, 1), np.float32)
    bounds, indices = np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    factors = np.zeros((0, 1), np.float32)
    return SegmentsStep(weights, grad, tuple(arrays), bounds, indices, indices, factors)


class ElementwiseUpdate(LocalUpdate):
    """A local update that is one formula for each element, with factors for each group.

    The pass over the segments of a slice is here, for every device; a file has the factors, the
    formula as a kernel of the CPU, and the formula in torch's operations.
    """

    device_kernel: ClassVar[str]  # Name of the formula in `pscore/cuda/local.cu`.
    num_arrays: ClassVar[int] = 1  # Number of arrays of the formula.

    def warm_up(self) -> None:
        """Compiles the loops of the CPU, before the first step needs them."""
        self.change_on_cpu(empty_step(self.num_arrays))

    def arrays(self, part: LocalSlice) -> list[Any]:
        """Returns the arrays of the formula, `(numel,) float32`; here the weights."""
        return [part.weights]

    @abstractmethod
    def factors(
        self, part: LocalSlice, group: int, sign: float, decay: float, lr: float
    ) -> Sequence[float]:
        """Returns the factors of this step in the kernels' order, which round them to float32.

        Args:
            group: Index of the group of parameters.
            sign: Factor of its gradients; -1 for maximize.
            decay: Its weight decay.
            lr: Its learning rate, the optimizer's.
        """

    @abstractmethod
    def change_on_cpu(self, step: SegmentsStep) -> None:
        """Runs the formula on the segments of a slice: `change_segments` in the file's kernel."""

    @abstractmethod
    def change(self, w: Any, g: Any, arrays: Sequence[Any], factors: Sequence[float]) -> None:
        """Runs the formula on one segment by torch's operations, in place."""

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the local step."""
        arrays, factors = self.arrays(part), self._read_factors(part)
        if part.kernels is not None:
            part.kernels.change(self.device_kernel, part, [grad, *arrays], factors)
            return
        segments = part.segments
        if part.weights.device.type == "cpu":
            self.change_on_cpu(
                SegmentsStep(
                    part.weights.numpy(),
                    grad.numpy(),
                    tuple(array.numpy() for array in arrays),
                    segments.bounds,
                    segments.groups,
                    part.active,
                    factors,
                )
            )
            return
        for index in np.flatnonzero(part.active):
            start, stop = segments.bounds[index].tolist()
            own = [array[start:stop] for array in arrays]
            row = factors[segments.groups[index]].tolist()
            self.change(part.weights[start:stop], grad[start:stop], own, row)

    def _read_factors(self, part: LocalSlice) -> FloatArray:
        """Returns the factors of each group, `(num_groups, n) float32`."""
        decay_column, sign_column = hyper_columns(part)
        rows = []
        for group, row in enumerate(part.hyper.tolist()):
            sign = -1.0 if sign_column >= 0 and row[sign_column] else 1.0
            decay = row[decay_column] if decay_column >= 0 else 0.0
            rows.append(self.factors(part, group, sign, decay, row[0]))
        return np.array(rows, dtype=np.float32)


def hyper_columns(part: LocalSlice) -> tuple[int, int]:
    """Returns the columns of weight decay and of maximize; -1 if the optimizer has none."""
    names = part.optimizer.hyper_names
    return (
        names.index("weight_decay") if "weight_decay" in names else -1,
        names.index("maximize") if "maximize" in names else -1,
    )


def warm_up(lr_scale: float, local_warmup: int, part: LocalSlice) -> float:
    """Returns the scale of the rate in the next local step, if it rises over `local_warmup`."""
    return lr_scale * min(1.0, (part.num_made + 1) / local_warmup) if local_warmup else lr_scale
