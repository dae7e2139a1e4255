"""Threads whose owners learn of the error that ends them."""

import threading

import pytest

from pscore.errors import ThreadError
from pscore.threads import OwnedThread


def test_the_owner_learns_of_the_error_before_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: order.append(failed.exc_value))
    problem = ValueError("no such number")

    def body() -> None:
        raise problem

    thread = OwnedThread(body, "data-pull", order.append)
    assert thread.daemon
    thread.start()
    thread.join(200.0)
    error, printed = order
    assert printed is problem
    assert isinstance(error, ThreadError)
    assert str(error).startswith("thread 'data-pull' of this process ended by ValueError: no such")
    assert error.__cause__ is problem


def test_a_thread_that_comes_to_its_end_reports_nothing() -> None:
    failures: list[ThreadError] = []
    done = threading.Event()
    thread = OwnedThread(done.set, "data-pull", failures.append)
    thread.start()
    thread.join(200.0)
    assert done.is_set()
    assert failures == []
