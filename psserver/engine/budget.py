"""A budget of bytes that are under way: received, waiting for their turn, or being sent."""

from __future__ import annotations

import threading

from pscore.errors import LimitError


class Budget:
    """Bytes that are under way in one shard; used from any thread.

    Attributes:
        nbytes: The budget.
        left: The bytes that are not taken.
    """

    def __init__(self, nbytes: int, setting: str = "under_way_mb") -> None:
        """Starts with all bytes free; `setting` is the name of their number, for messages."""
        self._about = f" ({setting})" if setting else ""
        self._lock = threading.Lock()
        self.nbytes = nbytes
        self.left = nbytes

    def take(self, nbytes: int, what: str) -> None:
        """Takes bytes; the caller gives them back.

        Raises:
            LimitError: Fewer are left.
        """
        with self._lock:
            if nbytes > self.left:
                raise LimitError(
                    f"{what} wants {nbytes} bytes under way, {self.left} of {self.nbytes} are "
                    f"left{self._about}"
                )
            self.left -= nbytes

    def give(self, nbytes: int) -> None:
        """Returns bytes to the budget."""
        with self._lock:
            self.left += nbytes
            assert self.left <= self.nbytes
