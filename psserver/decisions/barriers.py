"""The barriers of one job, by name: everybody has to arrive before anybody goes on.

Workers count the rounds of a name, 0, 1, ..., and none goes to a round before it has come through
the one before. So only the newest round of a name can be waited at, and all earlier ones are open.
Once open, a round stays open: who joins later was not meant.

Each worker brings a number along, and all of them get the largest: that is how they agree on it. A
worker that asks again, because the answer was lost, may come when others are one round further.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

BARRIERS_MAX = 1024  # Per job; the oldest is forgotten, and all workers have passed it.


@dataclass(slots=True)
class Barrier:
    """The newest round of one name."""

    number: int = 0
    arrived: set[int] = field(default_factory=set)  # Ranks.
    is_open: bool = False
    largest: float = 0.0  # Of what the workers have brought.
    former: float = 0.0  # The same of the round before.

    def missing(self, expected: Iterable[int], *, is_short: bool = False) -> list[int]:
        """Returns who of those that are expected has not arrived, and opens if nobody is missing.

        Args:
            expected: Ranks; who is there, or yet to come.
            is_short: The job waits for more workers than those: nothing opens.
        """
        missing = [] if self.is_open else [rank for rank in expected if rank not in self.arrived]
        self.is_open |= not (missing or is_short)
        return missing

    @property
    def next_round(self) -> int:
        """The round that a worker which joins now comes to first."""
        return self.number + self.is_open


@dataclass(slots=True)
class Barriers:
    """All of them. A state machine; who is expected is an argument."""

    by_name: dict[str, Barrier] = field(default_factory=dict)

    def arrive(self, name: str, number: int, rank: int, value: float = 0.0) -> Barrier | None:
        """Takes `rank` as having come to round `number`; None if all have come through that.

        Args:
            name: Of the barrier.
            number: Of the round.
            rank: Of the worker.
            value: What it brings along, 0 or more.
        """
        barrier = self.by_name.get(name)
        if barrier is None:
            while len(self.by_name) >= BARRIERS_MAX:
                del self.by_name[next(iter(self.by_name))]
            barrier = self.by_name[name] = Barrier(number)
        if number < barrier.number:
            return None
        if number > barrier.number:
            former = barrier.largest if number == barrier.number + 1 else 0.0
            barrier = self.by_name[name] = Barrier(number, former=former)
        barrier.arrived.add(rank)
        if not barrier.is_open:
            barrier.largest = max(barrier.largest, value)
        return barrier

    def begin_again(self) -> None:
        """Forgets who waits at rounds that are not open: the workers of a former life."""
        for barrier in self.by_name.values():
            barrier.arrived.clear()

    def agreed(self, name: str, number: int) -> float:
        """Returns the largest number that workers have brought to an open round; 0 if unknown."""
        barrier = self.by_name.get(name)
        if barrier is None:
            return 0.0
        return {barrier.number: barrier.largest, barrier.number - 1: barrier.former}.get(
            number, 0.0
        )

    def next_rounds(self) -> dict[str, int]:
        """Returns the round of each name that a worker which joins now comes to first."""
        return {name: barrier.next_round for name, barrier in self.by_name.items()}
