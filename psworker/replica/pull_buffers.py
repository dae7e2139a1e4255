"""Where pulls land: right in what they replace if that can be, else in memory beside it.

Memory beside the weights is one more copy of the model, and one more for each array of the shard's
optimizer that a pull brings along. It is taken when it is first needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import torch

from pscore.local.base import LocalSlice, LocalUpdate, zeros_like
from psworker.replica.ports import PullBuffer


class PullBuffers:
    """PullBuffers of a replica's slices."""

    def __init__(self, parts: Sequence[LocalSlice], num_state: int) -> None:
        """Takes no memory yet.

        Args:
            parts: The slices.
            num_state: State arrays of the shard's optimizer.
        """
        self._parts = parts
        self._num_state = num_state
        self._buffers: dict[int, PullBuffer] = {}
        self._weights: dict[int, torch.Tensor] = {}  # Beside those of the slices.
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # By their length.
        self._state: dict[int, list[torch.Tensor]] = {}

    def __getitem__(self, index: int) -> PullBuffer:
        """Returns the buffer of a slice's last pull."""
        return self._buffers[index]

    def room(self, index: int, local: LocalUpdate | None, oldest: int) -> torch.Tensor | None:
        """Returns where a pull can land that takes no memory of its own; None if there is none.

        Without a local update only forward and backward read the weights while it is on its way.

        Args:
            index: The slice.
            local: The local update.
            oldest: The oldest version that the pull can bring.
        """
        part = self._parts[index]
        if part.weights.device.type != "cpu":
            return None
        if local is None:
            return cast(torch.Tensor, part.weights)
        # What is made anew from a pull has to be made from a newer one.
        is_newer = part.version < 0 or oldest > part.version
        return cast(torch.Tensor | None, local.room(part)) if is_newer else None

    def state_room(self, index: int, local: LocalUpdate | None) -> list[torch.Tensor]:
        """Returns where pulled state can land, likewise; empty: nowhere."""
        part = self._parts[index]
        if local is None or part.weights.device.type != "cpu":
            return []
        return list(local.state_room(part))

    def beside(self, index: int) -> torch.Tensor:
        """Returns memory of its own for the weights of a slice, on the host."""
        if index not in self._weights:
            like = self._parts[index].weights
            free = self._free[len(like)]
            self._weights[index] = free.pop() if free else _host_buffer(like)
        return self._weights[index]

    def release(self, index: int) -> None:
        """Has another slice's pull land where this one's has, which nobody reads any more."""
        if index in self._weights and self._parts[index].weights.device.type == "cpu":
            weights = self._weights.pop(index)  # To a device it may still be on its way.
            self._free[len(weights)].append(weights)

    def prepare(
        self,
        index: int,
        room: torch.Tensor | None,
        state_room: list[torch.Tensor],
        *,
        with_state: bool,
        exact: bool,
        copy_on_wait: bool,
        begins: bool,
    ) -> PullBuffer:
        """Returns the buffer of the next pull of a slice.

        Args:
            index: The slice.
            room: For its weights; None: beside those of the slice.
            state_room: For its state; empty: beside that of the slice.
            with_state: Whether state comes along.
            exact: As the buffer's.
            copy_on_wait: As the buffer's.
            begins: As the buffer's.
        """
        weights = self.beside(index) if room is None else room
        buffer = self._buffers.setdefault(index, PullBuffer(weights=weights, state=[]))
        buffer.weights = weights
        if with_state:
            buffer.state = state_room or self._state_beside(index)
        buffer.version, buffer.exact, buffer.copy_on_wait = -1, exact, copy_on_wait
        buffer.begins = begins
        return buffer

    def forget(self, index: int) -> None:
        """Lets a buffer go that may still be written to: the next one is other memory."""
        del self._buffers[index]
        self._weights.pop(index, None)
        self._state.pop(index, None)

    def clear(self) -> None:
        """Lets all memory go; no pull is under way."""
        self._buffers.clear()
        self._weights.clear()
        self._free.clear()
        self._state.clear()

    def _state_beside(self, index: int) -> list[torch.Tensor]:
        if index not in self._state:
            like = self._parts[index].weights
            self._state[index] = [_host_buffer(like) for _ in range(self._num_state)]
        return self._state[index]


def _host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Returns a zeroed float32 tensor on the host; pinned if `like` is on a GPU."""
    if like.device.type == "cpu":
        return cast(torch.Tensor, zeros_like(like))
    return torch.zeros(like.shape, dtype=torch.float32, pin_memory=like.device.type == "cuda")
