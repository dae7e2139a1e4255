"""Participants of a table as a list that a test changes."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Listed:
    """The workers in a list; elastic if there is a least number of them."""

    live: Callable[[], list[int]]
    num_workers: int
    least_of: Callable[[], int] | None = None
    at_barrier: set[int] = field(default_factory=set)

    @property
    def is_elastic(self) -> bool:
        return self.least_of is not None

    def ranks(self) -> list[int]:
        return self.live()

    def resting(self) -> set[int]:
        return self.at_barrier

    def least(self) -> int:
        return 0 if self.least_of is None else self.least_of()
