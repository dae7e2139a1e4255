"""The position of this worker in the job's training, with which a script seeds data and schedules.

Steps follow from the pushes that the shards have counted (`Replica.locate`), so that a worker that
joins, rejoins or was too late is at the same step as the others, in every mode.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

from pscore.errors import ConfigError
from pscore.types import SAMPLES_MAX
from psworker.connection.exchange.exchange import Exchange
from psworker.replica.replica import Replica


def require_weight(samples: Any) -> float:
    """Returns a weight in the mean that the shards accept.

    Raises:
        ConfigError: It is negative, too large, or not a number.
    """
    weight = float(samples) if isinstance(samples, SupportsFloat) else -1.0
    if not 0.0 <= weight <= SAMPLES_MAX:
        raise ConfigError(f"samples is {samples!r}, must be in 0..{SAMPLES_MAX:g}")
    return weight


class TrainingProgress:
    """The samples that a worker has trained on, and its replica's step."""

    def __init__(self, samples: float, replica: Replica, exchange: Exchange) -> None:
        """Starts at step 0 of the replica; the exchange knows the origin of the count."""
        self.samples = samples  # Weight of the next gradient in the mean, usually its batch size.
        # Sum of `samples` over the steps behind this worker. Steps that others made before it
        # joined, or while it was away, count with the value of `samples` at that time; those that
        # it leaves out in a round by speed do not count.
        self.seen = 0.0
        self._replica = replica
        self._exchange = exchange

    def locate(self, former: int | None = None, seen: float | None = None) -> None:
        """Sets the replica's step, and counts the samples of the steps since.

        Args:
            former: The previous step; None: the replica's.
            seen: Samples seen at that step; None: those counted here.
        """
        former = self._replica.step if former is None else former
        self._replica.locate(self._exchange.origin)
        seen = self.seen if seen is None else seen
        steps = self._replica.step - former
        if self._replica.left_out:
            steps = max(0, steps - self._replica.left_out)
        self.seen = max(0.0, seen + steps * self.samples)

    def behind(self, *, at_round: bool) -> tuple[int, float]:
        """Returns the steps and the samples behind the weights that a script saves.

        Args:
            at_round: Whether these are the global weights: in the middle of a round they are those
                of its beginning, and its steps so far are not in them.
        """
        replica = self._replica
        if not at_round or not replica.num_inner:
            return replica.step, self.seen
        seen = max(0.0, self.seen - replica.round.open_samples)
        return replica.step - replica.num_inner, seen
