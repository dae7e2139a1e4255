"""Connections that a thread looks at from time to time."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from pscore.net import followed

DEADLINE_S = 200.0


@pytest.fixture
def all_followed(monkeypatch: pytest.MonkeyPatch) -> followed.Followed:
    """Gives an empty list of followed connections, with frequent looks."""
    monkeypatch.setattr(followed, "LOOK_S", 0.01)
    monkeypatch.setattr(followed, "FOLLOWED", followed.Followed())
    return followed.FOLLOWED


def wait_until_empty(connections: followed.Followed) -> None:
    """Waits until no connection is followed any more."""
    deadline_s = time.monotonic() + DEADLINE_S
    while len(connections):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_look_is_repeated_until_it_wants_no_more(all_followed: followed.Followed) -> None:
    answers = iter([True, True, False])
    with socket.socket() as connection:
        all_followed.add(connection, lambda _: next(answers))
        wait_until_empty(all_followed)
    assert next(answers, None) is None


def test_a_closed_connection_is_not_followed(all_followed: followed.Followed) -> None:
    with socket.socket() as connection:
        all_followed.add(connection, lambda _: True)
    wait_until_empty(all_followed)


def test_the_looks_of_a_connection_go_to_its_successor(all_followed: followed.Followed) -> None:
    def one(_: socket.socket) -> bool:
        return True

    def other(_: socket.socket) -> bool:
        return True

    with socket.socket() as connection, socket.socket() as another:
        all_followed.add(connection, one, other)
        all_followed.add(another, one)
        assert all_followed.take(connection) == [one, other]
        assert all_followed.take(connection) == []
        all_followed.add(connection)  # Without looks there is nothing to follow.
        assert len(all_followed) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_look_has_failed_the_next_connection_is_followed(
    all_followed: followed.Followed,
) -> None:
    def fails(_: socket.socket) -> bool:
        raise RuntimeError("injected")

    with socket.socket() as connection:
        all_followed.add(connection, fails)
        wait_until_empty(all_followed)
        all_followed.add(connection, lambda _: False)
        wait_until_empty(all_followed)


def test_a_process_forked_while_another_thread_looks_still_follows(
    all_followed: followed.Followed,
) -> None:
    """The lock of that thread is free in the child."""
    is_looking, may_go_on = threading.Event(), threading.Event()

    def look(_: socket.socket) -> bool:
        is_looking.set()
        return may_go_on.wait(DEADLINE_S)

    with socket.socket() as connection:
        all_followed.add(connection, look)
        assert is_looking.wait(DEADLINE_S)
        if (child := os.fork()) == 0:
            signal.alarm(int(DEADLINE_S))  # Ends it if it waits for a lock that nobody releases.
            code = 1
            try:
                were_followed = all_followed.take(connection)
                all_followed.add(connection, lambda _: False)
                wait_until_empty(all_followed)
                code = len(were_followed)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        may_go_on.set()
        assert os.waitstatus_to_exitcode(status) == 0
        assert all_followed.take(connection) == [look]
