"""Memory for the answers of pulls: the final place if it is free, else a separate buffer.

Separate buffers cost one more copy of the model, and one more for each state array of the shard's
optimizer that is pulled. They are allocated when they are first needed. For a model on a GPU they
are pinned, and a buffer is used again when the copy that reads it is over: until then the next pull
has another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import torch

from pscore.local.base import LocalSlice, LocalUpdate, zeros_like
from psworker.model.copies import CopyEnd
from psworker.model.device import is_on_device
from psworker.replica.ports import PullBuffer


class PullBuffers:
    """The pull buffers of a replica's slices."""

    def __init__(self, parts: Sequence[LocalSlice], num_state: int) -> None:
        """Allocates nothing yet.

        Args:
            num_state: Number of state arrays of the shards' optimizer.
        """
        self._parts = parts
        self._num_state = num_state
        self._buffers: dict[int, PullBuffer] = {}
        self._weights: dict[int, torch.Tensor] = {}  # Separate buffers.
        self._state: dict[int, list[torch.Tensor]] = {}
        # Unused ones, by length; each with the end of the copy that still reads it.
        self._free: defaultdict[int, list[tuple[CopyEnd, torch.Tensor]]] = defaultdict(list)

    def __getitem__(self, index: int) -> PullBuffer:
        """Returns the buffer of a slice's last pull."""
        return self._buffers[index]

    def room(self, index: int, local: LocalUpdate | None, oldest: int) -> torch.Tensor | None:
        """Returns the final place of a pull's weights if it may be written directly, else None.

        Without a local update only forward and backward read the weights during a pull.

        Args:
            oldest: The oldest version that the pull can bring.
        """
        part = self._parts[index]
        if is_on_device(part.weights):
            return None
        if local is None:
            return cast(torch.Tensor, part.weights)
        # A repeated local update needs a newer pull than the last one.
        is_newer = part.version < 0 or oldest > part.version
        return cast(torch.Tensor | None, local.room(part)) if is_newer else None

    def state_room(self, index: int, local: LocalUpdate | None) -> list[torch.Tensor]:
        """Returns the final places of pulled state, likewise; empty if there are none."""
        part = self._parts[index]
        if local is None or is_on_device(part.weights):
            return []
        return list(local.state_room(part))

    def beside(self, index: int) -> torch.Tensor:
        """Returns the separate buffer for the weights of a slice, on the host."""
        if index not in self._weights:
            self._weights[index] = self._take(index)
        return self._weights[index]

    def release(self, index: int, done: CopyEnd) -> None:
        """Frees the separate buffers of a slice for other slices: their content was applied.

        Args:
            done: The end of the copies to a device that read them.
        """
        if index in self._weights:
            self._give(done, self._weights.pop(index))
        if is_on_device(self._parts[index].weights):
            for array in self._state.pop(index, []):
                self._give(done, array)

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
            room: Memory for its weights; None: a separate buffer.
            state_room: Memory for its state; empty: separate buffers.
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
        """Drops a buffer that may still be written to; the next pull uses other memory."""
        del self._buffers[index]
        self._weights.pop(index, None)
        self._state.pop(index, None)

    def clear(self) -> None:
        """Frees all memory; no pull may be under way."""
        self._buffers.clear()
        self._weights.clear()
        self._free.clear()
        self._state.clear()

    def _state_beside(self, index: int) -> list[torch.Tensor]:
        if index not in self._state:
            self._state[index] = [self._take(index) for _ in range(self._num_state)]
        return self._state[index]

    def _take(self, index: int) -> torch.Tensor:
        """Returns unused memory for a slice that no copy reads any more."""
        like = self._parts[index].weights
        free = self._free[len(like)]
        for place in (-1, 0) if free else ():  # Copies end in order: the first one is the oldest.
            if free[place][0].is_over():
                return free.pop(place)[1]
        return _host_buffer(like)

    def _give(self, done: CopyEnd, buffer: torch.Tensor) -> None:
        self._free[len(buffer)].append((done, buffer))


def _host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Returns a zeroed float32 tensor on the host; pinned if `like` is on a GPU."""
    if like.device.type == "cpu":
        return cast(torch.Tensor, zeros_like(like))
    return torch.zeros(like.shape, dtype=torch.float32, pin_memory=like.device.type == "cuda")
