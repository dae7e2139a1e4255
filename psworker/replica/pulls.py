"""The pulls of a replica: sent, waited for, and applied to its weights."""

from __future__ import annotations

from collections.abc import Generator

from psworker.replica.clocks import Clocks
from psworker.replica.local_weights import LocalWeights
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pull_buffers import PullBuffers
from psworker.replica.rounds import Round

Waits = Generator[int, None, None]


class Pulls:
    """Sends pulls, and applies each once when it has landed.

    Attributes:
        early: Slices pulled in the step under way, before its `finish`; they are applied after it.
    """

    def __init__(self, local: LocalWeights, clocks: Clocks, round_: Round) -> None:
        """Starts without a pull.

        Args:
            clocks: This worker's push counts, which its pulls wait for.
            round_: The open round; it records the weights of the last pull.
        """
        self._local = local
        self._clocks = clocks
        self._round = round_
        self.early: set[int] = set()
        # Pulls sent and not applied yet; in the order of sending, in which they will land.
        self._pending: dict[int, None] = {}
        self._buffers = PullBuffers(local.parts, local.num_state)

    def __contains__(self, index: int) -> bool:
        """Returns whether a slice has a pull that is not applied yet."""
        return index in self._pending

    def has_landed(self, index: int) -> bool:
        """Returns whether a slice can be pushed: no answer of an earlier step is outstanding."""
        is_out = index in self._pending and self._buffers[index].version < 0
        return not is_out or index in self.early

    def send_early(
        self, index: int, push_pull: PushPull, *, with_state: bool, in_use: bool
    ) -> None:
        """Pulls a slice along with its push, before the step's `finish`.

        Pulled state lands in its final place after the local update, if there is room; in shared
        memory a later pull costs little, so nothing is sent yet.

        Args:
            in_use: Whether backward still reads the weights.
        """
        state_room = self._buffers.state_room(index, self._local.local_update)
        if with_state and state_room and push_pull.maps_weights(index):
            return
        clock = self._clocks.next_push(index) + 1
        self.send(index, push_pull, clock=clock, with_state=with_state, early=True, in_use=in_use)

    def fetch(
        self, index: int, push_pull: PushPull, oldest: int | None, *, begins_at: int | None = None
    ) -> None:
        """Pulls the exact weights of a slice, with the state that a local update may need.

        Args:
            oldest: The oldest version that will do; None: one with this worker's pushes.
            begins_at: Step of this worker's first push, if it has (re)joined.
        """
        self.send(
            index,
            push_pull,
            clock=begins_at,
            oldest=oldest,
            with_state=self._local.pulls_state,
            exact=True,
            begins=begins_at is not None,
        )

    def send(
        self,
        index: int,
        push_pull: PushPull,
        *,
        clock: int | None = None,
        oldest: int | None = None,
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
            clock: Number of this worker's pushes that the answer waits for; None: all so far.
            oldest: The oldest version that will do; None: one with these pushes.
            early: Whether the step's `finish` is still to come.
            in_use: Whether backward still reads the weights.
        """
        if index in self.early:
            return
        with_state = with_state or self._local.needs_state(index)
        if oldest is None:
            known = self._clocks.count(index) if clock is None else clock
            oldest = self._clocks.oldest_version(known)
        clock = self._clocks.num_sent(index) if clock is None else clock
        room = self._buffers.room(index, self._local.local_update, oldest)
        state_room = [] if early else self._buffers.state_room(index, self._local.local_update)
        in_use = in_use or (early and self._local.local_update is not None)
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

    def look(
        self, index: int, buffer: PullBuffer, push_pull: PushPull, *, with_state: bool
    ) -> None:
        """Pulls a slice into memory of the caller's; the answer is never applied."""
        clock = self._clocks.known_count(index)
        oldest = self._clocks.oldest_version(clock)
        push_pull.pull(index, clock, oldest, buffer, with_state=with_state)

    def bring(self, index: int) -> None:
        """Starts the copy of a pull of an earlier step, which has landed, to the model's device."""
        if index in self._pending and index not in self.early:
            self._local.bring(index, self._buffers[index])

    def apply(self, index: int) -> None:
        """Applies a slice's pull, which has landed, once; an early one only after `finish`."""
        if index not in self._pending or index in self.early:
            return
        del self._pending[index]
        buffer = self._buffers[index]
        self._clocks.pulled(index, buffer.clock, buffer.version)
        done = self._local.rebase(index, buffer)
        if self._local.local_update is None:  # Else an overlap keeps the start of the round.
            self._round.record_slice(index, self._local.parts[index].weights)
        self._buffers.release(index, done)

    def settle(self) -> Waits:
        """Waits for all pulls under way and applies them.

        They are applied in the order of sending, in which they arrive, so that one is copied while
        others arrive.
        """
        for index in list(self._pending):
            if not self.has_landed(index):
                yield index
            self.apply(index)

    def abandon_early(self) -> None:
        """Gives up the pulls of an unfinished step.

        An answer that still arrives is written to memory that nothing reads.
        """
        for index in self.early:
            self._pending.pop(index, None)
            self._buffers.forget(index)
        self.early.clear()

    def restart(self) -> None:
        """Forgets all pulls."""
        self.abandon_early()
        self._pending.clear()

    def free_memory(self) -> None:
        """Frees the memory of all answers; no pull may be under way."""
        self._buffers.clear()
