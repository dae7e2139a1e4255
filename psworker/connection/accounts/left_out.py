"""Counts steps that a script begins with `zero_grad()` and does not end with `step()`.

One worker may leave out a batch (`if not loss.isfinite(): continue`) that the others train on. The
others cannot tell it from a slow worker. So each worker counts, and the first shard compares the
counts: scripts may call `zero_grad()` as often as they like, if all workers do the same.
"""

from __future__ import annotations


class LeftOut:
    """The count of one script.

    Attributes:
        report: Steps ended so far; steps begun and not ended, since the end of the first one; and
            the first number when the second last changed. Replaced as a whole, because another
            thread reads it.
    """

    def __init__(self) -> None:
        self.report = (0, 0, 0)
        self._zeroed = 0  # Calls since the end of the last step.
        self._total = 0  # Calls in steps after the first, except those given up.
        self._num_steps = 0  # Such steps.
        self._usual: int | None = None  # Fewest calls from one step to the next.

    def zeroed(self) -> None:
        """Counts a call of `zero_grad()`."""
        self._zeroed += 1

    def ended(self) -> None:
        """Counts the end of a step: `step()`, or `skip_step()`."""
        steps, count, since = self.report
        if steps > 0:
            self._total += self._zeroed
            self._num_steps += 1
            self._usual = min(self._zeroed if self._usual is None else self._usual, self._zeroed)
            former, count = count, self._total - self._usual * self._num_steps
            since = since if count == former else steps
        self.report = (steps + 1, count, since)
        self._zeroed = 0

    def given_up(self) -> None:
        """Counts the end of a step that an error has ended; the script did not leave it out."""
        steps, count, since = self.report
        self.report = (steps + 1, count, since)
        self._zeroed = 0
