"""Progress of one worker on one slice, and the minibatches that the slice has counted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pscore.types import Push

Token = Hashable  # Names a request: the clock's driver finds its payload and reply by it.
LATE_KEPT = 1024  # Late steps remembered per worker, so that a repeated push gets the same answer.


@dataclass(slots=True)
class Progress:
    """The steps received from one worker: all below `clock`, and those in `ahead`."""

    clock: int = 0  # Steps received without a gap. Invariant: never falls.
    ahead: set[int] = field(default_factory=set)  # Later ones. Invariant: all above `clock`.
    # Received when their step had closed. Invariant: spans at most `LATE_KEPT` steps.
    late: set[int] = field(default_factory=set)
    skipped: int = 0  # The last ones of those below `clock`, which were never received.

    @property
    def num_counted(self) -> int:
        """One more than the last step received; 0: none was."""
        return max(self.ahead, default=self.clock - self.skipped - 1) + 1

    def __contains__(self, step: int) -> bool:
        return step < self.clock or step in self.ahead

    def add(self, step: int) -> None:
        """Counts `step`; steps missing for more than `LATE_KEPT` steps will not come any more."""
        self.ahead.add(step)
        if self.clock < step - LATE_KEPT:
            self.clock = step - LATE_KEPT
            self.ahead = {other for other in self.ahead if other >= self.clock}
        self.skipped = 0
        self._close_gap()

    def skip_to(self, step: int) -> None:
        """Leaves out the steps before `step` that were not received; a lower one changes nothing.

        Those in `ahead` are forgotten: the worker continues with `step`.
        """
        counted, self.clock = self.num_counted, max(self.clock, step)
        self.skipped = max(0, self.clock - counted)
        self.ahead.clear()

    def add_before(self, step: int) -> None:
        """Counts all steps before `step`."""
        if self.clock < step:
            self.clock = step
            self.ahead = {other for other in self.ahead if other >= step}
            self._close_gap()

    def add_late(self, step: int) -> None:
        """Records that `step`, which is counted, came too late for its update."""
        self.late.add(step)
        self.late -= {other for other in self.late if other < step - LATE_KEPT}

    def _close_gap(self) -> None:
        while self.clock in self.ahead:
            self.ahead.remove(self.clock)
            self.clock += 1

    def check_invariants(self) -> None:
        """Asserts what the comments at the fields say."""
        assert all(step > self.clock for step in self.ahead), (self.clock, self.ahead)
        assert not self.late or max(self.late) - min(self.late) <= LATE_KEPT


class Minibatches(Progress):
    """The minibatches counted: all below `clock`, and those in `ahead`.

    A worker of a pipeline that was lost may have pushed a minibatch to some slices and not to
    others. Another worker then computes it again, and each slice counts it once.
    """

    def is_repeated(self, push: Push) -> bool:
        """Returns whether the minibatch of a push is counted already."""
        return push.minibatch >= 0 and push.minibatch in self

    def once(self, push: Push) -> Push:
        """Returns a push as its step takes it: without a weight if its minibatch is counted."""
        return push._replace(samples=0.0, present=0) if self.is_repeated(push) else push

    def note(self, push: Push) -> None:
        """Counts the minibatch of a push, if it names one."""
        if push.minibatch >= 0 and push.minibatch not in self:
            self.add(push.minibatch)
