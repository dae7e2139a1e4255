"""What of a slice is counted: which steps of each worker are in, and what is in open steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pscore.types import Push

Token = Hashable  # Whoever drives the clock finds payload and requester by it.
LATE_KEPT = 1024  # Late steps remembered per worker, so that a repeated push gets the same answer.


@dataclass(slots=True)
class Counted:
    """Which steps of one worker are in: all below `clock`, and those in `ahead`."""

    clock: int = 0
    ahead: set[int] = field(default_factory=set)  # Invariant: all above `clock`.
    late: set[int] = field(default_factory=set)  # Counted, but their step had closed before.

    def __contains__(self, step: int) -> bool:
        return step < self.clock or step in self.ahead

    def add(self, step: int) -> None:
        """Counts `step`; a worker that has left out steps long ago will not send them any more."""
        self.ahead.add(step)
        if self.clock < step - LATE_KEPT:
            self.clock = step - LATE_KEPT
            self.ahead = {other for other in self.ahead if other >= self.clock}
        while self.clock in self.ahead:
            self.ahead.remove(self.clock)
            self.clock += 1


@dataclass(slots=True)
class Bin:
    """Pushes of one step, or those since the last update of an asynchronous mode."""

    held: dict[int, tuple[Push, Token]] = field(default_factory=dict)  # In, not yet added.
    added: list[tuple[Push, float]] = field(default_factory=list)  # With its weight in the mean.

    def ranks(self) -> set[int]:
        """Returns the workers whose push is in."""
        return set(self.held) | {push.worker for push, _ in self.added}
