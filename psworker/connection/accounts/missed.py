"""Counts and reports steps of this worker that did not count, or not in every slice.

In a mode by step these are steps that closed without this worker (backup workers), perhaps in some
slices only; in any mode, a step that was under way when the shards declared this worker lost, and
steps that a shard had acknowledged and then lost, because it had no journal of them, or that it had
not counted when it was lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence

from pscore.rules.base import Rule

log = logging.getLogger("paceline")
RECENT_MAX = 64


class Missed:
    """The steps of one table that did not count, or not in every slice."""

    def __init__(self, num_slices: int, rank: int = 0, *, of: str = "") -> None:
        """Starts with none.

        Args:
            of: Words behind the number of a step, for the log: the table's.
        """
        self._of = of
        self.num_steps = 0  # Number of such steps.
        # The newest of them, as `optimizer.clock` counts; at most 64.
        self.recent: deque[int] = deque(maxlen=RECENT_MAX)
        self.pushed: dict[int, int] = {}  # Step of the last push of each slice.
        self._num_slices, self._rank = num_slices, rank
        self._under_way: set[int] = set()  # Slices pushed in the step under way.
        self._begun: dict[int, int] = {}  # By slice: the first step behind the last gap.
        self._unsure: set[int] = set()  # Slices whose pushes the shards may have lost.
        self._lost: set[int] = set()  # Steps that they have lost, and that were not reported yet.

    def __repr__(self) -> str:
        return f"Missed(num_steps={self.num_steps}, recent={list(self.recent)})"

    def sent(self, index: int, step: int) -> None:
        """Records the push of a slice."""
        if self.pushed.get(index, step - 1) != step - 1:
            self._begun[index] = step
        self.pushed[index] = step
        self._under_way.add(index)

    def end_step(self) -> None:
        """Records the end of a step: the next push belongs to another."""
        self._under_way.clear()

    def late(self, rank: int, index: int, rule: Rule) -> None:
        """Records that a slice's last push was too late; warns of the 1st, 2nd, 4th, ... step."""
        step = self.pushed[index]
        if step in self.recent:
            return
        self._add(step)
        if self.num_steps & (self.num_steps - 1) == 0:
            log.warning(
                "worker %d: %s %d%s does not count in slice %d, and perhaps in others: it came "
                "when the shard had closed it (late so far: %d)",
                rank,
                _unit(rule),
                step,
                self._of,
                index,
                self.num_steps,
            )

    def left_out(self, index: int) -> None:
        """Records that a slice's last push was refused, and does not count there."""
        if self.pushed[index] not in self.recent:
            self._add(self.pushed[index])

    def give_up(self, step: int | None, unanswered: Collection[int], rule: Rule) -> str:
        """Gives up the step under way; returns a sentence that says whether it counts.

        Args:
            step: Its number, used if nothing of it was pushed; None: there may be none.
            unanswered: Slices whose last push may have been counted or not.
        """
        step = max((self.pushed[index] for index in self._under_way), default=step)
        if step is None:
            return "no step was under way"
        counted = self._under_way.difference(unanswered)
        num_unknown = len(self._under_way) - len(counted)
        self._under_way.clear()
        if len(counted) == self._num_slices:
            return f"{_unit(rule)} {step} counts"
        self._add(step)
        if not counted and not num_unknown:
            return f"{_unit(rule)} {step} does not count"
        unknown = f", and perhaps in {num_unknown} more" if num_unknown else ""
        return (
            f"{_unit(rule)} {step} counts in {len(counted)} of {self._num_slices} slices{unknown}"
        )

    def doubt(self, rank: int) -> None:
        """Records that this worker has rejoined: each shard says next what it has counted.

        Args:
            rank: Its rank now; of another one the shards have counted another worker's steps.
        """
        if rank != self._rank:
            self.forget()
        self._rank, self._unsure = rank, set(self.pushed)

    def forget(self) -> None:
        """Forgets what was pushed: steps are counted from another number on."""
        self.pushed.clear()
        self._begun.clear()

    def compare(self, index: int, counted: int) -> None:
        """Compares a slice, after `doubt`, with the steps that its shard has counted.

        Args:
            counted: One more than the last step counted of this worker there; -1: not known.
        """
        if index not in self._unsure:
            return
        self._unsure.discard(index)
        if 0 <= counted <= self.pushed[index]:
            first = max(counted, self._begun.get(index, 0))
            self._lost.update(range(first, self.pushed[index] + 1))
            self.pushed[index] = counted - 1

    def give_up_rest(self, steps: Sequence[int]) -> None:
        """Records that a step was given up before all of its slices were pushed.

        Args:
            steps: By slice: the step of the next push.
        """
        rest = set(range(len(steps))).difference(self._under_way)
        self._lost.update(steps[index] for index in rest)
        self._under_way.clear()

    def report_lost(self, rule: Rule) -> None:
        """Counts and logs the steps that `compare` has found to be lost, if there are any."""
        steps = sorted(self._lost.difference(self.recent))
        self._lost.clear()
        for step in steps:
            self._add(step)
        if steps:
            log.warning(
                "worker %d: %d %ss up to %d%s do not count in every slice: a shard has lost them, "
                "or was lost before it had counted them",
                self._rank,
                len(steps),
                _unit(rule),
                steps[-1],
                self._of,
            )

    def _add(self, step: int) -> None:
        self.num_steps += 1
        self.recent.append(step)


def _unit(rule: Rule) -> str:
    """Returns the word for one push in the log; that of a mode with rounds holds many steps."""
    return "push" if rule.outer_optimizer else "step"
