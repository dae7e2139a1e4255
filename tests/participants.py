"""Participants of a table as a list that a test changes."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Listed:
    """The workers in a list; elastic if there is a least number of them."""

    live: Callable[[], list[int]]
    num_workers: int
    least_of: Callable[[], int] | None = None

    @property
    def is_elastic(self) -> bool:
        return self.least_of is not None

    def ranks(self) -> list[int]:
        return self.live()

    def least(self) -> int:
        return 0 if self.least_of is None else self.least_of()
