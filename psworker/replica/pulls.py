"""The pulls of a replica that are under way, and the memory that their answers are written to."""

from __future__ import annotations

from collections.abc import Sequence

from pscore.local.base import LocalSlice, LocalUpdate
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pull_buffers import PullBuffers


class Pulls:
    """Sends pulls, and remembers those that are not applied yet.

    Attributes:
        local: The local update of the mode; None: it has none.
        early: Slices pulled in the step under way, before its `finish`; they are applied after it.
    """

    def __init__(
        self, parts: Sequence[LocalSlice], num_state: int, local: LocalUpdate | None
    ) -> None:
        """Starts without a pull.

        Args:
            parts: The slices.
            num_state: Number of state arrays of the shards' optimizer.
            local: The local update of the mode.
        """
        self.local = local
        self.early: set[int] = set()
        # Pulls sent and not applied yet; in the order of sending, in which they will land.
        self._pending: dict[int, None] = {}
        self._buffers = PullBuffers(parts, num_state)

    def __contains__(self, index: int) -> bool:
        """Returns whether a slice has a pull that is not applied yet."""
        return index in self._pending

    def indices(self) -> list[int]:
        """Returns the slices with a pull that is not applied yet, in the order of sending."""
        return list(self._pending)

    def has_landed(self, index: int) -> bool:
        """Returns whether no answer for a slice is outstanding."""
        return index not in self._pending or self._buffers[index].version >= 0

    def has_state_room(self, index: int, push_pull: PushPull) -> bool:
        """Returns whether pulled state can land in its final place, in shared memory."""
        return bool(self._buffers.state_room(index, self.local)) and push_pull.maps_weights(index)

    def send(
        self,
        index: int,
        clock: int,
        oldest: int,
        push_pull: PushPull,
        *,
        with_state: bool,
        exact: bool = False,
        early: bool = False,
        in_use: bool = False,
        begins: bool = False,
    ) -> None:
        """Pulls a slice, unless this step has pulled it early.

        While the weights are `in_use`, or the step's local update is still to come (`early`), the
        answer must not overwrite them: it is copied when it is waited for, or lands in a buffer.

        Args:
            index: Index of the slice.
            clock: Number of this worker's pushes that the answer waits for.
            oldest: The oldest version that will do.
            push_pull: Sends the pull.
            with_state: Whether the optimizer's state comes along.
            exact: As in `PullBuffer`.
            early: Whether the step's `finish` is still to come.
            in_use: Whether backward still reads the weights.
            begins: As in `PullBuffer`.
        """
        if index in self.early:
            return
        room = self._buffers.room(index, self.local, oldest)
        state_room = [] if early else self._buffers.state_room(index, self.local)
        in_use = in_use or (early and self.local is not None)
        copy_on_wait = in_use and room is not None and push_pull.maps_weights(index)
        buffer = self._buffers.prepare(
            index,
            None if in_use and not copy_on_wait else room,
            state_room,
            with_state=with_state,
            exact=exact,
            copy_on_wait=copy_on_wait,
            begins=begins,
        )
        self._pending[index] = None
        push_pull.pull(index, clock, oldest, buffer, with_state=with_state)
        if early:
            self.early.add(index)

    def pop(self, index: int) -> PullBuffer | None:
        """Returns the answer of a slice's pull, once; None: there is none, or it is an early one.

        Call `release` when it is applied.
        """
        if index not in self._pending or index in self.early:
            return None
        del self._pending[index]
        return self._buffers[index]

    def release(self, index: int) -> None:
        """Frees the memory of an answer that was applied."""
        self._buffers.release(index)

    def abandon_early(self) -> None:
        """Gives up the pulls of an unfinished step.

        An answer that still arrives is written to memory that nothing reads.
        """
        for index in self.early:
            self._pending.pop(index, None)
            self._buffers.forget(index)
        self.early.clear()

    def restart(self, local: LocalUpdate | None) -> None:
        """Forgets all pulls."""
        self.abandon_early()
        self._pending.clear()
        self.local = local

    def free_memory(self) -> None:
        """Frees the memory of all answers; no pull may be under way."""
        self._buffers.clear()
