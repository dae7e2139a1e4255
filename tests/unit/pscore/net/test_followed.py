"""Connections that one thread looks at from time to time."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping

import pytest

from pscore.net.followed import Followed
from tests.integration.command import eventually

DEADLINE_S = 200.0


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """Gives one end of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield one


def is_over() -> bool:
    """Returns whether no thread looks any more."""
    return all(each.name != "follow-look" for each in threading.enumerate())


def test_a_connection_is_looked_at_until_a_look_has_done_with_it(connection: socket.socket) -> None:
    seen = []

    def look(values: Mapping[socket.socket, str]) -> Collection[socket.socket]:
        seen.append(dict(values))
        return list(values) if len(seen) == 3 else ()

    followed = Followed[str]("look", look)
    followed.add(connection, "value")
    eventually(lambda: not len(followed))
    assert seen == 3 * [{connection: "value"}]
    eventually(is_over)
    followed.add(connection, "again")  # The next connection starts another thread.
    eventually(lambda: len(seen) > 3)
    assert followed.take(connection) == "again"
    assert followed.take(connection) is None
    eventually(is_over)


def test_a_closed_connection_is_followed_no_longer(connection: socket.socket) -> None:
    looks = threading.Semaphore(0)

    def look(values: Mapping[socket.socket, None]) -> Collection[socket.socket]:
        looks.release()
        return ()

    followed = Followed[None]("look", look)
    followed.add(connection, None)
    assert looks.acquire(timeout=DEADLINE_S)
    connection.close()
    eventually(is_over)
    assert not len(followed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_look_that_raises_leaves_all_as_they_are_and_the_next_connection_is_followed(
    connection: socket.socket,
) -> None:
    looks = []

    def look(values: Mapping[socket.socket, None]) -> Collection[socket.socket]:
        looks.append(values)
        if len(looks) == 1:
            raise ValueError("a bug")
        return list(values)

    followed = Followed[None]("look", look)
    followed.add(connection, None)
    eventually(is_over)
    assert not len(followed)
    followed.add(connection, None)
    eventually(lambda: not len(followed))
    assert len(looks) == 2


def test_without_room_for_a_thread_a_connection_stays_as_it_is(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who follows serves the connection: an error would end a shard."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    followed = Followed[None]("look", list)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        followed.add(connection, None)
    assert not len(followed)
    followed.add(connection, None)  # There is room again.
    eventually(lambda: not len(followed))
    eventually(is_over)


class Slow(socket.socket):
    """A socket that holds whoever asks for its number, in the process that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = os.getpid()
        self.asked, self.may_go_on = threading.Event(), threading.Event()

    def fileno(self) -> int:
        if os.getpid() == self.owner and threading.current_thread().name == "follow-look":
            self.asked.set()
            self.may_go_on.wait(DEADLINE_S)
        return super().fileno()


def test_a_process_forked_while_another_thread_holds_the_lock_follows_its_own_connections() -> None:
    followed = Followed[str]("look", list)
    with Slow() as connection:
        followed.add(connection, "parent")
        assert connection.asked.wait(DEADLINE_S)  # That thread has the lock now.
        if (child := os.fork()) == 0:
            signal.alarm(int(DEADLINE_S))  # Ends it if it waits for a lock that nobody releases.
            code = 1
            try:
                was_followed = followed.take(connection)
                followed.add(connection, "child")
                eventually(lambda: not len(followed))
                code = int(was_followed is not None)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(followed) == 1
        connection.may_go_on.set()
        eventually(is_over)
