"""A limit of bytes per second that several connections share.

Each takes turns of some bytes, in the order in which they ask; a turn begins when those before it
have had their time. So a connection that is alone has the whole rate, and several have equal parts,
with bursts of a few milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TURN_S = 5e-3  # Time of one turn at the full rate.
TURN_NBYTES_MIN, TURN_NBYTES_MAX = 16 << 10, 1 << 20
LATE_S = 20e-3  # Time that threads which woke up late may make good.


class SharedRate:
    """A rate for all who reserve turns of it; used from any thread.

    Attributes:
        turn_nbytes: The most bytes of one turn.
    """

    def __init__(self, nbytes_per_s: int, now: Callable[[], float] = time.monotonic) -> None:
        """Limits to `nbytes_per_s`; 0: to nothing.

        Args:
            now: Returns the time in seconds, of any beginning.
        """
        wanted = int(nbytes_per_s * TURN_S)
        self.turn_nbytes = max(TURN_NBYTES_MIN, min(wanted, TURN_NBYTES_MAX))
        self._rate, self._now = nbytes_per_s, now
        self._lock = threading.Lock()
        self._free_s = now()  # When all turns so far are over.

    def reserve(self, nbytes: int) -> float:
        """Reserves a turn of `nbytes`; returns the seconds until it begins."""
        if not self._rate:
            return 0.0
        with self._lock:
            now_s = self._now()
            begin_s = max(self._free_s, now_s - LATE_S)
            self._free_s = begin_s + nbytes / self._rate
            return max(0.0, begin_s - now_s)
