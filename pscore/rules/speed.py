"""Rounds by speed: a slower worker makes fewer local steps, so that all end a round together.

Bo Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135, dynamic
local updates (recalled, not read again).

    H_i = H * speed_i / speed of the fastest worker          to the nearest whole number

at least `steps_min` and at most `steps`, which is H. Speeds are those of computing: a step without
its waits. Each worker sends its own with its heartbeats, and the first shard returns that of the
fastest. A move counts by the samples in it:

    D = sum_i n_i D_i / sum_i n_i          n_i: sum of `samples` over the steps of the round

Steps are counted as the fastest worker makes them: a round moves all workers by H steps of
training, and a slower one leaves out the steps before the last one of its round.

Differs from the paper: speeds are smoothed, and rounded to the nearest number of steps.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from pscore.plugins import WORDS, require_range
from pscore.rules.base import Rule

SPEED = "speed"
STEPS_MAX = 1_000_000


def round_length(default: int) -> Any:
    """Returns the field `steps` of a mode: a number, or `speed`, with a default."""
    return field(default=default, metadata={WORDS: (SPEED,)})


class WithSpeed(Rule):
    """A mode whose rounds may have fewer steps on slower workers.

    `steps` and `steps_min` are fields of the mode. `steps="speed"` is the mode's default with a
    least number of 1, unless another one is given. The lengths and weights of rounds are those of
    the mode's `schedule` (pscore/fragments.py).
    """

    steps: int
    steps_min: int

    def read_steps(self) -> None:
        """Checks both fields, and replaces `steps="speed"` by its numbers.

        Raises:
            ConfigError: One of them is out of its range.
        """
        given: Any = self.steps
        if given == SPEED:
            default = type(self).__dataclass_fields__["steps"].default
            object.__setattr__(self, "steps", default)
            object.__setattr__(self, "steps_min", self.steps_min or 1)
        require_range(f"{self.name}.steps", self.steps, 1, STEPS_MAX)
        require_range(f"{self.name}.steps_min", self.steps_min, 0, self.steps)
