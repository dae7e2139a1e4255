"""How far this worker is in the job's training: what a script seeds its data and schedules with.

Steps follow from what the shards have counted of this worker (`Replica.locate`), so that one that
joins, comes back or was too late is where the others are, in every mode.
"""

from __future__ import annotations

from pscore.types import Origin
from psworker.replica import Replica


class Progress:
    """The samples behind a worker, and where its replica is.

    Attributes:
        samples: Weight of a gradient in the mean, as a rule its batch size; of the next step.
        seen: Sum of `samples` over the steps behind this worker. Those that others made before it
            joined, or while it was away, count with `samples` as it was when it learned of them.
    """

    def __init__(self, samples: float) -> None:
        """Begins at step 0."""
        self.samples = samples
        self.seen = 0.0

    def locate(
        self,
        replica: Replica,
        origin: Origin,
        former: int | None = None,
        seen: float | None = None,
    ) -> None:
        """Takes a replica to its step, and counts the samples of the steps since.

        Args:
            replica: It.
            origin: Where steps are counted from.
            former: The step that it was at; None: the one that it has noted.
            seen: Samples that were behind it then; None: those that are noted here.
        """
        former = replica.step if former is None else former
        replica.locate(origin)
        seen = self.seen if seen is None else seen
        self.seen = max(0.0, seen + (replica.step - former) * self.samples)
