"""A clock that stands still while the process is stopped."""

import subprocess
import sys

import pytest

from pscore.awake import LATE_S, TICK_S, AwakeClock
from pscore.errors import ThreadError


class Time:
    """A clock whose hands a test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def read_s(self) -> float:
        return self.now_s


def test_time_counts_while_ticks_come() -> None:
    real = Time()
    clock = AwakeClock(real.read_s)
    for number in range(100):
        assert clock.read_s() == pytest.approx(number * TICK_S)
        real.now_s += TICK_S
        clock.tick()


def test_of_the_time_in_which_the_process_was_stopped_a_moment_counts() -> None:
    real = Time()
    clock = AwakeClock(real.read_s)
    real.now_s += 3600.0
    assert clock.read_s() == LATE_S
    clock.tick()
    real.now_s += TICK_S
    assert clock.read_s() == LATE_S + TICK_S


def test_without_its_thread_all_time_counts() -> None:
    """Else a limit would never be reached."""
    real = Time()
    clock = AwakeClock(real.read_s)
    clock.count_all(ThreadError("a bug"))
    real.now_s += 3600.0
    assert clock.read_s() == 3600.0


FORKED = """
import os, time
from pscore.awake import LATE_S, awake_s
begin_s = awake_s()
child = os.fork()
time.sleep(LATE_S + 1.0)
if child == 0:
    os._exit(awake_s() > LATE_S)
raise SystemExit(os.waitpid(child, 0)[1] or awake_s() <= begin_s + LATE_S)
"""


def test_the_clock_of_a_process_runs_and_that_of_its_child_begins_again() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True)
