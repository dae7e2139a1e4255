"""Connections that one thread looks at from time to time, while any is worth a look.

The kernel learns what a path is like only from the bytes that go over it. So two things are decided
after a connection was made: its congestion control (congestion.py) and the size of its window
(receive_windows.py).
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from pscore.errors import ThreadError
from pscore.threads import OwnedThread

T = TypeVar("T")
Look = Callable[[Mapping[socket.socket, T]], Collection[socket.socket]]


class Followed(Generic[T]):
    """Connections with a value each, and the thread that looks at them."""

    def __init__(self, name: str, look: Look[T]) -> None:
        """Starts no thread yet.

        Args:
            name: The name of the thread after `follow-` (ARCHITECTURE.md, threads).
            look: A function that waits for its next time, gets the open connections, and returns
                those that need no further look. A connection may be closed meanwhile.
        """
        self._name = name
        self._look = look
        self.restart()
        os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        """Starts anew in a forked process; its parent still follows the connections of before.

        Another thread may have held the lock at the fork, and no thread of the child would release
        it.
        """
        self._lock = threading.Lock()
        self._values: weakref.WeakKeyDictionary[socket.socket, T] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def add(self, connection: socket.socket, value: T) -> None:
        """Follows a connection, as long as it is open and there is room for a thread."""
        with self._lock:
            if self._thread is None:
                thread = OwnedThread(self._run, f"follow-{self._name}", self._give_up)
                try:
                    thread.start()
                except RuntimeError:  # The connection stays as it is, and is served all the same.
                    return
                self._thread = thread
            self._values[connection] = value

    def take(self, connection: socket.socket) -> T | None:
        """Follows a connection no longer; returns its value, None if it was not followed."""
        with self._lock:
            return self._values.pop(connection, None)

    def __len__(self) -> int:
        return len(self._values)

    def _give_up(self, error: ThreadError) -> None:
        """Leaves all connections as they are; the next one starts another thread."""
        with self._lock:
            self._values.clear()
            self._thread = None

    def _run(self) -> None:
        while self._has_more():
            with self._lock:
                values = dict(self._values)
            done = self._look(values)
            with self._lock:
                for connection in done:
                    self._values.pop(connection, None)

    def _has_more(self) -> bool:
        """Forgets closed connections; returns whether others are left, else the thread ends."""
        with self._lock:
            for connection in [each for each in self._values if each.fileno() < 0]:
                del self._values[connection]
            if not self._values:
                self._thread = None
            return self._thread is not None
