"""The congestion control of data connections: without pacing between hosts that are near.

A host has several such connections, which send in bursts. When one of them pauses, a window lets
the others use its share at once. A paced rate (BBR) needs many round trips to rise: on four hosts
links were idle for a fifth of the time, and one such connection among 24 made each step a fifth
longer. So within a data centre a paced congestion control is left out,
unless the route of the connection asks for it.

A connection begins without pacing, because pacing cannot be undone: a connection that was made with
it is paced to its end. The host is near if one round trip is short. While links are full of other
bytes, the first ones are long to any host, so a connection is followed for some seconds before it
gets the system's own choice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pscore.errors import ThreadError
from pscore.threads import OwnedThread

SYSTEM = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # The system's own choice.
UNPACED = b"reno"  # Part of every Linux, and by default open to every user.
PACED = b"bbr"  # Begin of the names of congestion controls that pace.
NEAR_US = 5000  # Longest of the shortest round trips within a data centre, in microseconds.
LOOK_S = 0.25  # From one look at the round trips to the next.
FOLLOW_S = 5.0  # A connection that has had no short one by then goes far.
NAME_NBYTES = 16
RTT_OFFSET, LEAST_OFFSET = 68, 148  # `tcpi_rtt`, `tcpi_min_rtt` in `tcp_info`.
INFO_NBYTES = LEAST_OFFSET + 4


class Options(Protocol):
    """A socket whose options are read."""

    def getsockopt(self, level: int, option: int, nbytes: int, /) -> bytes:
        """Returns the value of an option."""


def system_paces() -> bool:
    """Returns whether connections to far hosts are paced, by this system's own choice."""
    try:
        return SYSTEM.read_bytes().startswith(PACED)
    except OSError:
        return False


def defer_pacing(endpoint: socket.socket) -> bytes:
    """Selects a congestion control without pacing, until `choose` knows the host of the peer.

    Within one host pacing is useless work: the kernel sets a timer for each packet.

    Returns:
        The system's own choice; empty if the system allows no other.
    """
    try:
        usual = name_of(endpoint)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
    except OSError:
        return b""
    return usual


def choose(connection: socket.socket, usual: bytes) -> None:
    """Gives a connection the system's congestion control, unless that paces and the host is near.

    Args:
        connection: TCP to another host, after `defer_pacing`.
        usual: Its result.
    """
    if not usual or name_of(connection) != UNPACED:  # Else its route has its own.
        return
    if not usual.startswith(PACED):
        _use(connection, usual)
    elif is_far(connection):
        FOLLOWED.add(connection, usual)


def name_of(endpoint: socket.socket) -> bytes:
    """Returns the name of a connection's congestion control."""
    name = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_NBYTES)
    return name.rstrip(b"\0")


def is_far(connection: Options) -> bool:
    """Returns whether the host of the peer is outside this data centre, as far as is known."""
    return least_us(connection) > NEAR_US


def least_us(connection: Options) -> int:
    """Returns the shortest round trip that the kernel has measured so far, in microseconds."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_NBYTES)
    except OSError:
        return sys.maxsize
    start = LEAST_OFFSET if len(info) == INFO_NBYTES else RTT_OFFSET  # An old kernel has the last.
    return int.from_bytes(info[start : start + 4], sys.byteorder)


def _use(connection: socket.socket, usual: bytes) -> None:
    with contextlib.suppress(OSError):  # Only root may choose it.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, usual)


@dataclass(slots=True)
class _Entry:
    connection: weakref.ref[socket.socket]
    usual: bytes
    until_s: float  # A time of the monotonic clock.

    def is_decided(self) -> bool:
        """Returns whether there is nothing more to look for; makes the choice then."""
        connection = self.connection()
        if connection is None or connection.fileno() < 0 or not is_far(connection):
            return True
        if time.monotonic() < self.until_s:
            return False
        _use(connection, self.usual)
        return True


class Followed:
    """Connections whose round trips have been long so far; a thread looks at them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts anew in a forked process; its parent still follows the connections of before.

        Another thread may have held the lock at the fork, and no thread of the child would release
        it.
        """
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._thread: threading.Thread | None = None

    def add(self, connection: socket.socket, usual: bytes) -> None:
        """Follows a connection, as long as it is open."""
        entry = _Entry(weakref.ref(connection), usual, time.monotonic() + FOLLOW_S)
        with self._lock:
            self._entries.append(entry)
            if self._thread is None:
                self._thread = OwnedThread(self._run, "congestion", self._give_up)
                self._thread.start()

    def take(self, connection: socket.socket) -> bytes:
        """Follows a connection no longer; returns its `usual`, empty if it was not followed."""
        with self._lock:
            for entry in self._entries:
                if entry.connection() is connection:
                    self._entries.remove(entry)
                    return entry.usual
        return b""

    def __len__(self) -> int:
        return len(self._entries)

    def _give_up(self, error: ThreadError) -> None:
        """Leaves all connections without pacing; the next one starts another thread."""
        with self._lock:
            self._entries.clear()
            self._thread = None

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                self._entries = [entry for entry in self._entries if not entry.is_decided()]
                if not self._entries:
                    self._thread = None
                    return


FOLLOWED = Followed()
os.register_at_fork(after_in_child=lambda: FOLLOWED.restart())
