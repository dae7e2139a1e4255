"""Fragments of a model in a mode with rounds: each has rounds of its own, and they end in turn.

Arthur Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (a
digest was read). The slices of the model are divided into p fragments. Every H steps each fragment
ends one round, fragment q at `offset(q)` = ceil((q + 1) H / p) steps of a cycle of H, so that the
bytes of a round are sent in p parts, evenly over the cycle:

    round r of fragment q (from 0) ends after step   warmup + offset(q) + r H

The first round of a fragment is shorter than H, except that of the last one. Each step of the
warm-up is a round of every fragment. All workers end the rounds in the same order, also those
that join late: else one could wait for another's round, and the other for its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEQUENTIAL, STRIDED = "sequential", "strided"
PATTERNS = {SEQUENTIAL: "parts of neighbouring layers", STRIDED: "each p-th slice"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which the rounds of each fragment end; fragment 0 of 1 is the whole model."""

    number: int  # p, fragments, 1..steps.
    steps: int  # H, steps of a round.
    warmup: int  # Steps before that which are rounds of their own.
    pattern: str = SEQUENTIAL  # The division of the slices, one of `PATTERNS`.
    least: int = 0  # Least steps of a round of a slower worker; 0: each makes `steps`.

    def offset(self, fragment: int) -> int:
        """Returns the step of a cycle, 1..H, that ends a fragment's round."""
        return -(-(fragment + 1) * self.steps // self.number)

    def own_step(self, step: int, fragment: int) -> int:
        """Returns a step as a fragment counts: it ends a round at each multiple of H behind it."""
        return step if step < self.warmup else step + self.steps - self.offset(fragment)

    def num_ended(self, step: int, fragment: int) -> int:
        """Returns the rounds of a fragment that end in the first `step` steps."""
        behind = max(0, self.own_step(step, fragment) - self.warmup)
        return min(step, self.warmup) + behind // self.steps

    def num_between(self, start: int, stop: int, fragment: int) -> int:
        """Returns the rounds of a fragment that end in the steps from `start` to before `stop`."""
        return self.num_ended(stop, fragment) - self.num_ended(start, fragment)

    def step_after(self, step: int, num_rounds: int, fragment: int) -> int:
        """Returns the step of a worker that was at `step`, once so many rounds have ended since."""
        total = self.num_ended(step, fragment) + num_rounds
        if num_rounds == 0:
            return step
        if total <= self.warmup:
            return total
        return self.warmup + (total - self.warmup - 1) * self.steps + self.offset(fragment)

    def step_behind(self, step: int, num_rounds: int) -> int:
        """Returns the step in the same place of a cycle, so many rounds of every fragment later."""
        warm = min(num_rounds, max(0, self.warmup - step))
        return step + warm + (num_rounds - warm) * self.steps

    def step_of(self, start: int, num_rounds: Sequence[int]) -> int:
        """Returns the step at which the last of each fragment's `num_rounds` since `start` ends."""
        pairs = enumerate(num_rounds)
        return max(self.step_after(start, num, fragment) for fragment, num in pairs)

    def round_steps(self, share: float) -> int | None:
        """Returns the steps of a round by a worker's speed; None: all make `steps`.

        Args:
            share: Its speed over that of the fastest worker, above 0 to 1.
        """
        if not self.least:
            return None
        return max(self.least, min(self.steps, int(share * self.steps + 0.5)))

    def weight(self, mean_samples: float, num_steps: int) -> float:
        """Returns the weight of a round's move in the mean.

        By speed, that is all its samples over the steps of a whole round.
        """
        return mean_samples * num_steps / self.steps if self.least else mean_samples

    def assign(self, numels: Sequence[int]) -> list[int]:
        """Returns the fragment of each slice.

        Args:
            numels: Elements of each slice, in the order of the flat vector: the last layers first.
        """
        if self.number == 1 or self.pattern == STRIDED:
            return [index % self.number for index in range(len(numels))]
        ends = [sum(numels[:index]) for index in range(len(numels) + 1)]
        cuts = [0]
        for part in range(1, self.number):
            low, high = cuts[-1] + 1, max(cuts[-1] + 1, len(numels) - self.number + part)
            wanted = ends[-1] * part / self.number
            near = [
                (abs(ends[min(cut, len(numels))] - wanted), -cut) for cut in range(low, high + 1)
            ]
            cuts.append(-min(near)[1])
        return [sum(index >= cut for cut in cuts) - 1 for index in range(len(numels))]
