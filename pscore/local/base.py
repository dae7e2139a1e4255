"""The protocol of a local update: how a worker goes on between two pulls. One file each.

A worker keeps one `LocalSlice` per slice. When a pull has landed, `rebase` puts the global weights
in; at each later step `update` moves them by the worker's own gradient until the next pull.
Tensors are on the model's device: Numba kernels on the CPU, torch (or CuPy) on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pscore.optimizers.base import Optimizer
from pscore.types import HyperArray, IntArray, SegmentTable


@dataclass(slots=True, kw_only=True)
class LocalSlice:
    """What a worker holds of one slice."""

    weights: Any  # (numel,) float32 tensor: the weights of the next forward pass.
    segments: SegmentTable
    optimizer: Optimizer  # The server's, with the hyper-parameters of this step in `hyper`.
    hyper: HyperArray  # (num_groups, num_hyper) float64; replaced at each step.
    active: IntArray  # (num_segments,) int64; replaced at each step.
    counts: IntArray  # (num_segments,) int64: optimizer steps the weights have had.
    version: int = -1  # Of the newest pull that has landed; -1 before the first.
    num_local: int = 0  # Local updates since that pull.
    num_made: int = 0  # Local updates since the worker began, or came back.
    state: dict[str, Any] = field(default_factory=dict)  # Of the local update, tensors by name.

    def __post_init__(self) -> None:
        assert self.counts.dtype == np.int64


class LocalUpdate(ABC):
    """One way of going on between two pulls.

    Attributes:
        name: Its name in `LOCAL_UPDATES`.
        pulls_state: Whether the server optimizer's state travels with every pull.
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
        """Returns whether a pull that is used one step late, or ends the warm-up, brings state.

        Args:
            last_of_warmup: It is the last blocking pull before the delay starts.
        """
        return self.pulls_state

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Takes a pull that has landed; `part.version` is still the previous pull's.

        Args:
            part: The slice.
            weights: `(numel,) float32` tensor, the global weights; only valid during the call.
            state: The optimizer's state arrays in the order of `state_names`, or empty.
            version: Their version, in updates.
        """
        part.weights.copy_(weights)
