"""How far this worker is in the job's training: what a script seeds its data and schedules with.

Steps follow from what the shards have counted of this worker (`Replica.locate`), so that one that
joins, comes back or was too late is where the others are, in every mode.
"""

from __future__ import annotations

from pscore.errors import ConfigError
from pscore.types import SAMPLES_MAX
from psworker.connection.exchange import Exchange
from psworker.replica.replica import Replica


def require_weight(samples: float) -> float:
    """Returns a weight in the mean that the shards take.

    Raises:
        ConfigError: It is negative, too large, or no number.
    """
    if not 0.0 <= samples <= SAMPLES_MAX:
        raise ConfigError(f"samples is {samples!r}, must be in 0..{SAMPLES_MAX:g}")
    return samples


class Progress:
    """The samples behind a worker, and where its replica is.

    Attributes:
        samples: Weight of a gradient in the mean, as a rule its batch size; of the next step.
        seen: Sum of `samples` over the steps behind this worker. Those that others made before it
            joined, or while it was away, count with `samples` as it was when it learned of them.
    """

    def __init__(self, samples: float, replica: Replica, exchange: Exchange) -> None:
        """Begins at step 0 of the replica; the exchange knows where steps are counted from."""
        self.samples = samples
        self.seen = 0.0
        self._replica = replica
        self._exchange = exchange

    def locate(self, former: int | None = None, seen: float | None = None) -> None:
        """Takes the replica to its step, and counts the samples of the steps since.

        Args:
            former: The step that it was at; None: the one that it has noted.
            seen: Samples that were behind it then; None: those that are noted here.
        """
        former = self._replica.step if former is None else former
        self._replica.locate(self._exchange.origin)
        seen = self.seen if seen is None else seen
        self.seen = max(0.0, seen + (self._replica.step - former) * self.samples)
