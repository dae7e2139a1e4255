"""What a replica sends through, and where its pulls land."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pscore.types import IntArray, Push


@dataclass(slots=True, kw_only=True)
class PullBuffer:
    """Where a pull lands; on the host, written by whoever receives it."""

    weights: torch.Tensor  # (numel,) float32
    state: list[torch.Tensor]  # One (numel,) float32 for each state array, if asked for.
    version: int = -1  # -1 while it is under way.
    counts: IntArray | None = None  # With state: optimizer steps of each segment.
    clock: int = 0  # The first step that the slice would take of a worker that has come anew.
    begins: bool = False  # Asked for by a worker that has come anew: it pushes none before `clock`.
    exact: bool = False  # The weights themselves, where training goes on from an estimate of them.
    is_look: bool = False  # They are only to be seen, and exact: training goes on without them.
    copy_on_wait: bool = (
        False  # `weights` are in use: nothing may land before somebody waits for it.
    )


class PushPull(Protocol):
    """How a replica sends. Neither call waits."""

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends `(numel,) float32`, which stays unchanged until it has left.

        Args:
            index: The slice.
            push: What a shard decides about.
            grad: The gradient, or what the weights moved by.
            compress: Whether the job's compressor is used.
            flush: What error feedback owes goes along, uncompressed, and becomes zero.
        """

    def pull(
        self, index: int, clock: int, min_version: int, buffer: PullBuffer, *, with_state: bool
    ) -> None:
        """Asks for the weights of a slice."""

    def maps_weights(self, index: int) -> bool:
        """Whether a slice's weights are in shared memory: a pull can land when it is waited for."""
