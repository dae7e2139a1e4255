"""The interface through which a replica sends, and the memory its pulls are written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pscore.types import IntArray, Push


@dataclass(slots=True, kw_only=True)
class PullBuffer:
    """Memory for the answer of a pull, on the host; the receiving thread writes it."""

    weights: torch.Tensor  # (numel,) float32
    state: list[torch.Tensor]  # One (numel,) float32 for each requested state array.
    version: int = -1  # -1 while the pull is under way.
    counts: IntArray | None = None  # With state: optimizer steps of each segment.
    clock: int = 0  # First step that the slice accepts from a worker that has (re)joined.
    begins: bool = False  # From a worker that has (re)joined: it pushes no step before `clock`.
    exact: bool = False  # The exact weights, also where training uses an estimate of them.
    is_look: bool = False  # Exact weights that training does not use.
    copy_on_wait: bool = False  # `weights` are in use until the pull is waited for.


class PushPull(Protocol):
    """Sends a replica's pushes and pulls; no method waits."""

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends `(numel,) float32`, which must not change until it has left.

        Args:
            push: The description of the push, for the shard's decision.
            grad: The gradient, or the move of the weights.
            flush: Whether the residual is added, uncompressed, and becomes zero.
        """

    def pull(
        self, index: int, clock: int, min_version: int, buffer: PullBuffer, *, with_state: bool
    ) -> None:
        """Requests the weights of a slice."""

    def maps_weights(self, index: int) -> bool:
        """Returns whether a slice's weights are in shared memory, to be copied when waited for."""
