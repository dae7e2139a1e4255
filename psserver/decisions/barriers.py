"""The barriers of one job, by name: no worker passes one before all have arrived.

Workers count the rounds of a name, 0, 1, ..., or number them by their next steps; numbers
only grow, and none arrives at a round before it has passed the one before. So workers can wait at
the newest round only, and all earlier ones are open. An open round stays open: workers that join
later are not waited for.

Each worker brings a number, and all of them get the largest: that is how they agree on it. A worker
whose answer was lost asks again, perhaps when others are one round further.

Workers that change their job together, in several messages, meet before and after it: in between
no other worker joins, which would know only a part of the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

BARRIERS_MAX = 1024  # Per job; the oldest is forgotten, and all workers have passed it.


@dataclass(slots=True)
class Barrier:
    """The newest round of one name."""

    number: int = 0
    arrived: dict[int, float] = field(default_factory=dict)  # Ranks, and the numbers they brought.
    is_open: bool = False
    former: float = 0.0  # Largest number of the round before.
    former_number: int = -1  # Number of that round.
    holds: bool = False  # Whether no worker joins between this round and the next of any barrier.
    excused: set[int] = field(default_factory=set)  # Ranks that do not come to this round.

    def missing(self, expected: Iterable[int], *, is_short: bool = False) -> list[int]:
        """Returns the expected ranks that have not arrived; opens the round if there are none.

        Args:
            expected: Ranks of the workers that are live or have not joined yet.
            is_short: Whether the job waits for more workers than those: then nothing opens.
        """
        if self.is_open:
            return []
        there = self.arrived.keys() | self.excused
        missing = [rank for rank in expected if rank not in there]
        self.is_open = not (missing or is_short)
        return missing

    @property
    def largest(self) -> float:
        """The largest number that the workers have brought."""
        return max(self.arrived.values(), default=0.0)

    @property
    def next_round(self) -> int:
        """The first round of a worker that joins now."""
        return self.number + self.is_open


@dataclass(slots=True)
class Barriers:
    """The barriers of a job. A state machine; the expected workers are an argument."""

    by_name: dict[str, Barrier] = field(default_factory=dict)
    # By name and rank: rounds from which a worker was excused since it joined. It does not know.
    skipped: Counter[tuple[str, int]] = field(default_factory=Counter)
    holds: bool = False  # Whether no worker joins: the round that opened last holds.

    def arrive(
        self, name: str, number: int, rank: int, value: float = 0.0, *, holds: bool = False
    ) -> Barrier | None:
        """Records that `rank` has arrived at round `number`; None if all have passed that round.

        Args:
            value: The number that it brings, 0 or more.
            holds: Whether no worker joins from then on until a round opens again.
        """
        barrier, number = self.by_name.get(name), number + self.skipped[name, rank]
        if barrier is None:
            while len(self.by_name) >= BARRIERS_MAX:
                del self.by_name[next(iter(self.by_name))]
            barrier = self.by_name[name] = Barrier(number)
        if number < barrier.number:
            return None
        if number > barrier.number:
            barrier = Barrier(number, former=barrier.largest, former_number=barrier.number)
            self.by_name[name] = barrier
        if not barrier.is_open:
            barrier.arrived[rank] = value
            barrier.holds |= holds
        return barrier

    def withdraw(self, name: str, number: int, rank: int) -> bool:
        """Forgets that `rank` waits at round `number`; returns whether it may pass that round."""
        barrier, number = self.by_name.get(name), number + self.skipped[name, rank]
        if barrier is None or number > barrier.number:
            return False
        if number == barrier.number and not barrier.is_open:
            barrier.arrived.pop(rank, None)
            return False
        return True

    def excuse(self, name: str, number: int, rank: int, absent: Iterable[int]) -> None:
        """Records ranks that do not come to round `number`, at which `rank` is."""
        barrier, number = self.by_name.get(name), number + self.skipped[name, rank]
        if barrier is not None and number == barrier.number and not barrier.is_open:
            new = set(absent) - barrier.arrived.keys() - barrier.excused
            barrier.excused |= new
            self.skipped.update((name, one) for one in new)

    def forget(self, rank: int) -> None:
        """Forgets that the former worker of a rank waits at rounds which are not open."""
        for name, barrier in self.by_name.items():
            self.skipped.pop((name, rank), None)
            barrier.excused.discard(rank)
            if not barrier.is_open:
                barrier.arrived.pop(rank, None)

    def begin_again(self) -> None:
        """Forgets the workers of a former life that wait at rounds which are not open."""
        for barrier in self.by_name.values():
            if not barrier.is_open:
                barrier.arrived.clear()
                barrier.holds = False
        self.holds = False

    def agreed(self, name: str, number: int) -> float:
        """Returns the largest number that workers have brought to an open round; 0 if unknown."""
        barrier = self.by_name.get(name)
        if barrier is None:
            return 0.0
        known = {barrier.former_number: barrier.former, barrier.number: barrier.largest}
        return known.get(number, 0.0)

    def newest(self, name: str) -> int:
        """Returns the number of the newest round of a barrier at which a worker has arrived."""
        return self.by_name[name].number

    def next_rounds(self) -> dict[str, int]:
        """Returns the first round of each name for a worker that joins now."""
        return {name: barrier.next_round for name, barrier in self.by_name.items()}
