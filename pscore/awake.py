"""A clock that stands still while this process is stopped.

A process that is stopped (`docker pause`, a suspended virtual machine, a debugger) hears nobody,
and the messages of healthy processes wait in its sockets. So the silence of others is measured by
this clock.
"""

from __future__ import annotations

import os
import threading
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
        """Starts at 0 s."""
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


class _OwnClock:
    """The clock of this process, whose thread starts when it is first asked."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._clock: AwakeClock | None = None

    def forget(self) -> None:
        """Begins again, in a child of a fork: threads do not go on there."""
        self.__init__()  # type: ignore[misc]

    def read_s(self) -> float:
        clock = self._clock
        if clock is None:
            with self._starting:
                clock = self._clock = self._clock or AwakeClock()
                OwnedThread(clock.run, "awake", clock.count_all).start()
        return clock.read_s()


_own = _OwnClock()
os.register_at_fork(after_in_child=_own.forget)


def awake_s() -> float:
    """Returns the seconds of this process, without those in which it was stopped."""
    return _own.read_s()
