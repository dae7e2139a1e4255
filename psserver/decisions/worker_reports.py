"""The reports of a worker's heartbeats: its pace, its part in a pipeline, its values; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pscore.types import REPORTED_ADDED, REPORTED_LENGTH_MAX, REPORTED_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPace:
    """Sums since a worker has joined; a reader takes the difference of two moments.

    The last two are of this moment.
    """

    num_steps: int = 0  # Steps that followed another.
    steps_s: float = 0.0  # Seconds of these steps, each from the end of the one before.
    waits_s: float = 0.0  # Seconds in which it waited for answers of shards or workers.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """A replica of a stage at one moment."""

    stage: int
    replica: int
    minibatch: int  # Minibatches of the training before the next one here.
    version: int  # Updates of the weights since the worker began.
    in_flight: int  # Minibatches between forward and backward.
    activation_nbytes: int  # Kept for their backwards.
    versions_held: int  # Weight versions in memory.
    waits_s: float  # Seconds in which it waited for its neighbours; only rises.

    @property
    def is_valid(self) -> bool:
        """Whether a worker that keeps the rules can have sent it."""
        return math.isfinite(self.waits_s) and self.waits_s >= 0.0


def accepted(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values that may be shown, in the order of their names.

    Left out are values that are not finite, names that are no identifiers in ASCII or too long, and
    any beyond the largest number of values: a worker that keeps the rules sends none of these.
    """
    good = {
        name: value
        for name, value in sorted(values.items())
        if math.isfinite(value)
        and len(name) <= REPORTED_LENGTH_MAX
        and name.isascii()
        and name.isidentifier()
    }
    return dict(list(good.items())[: REPORTED_MAX + REPORTED_ADDED])
