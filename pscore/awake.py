"""A clock that stands still while this process is stopped.

A process that is stopped (`docker pause`, a suspended virtual machine, a debugger) hears nobody,
and the messages of healthy processes wait in its sockets. So the silence of others is measured by
this clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pscore.errors import ThreadError
from pscore.threads import OwnedThread

TICK_S = 0.5
LATE_S = 2.0  # A tick that comes later shows that the process was stopped.


class AwakeClock:
    """Seconds in which this process was not stopped, as gaps between ticks show it.

    >>> now = [100.0]
    >>> clock = AwakeClock(now=lambda: now[0])
    >>> now[0] += 1000.0
    >>> clock.tick()
    >>> now[0] += 0.5
    >>> clock.read_s()
    2.5
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._late_s = LATE_S
        self._mark = 0.0, now()  # Both times of the last tick, of this clock and of `now`.

    def read_s(self) -> float:
        """Returns the time in seconds; may be called by any thread."""
        awake_s, ticked_s = self._mark
        return awake_s + min(self._now() - ticked_s, self._late_s)

    def tick(self) -> None:
        """Notes that the process runs; called by one thread, every `TICK_S` or so."""
        self._mark = self.read_s(), self._now()

    def run(self) -> None:
        """Ticks without end."""
        while True:
            time.sleep(TICK_S)
            self.tick()

    def count_all(self, error: ThreadError) -> None:
        """Counts all time from now on, also that in which the process is stopped: no tick comes."""
        self._late_s = float("inf")


_clocks: dict[int, AwakeClock] = {}  # By process: a child of a fork has no thread of its parent's.


def awake_s() -> float:
    """Returns the seconds of this process, without those in which it was stopped."""
    own = os.getpid()
    clock = _clocks.get(own)
    if clock is None:
        made = AwakeClock()
        clock = _clocks.setdefault(own, made)
        if clock is made:  # If two threads ask at once, one starts the ticks.
            OwnedThread(clock.run, "awake", clock.count_all).start()
    return clock.read_s()
