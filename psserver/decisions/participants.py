"""The workers that take part in a table: its steps wait for their pushes."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from pscore.table_names import LEFT_FOR_GOOD
from psserver.decisions.membership import Membership

# Incarnation of a worker, its own number of a change of the mode, and its training step then.
ChangeId = tuple[int, ...]


class Participants(Protocol):
    """The workers that take part in a table; answers follow the membership as it changes."""

    @property
    def num_workers(self) -> int:
        """Workers that the job was made for; the largest number of an elastic job."""

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave while others train."""

    def ranks(self) -> list[int]:
        """Returns the ranks that a step waits for, in order."""

    def resting(self) -> Set[int]:
        """Returns the ranks that push no step before others have come to where they wait."""

    def least(self) -> int:
        """Returns how many of them it takes to count anything; 0: any number."""


class TableParticipants:
    """The workers of a job that take part in one of its tables.

    Attributes:
        num_workers: Workers that the job was made for; the largest number of an elastic job.
        is_elastic: Whether workers may join and leave while others train.
        aside: Workers that wait for a change of the table's mode, by rank: no step waits for them.
            Invariant: none of them pushes to the table before the mode has changed.
    """

    def __init__(self, membership: Membership) -> None:
        """Starts with all workers of the job, those that are yet to come included."""
        self.num_workers, self.is_elastic = membership.num_workers, membership.is_elastic
        self.aside: dict[int, ChangeId] = {}
        self._membership = membership

    def forget(self, rank: int) -> None:
        """Forgets that the former worker of a rank waits for a change; not that it has left."""
        if self.aside.get(rank, ())[1:2] != (LEFT_FOR_GOOD,):
            self.aside.pop(rank, None)

    def ranks(self) -> list[int]:
        """Returns the ranks that a step waits for, in order."""
        ranks = self._membership.expected()
        return [rank for rank in ranks if rank not in self.aside] if self.aside else ranks

    def resting(self) -> Set[int]:
        """Returns the ranks that push no step before others have come to where they wait."""
        return self._membership.resting.keys()

    def least(self) -> int:
        """Returns how many of them it takes to count anything; 0: any number."""
        return 0 if self.aside else self._membership.wanted()
