"""The pace of a worker, as its heartbeats report it; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPace:
    """Sums since a worker has joined; a reader takes the difference of two moments.

    The last two are of this moment.
    """

    num_steps: int = 0  # Steps that followed another.
    steps_s: float = 0.0  # Seconds of these steps, each from the end of the one before.
    waits_s: float = 0.0  # Seconds in which it waited for answers of shards.
    requests_s: float = 0.0  # Seconds in which pushes or pulls were under way.
    step_s: float = 0.0  # Seconds of one step without its waits; 0: not known yet.
    round_steps: int = 0  # Of the round under way, in a mode with rounds by speed; else 0.

    @property
    def is_valid(self) -> bool:
        """Whether a worker that keeps the rules can have sent it."""
        seconds = (self.steps_s, self.waits_s, self.requests_s, self.step_s)
        return self.num_steps >= 0 and all(math.isfinite(s) and s >= 0.0 for s in seconds)

    @property
    def hidden_ratio(self) -> float:
        """Share of the time of its requests in which it did not wait for them, 0 to 1."""
        if self.requests_s <= 0.0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.waits_s / self.requests_s))


NO_PACE = ReportedPace()


def fastest_s(paces: Iterable[ReportedPace]) -> float:
    """Returns the seconds of a step of the fastest worker without its waits; 0: none is known."""
    return min((pace.step_s for pace in paces if pace.step_s > 0.0), default=0.0)
