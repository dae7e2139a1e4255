"""The watch by which the processes of a group notice each other's end."""

import threading
import time

import pytest

from psworker.group import watch
from psworker.group.watch import SILENT_S, TICK_S, Watch
from tests.integration.cluster import wait_until


class Clock:
    """A clock that can be set forward, as it is for a process that was stopped."""

    def __init__(self) -> None:
        self.ahead_s, self.num_asked = 0.0, 0
        self._real = time.monotonic

    def monotonic(self) -> float:
        self.num_asked += 1
        return self._real() + self.ahead_s

    def run(self, num: int) -> None:
        """Waits until it was asked `num` times."""
        last = self.num_asked + num
        wait_until(lambda: self.num_asked >= last)


def test_a_group_whose_host_was_suspended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has heard the others meanwhile, and nobody has ended."""
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "TICK_S", 0.1)
    both = [Watch(0, 2), Watch(1, 2)]
    place = both[0].listen()
    member = threading.Thread(target=both[1].connect, args=(place,))
    member.start()
    both[0].connect(place)
    member.join()
    clock.run(10)
    clock.ahead_s = SILENT_S + 3 * TICK_S
    clock.run(10)
    assert [one.lost for one in both] == ["", ""]
    for one in reversed(both):
        one.leave("over", failed=False)
    for thread in threading.enumerate():
        if thread.name == "group":
            thread.join()
