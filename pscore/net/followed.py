"""Connections that one thread looks at from time to time, while they are open.

A look is a function of a connection. It returns whether it wants to look again: the choice of a
congestion control (congestion.py) ends after some seconds, the size of a send buffer
(send_buffers.py) changes as long as the connection is there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable

from pscore.errors import ThreadError
from pscore.threads import OwnedThread

Look = Callable[[socket.socket], bool]

LOOK_S = 0.25  # From one look to the next.


class Followed:
    """Open connections and their looks; a thread runs while there are any."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts anew in a forked process; its parent still follows the connections of before.

        Another thread may have held the lock at the fork, and no thread of the child would release
        it.
        """
        self._lock = threading.Lock()
        self._entries: list[tuple[weakref.ref[socket.socket], Look]] = []
        self._thread: threading.Thread | None = None

    def add(self, connection: socket.socket, *looks: Look) -> None:
        """Follows a connection, as long as it is open and a look wants to look again."""
        if not looks:
            return
        with self._lock:
            self._entries += [(weakref.ref(connection), look) for look in looks]
            if self._thread is None:
                self._thread = OwnedThread(self._run, "connections", self._give_up)
                self._thread.start()

    def take(self, connection: socket.socket) -> list[Look]:
        """Follows a connection no longer; returns its looks, for another object of the same."""
        with self._lock:
            taken = [look for known, look in self._entries if known() is connection]
            self._entries = [entry for entry in self._entries if entry[0]() is not connection]
        return taken

    def __len__(self) -> int:
        return len(self._entries)

    def _give_up(self, error: ThreadError) -> None:
        """Leaves all connections as they are; the next one starts another thread."""
        with self._lock:
            self._entries.clear()
            self._thread = None

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                self._entries = [entry for entry in self._entries if _looks_again(*entry)]
                if not self._entries:
                    self._thread = None
                    return


def _looks_again(known: weakref.ref[socket.socket], look: Look) -> bool:
    connection = known()
    return connection is not None and connection.fileno() >= 0 and look(connection)


FOLLOWED = Followed()
os.register_at_fork(after_in_child=lambda: FOLLOWED.restart())
