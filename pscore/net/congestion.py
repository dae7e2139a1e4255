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
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pscore.net.followed import Followed

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
        FOLLOWED.add(connection, FarChoice(usual, time.monotonic() + FOLLOW_S))


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


@dataclass(frozen=True, slots=True)
class FarChoice:
    """The system's choice, for a connection that has had no short round trip by a time."""

    usual: bytes
    until_s: float  # A time of the monotonic clock.


def look(waiting: Mapping[socket.socket, FarChoice]) -> list[socket.socket]:
    """Returns the connections for which there is nothing more to look for; makes the choice."""
    time.sleep(LOOK_S)
    decided = []
    for connection, choice in waiting.items():
        if is_far(connection):
            if time.monotonic() < choice.until_s:
                continue
            _use(connection, choice.usual)
        decided.append(connection)
    return decided


FOLLOWED = Followed[FarChoice]("congestion", look)
