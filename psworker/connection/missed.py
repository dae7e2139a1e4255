"""Steps of this worker that did not count whole: it says so, and how many there were.

In a mode by step that is one which closed without this worker (backup workers), perhaps in some
slices only; in any mode, one that was under way when the shards gave this worker up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection

log = logging.getLogger("paceline")
RECENT_MAX = 64


class Missed:
    """The steps of one table that did not count whole.

    Attributes:
        num_steps: How many there were.
        recent: The newest of them, as `optimizer.clock` counts; at most 64.
        pushed: By slice: the step of its last push.
    """

    def __init__(self, num_slices: int) -> None:
        """Starts with none, of a table with so many slices."""
        self.num_steps = 0
        self.recent: deque[int] = deque(maxlen=RECENT_MAX)
        self.pushed: dict[int, int] = {}
        self._num_slices = num_slices
        self._under_way: set[int] = set()  # Slices pushed in the step under way.

    def sent(self, index: int, step: int) -> None:
        """Notes that a slice is pushed."""
        self.pushed[index] = step
        self._under_way.add(index)

    def end_step(self) -> None:
        """Notes that a step has ended: what is pushed next is of another."""
        self._under_way.clear()

    def late(self, rank: int, index: int) -> None:
        """Notes that a slice's last push was too late; says so of the 1st, 2nd, 4th, ... step."""
        step = self.pushed[index]
        if step in self.recent:
            return
        self._add(step)
        if self.num_steps & (self.num_steps - 1) == 0:
            log.warning(
                "worker %d: step %d does not count in slice %d, and perhaps in others: it came "
                "when the shard had closed that step (late steps so far: %d)",
                rank,
                step,
                index,
                self.num_steps,
            )

    def give_up(self, step: int, unanswered: Collection[int]) -> str:
        """Gives up the step under way; returns what came of it.

        Args:
            step: Its number, if nothing of it was pushed.
            unanswered: Slices whose last push may have been counted or not.
        """
        step = max((self.pushed[index] for index in self._under_way), default=step)
        counted = self._under_way.difference(unanswered)
        num_unknown = len(self._under_way) - len(counted)
        self._under_way.clear()
        if len(counted) == self._num_slices:
            return f"step {step} counts"
        self._add(step)
        if not counted and not num_unknown:
            return f"step {step} does not count"
        unknown = f", and perhaps in {num_unknown} more" if num_unknown else ""
        return f"step {step} counts in {len(counted)} of {self._num_slices} slices{unknown}"

    def _add(self, step: int) -> None:
        self.num_steps += 1
        self.recent.append(step)
