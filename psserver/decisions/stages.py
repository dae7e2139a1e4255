"""The work of a pipeline's worker, as its heartbeats report it; no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
