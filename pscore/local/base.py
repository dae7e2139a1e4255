"""The protocol of a local update: a worker's own steps between two pulls. One file each.

A worker keeps one `LocalSlice` per slice. When a pull has arrived, `rebase` stores the global
weights; at each later step `update` moves them by the worker's own gradient until the next pull.
Tensors are on the model's device: Numba on the CPU, kernels or torch on a GPU.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from pscore.optimizers.base import Optimizer, StepKernels
from pscore.placement import WORKER
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable


class LocalKernels(StepKernels, Protocol):
    """The local updates of this folder as kernels of one device, started without waiting.

    Every method makes the step of the file of its name, in place and with the same bits as the CPU.
    `columns` are those of weight decay and of maximize in the hyper-parameters; -1 for none.
    """

    def sgd(
        self, part: LocalSlice, grad: Any, lr_scale: float, decay_column: int, sign_column: int
    ) -> None:
        """Makes the plain local step."""

    def glu(
        self,
        part: LocalSlice,
        grad: Any,
        before: Any,
        factors: tuple[float, float, float],
        inverse: FloatArray,
        columns: tuple[int, int],
    ) -> None:
        """Makes the local step of GLU."""

    def secant(
        self,
        part: LocalSlice,
        grad: Any,
        sync: Any,
        factors: tuple[float, float, float],
        columns: tuple[int, int],
    ) -> None:
        """Makes the local step of secant."""

    def secant_rebase(
        self,
        part: LocalSlice,
        pulled: Any,
        old: Any,
        sync: Any,
        shrinks: FloatArray,
        rates: FloatArray,
    ) -> None:
        """Computes the global update from two pulls, for secant."""

    def dc(
        self,
        part: LocalSlice,
        grad: Any,
        arrays: tuple[Any, Any],
        factors: tuple[float, float, float],
        columns: tuple[int, int],
        *,
        is_adaptive: bool,
    ) -> None:
        """Makes the delay-compensated local step."""


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
    """One kind of step between two pulls.

    Attributes:
        name: Its name in `LOCAL_UPDATES`.
        pulls_state: Whether the server optimizer's state comes with every pull.
    """

    name: ClassVar[str]
    pulls_state: bool = False

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
            part: The slice.
            weights: `(numel,) float32` tensor, the global weights; only valid during the call. It
                may be the array that `room` has returned.
            state: The optimizer's state arrays in the order of `state_names`, or empty. They may be
                the arrays that `state_room` has returned.
            version: Their version, in updates.
        """
        part.weights.copy_(weights)
