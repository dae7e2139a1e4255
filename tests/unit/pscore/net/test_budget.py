"""The bytes that may be under way in a process."""

import gc
import threading
from collections.abc import Callable

import pytest

from pscore.errors import LimitError
from pscore.net.budget import Budget, ReceiveBuffers


class Collecting:
    """A name whose text takes a garbage collection, as any allocation may."""

    def __str__(self) -> str:
        gc.collect()
        return "a push"


def within(limit_s: float, call: Callable[[], object]) -> bool:
    """Returns whether a call ends in time; it runs in a thread, which may hang for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def test_a_buffer_that_is_collected_under_the_lock_gives_its_bytes_back() -> None:
    budget = Budget(100)
    cycle: list[object] = [ReceiveBuffers(budget).take(60, "a pull")]
    cycle.append(cycle)
    del cycle

    def ask() -> None:
        with pytest.raises(LimitError, match="a push"):
            budget.take(60, Collecting())  # type: ignore[arg-type]

    assert within(10.0, ask)
    assert budget.left == 100
