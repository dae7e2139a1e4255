"""Windows of connections to near hosts: the bytes that a slow link delivers in milliseconds.

A window of TCP grows until a switch on the way has no room left and drops packets. A host has a
connection for pushes and one for pulls to each shard: together they fill tens of milliseconds of a
slow link's queue, and a small push waits there behind large pulls. So once packets were dropped, a
receiver allows its connections together the bytes that its link delivers in one round trip and
`AHEAD_S`. Their senders still find room in their own buffers, and need not be awake when the next
packet may leave.

The rate of the link is the highest that came lately, over all connections of the process. A link
that was fast once needs no further look.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pscore.net.congestion import NEAR_US, Options, least_us
from pscore.net.followed import Followed

LOOK_S = 0.25  # From one look to the next.
BURST_S = 0.02  # Time over which a rate is measured, within the transfer of one step.
AHEAD_S = 5e-3  # Time for which all connections together may fill the link, beyond a round trip.
LEAST_NBYTES = 16 << 10  # Of a window, a few packets: less would leave the link idle.
FAST = 20e6  # Bytes per second of a link that needs no limit, once they were seen.
BUSY_NBYTES = 32 << 10  # Of a moment in which a step's bytes came, and not only small messages.
FORGET = 0.99  # Share of a rate that is left after a look with a lower one.
# `tcpi_rcv_mss`, `tcpi_data_segs_in`, `tcpi_rcv_ooopack` in `tcp_info`. (`tcpi_bytes_received` is
# no measure of a rate: the packet that fills a gap adds to it all that have come behind the gap.)
SIZE_OFFSET, SEGMENTS_OFFSET, GAPS_OFFSET = 20, 152, 224
INFO_NBYTES = GAPS_OFFSET + 4
UNLIMITED_NBYTES = 1 << 30


def follow(connection: socket.socket) -> None:
    """Fits the window of a TCP connection to another host, until the link turns out to be fast."""
    if not LINK.is_fast:
        FOLLOWED.add(connection, ReceiveWindow())


@dataclass(slots=True)
class ReceiveWindow:
    """The window of a connection, in bytes; None: the kernel's own."""

    nbytes: int | None = None


@dataclass(slots=True)
class NearLink:
    """The link of this process, as far as a receiver has seen it."""

    rate: float = 0.0  # Bytes per second.
    has_dropped: bool = False
    is_fast: bool = False

    def note(self, nbytes: int, seconds: float, gaps: int) -> None:
        """Notes the bytes of a moment, and the number of packets that came behind a gap so far."""
        if nbytes >= BUSY_NBYTES:
            self.rate = max(nbytes / seconds, FORGET * self.rate)
        self.is_fast = self.is_fast or self.rate >= FAST
        self.has_dropped = self.has_dropped or gaps > 0

    def window(self, trip_s: float, number: int) -> int | None:
        """Returns the bytes that one connection may have under way; None: without a limit.

        Args:
            trip_s: Its shortest round trip, in seconds.
            number: The number of connections that share the link.
        """
        if not self.has_dropped or self.is_fast:
            return None
        return max(LEAST_NBYTES, int(self.rate * (trip_s + AHEAD_S / number)))


class Arrived(NamedTuple):
    """The segments with data that have come over a connection; all 0 where no kernel tells.

    Attributes:
        number: Number of segments.
        nbytes: Bytes of the usual one.
        gaps: Number of those that came behind a gap.
    """

    number: int = 0
    nbytes: int = 0
    gaps: int = 0


def arrived(connection: Options) -> Arrived:
    """Returns the segments that have come over a connection."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_NBYTES)
    except OSError:  # It is being closed.
        return Arrived()
    if len(info) < INFO_NBYTES:
        return Arrived()
    offsets = SEGMENTS_OFFSET, SIZE_OFFSET, GAPS_OFFSET
    return Arrived(*(struct.unpack_from("=I", info, offset)[0] for offset in offsets))


def limit(connection: socket.socket, window: ReceiveWindow, nbytes: int | None) -> None:
    """Sets a window; again at each look, since the kernel raises it with its receive buffer."""
    if nbytes is None and window.nbytes is None:
        return
    window.nbytes = nbytes
    with contextlib.suppress(OSError):  # It is being closed.
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, nbytes or UNLIMITED_NBYTES
        )


def look(windows: Mapping[socket.socket, ReceiveWindow]) -> list[socket.socket]:
    """Measures the rate of a moment, and sets the windows; returns all if the link is fast."""
    time.sleep(LOOK_S)
    begin_s = time.monotonic()  # Before the counts: a wait of this thread makes no link fast.
    before = {connection: arrived(connection).number for connection in windows}
    time.sleep(BURST_S)
    now = {connection: arrived(connection) for connection in windows}
    came = sum(max(0, one.number - before[each]) * one.nbytes for each, one in now.items())
    LINK.note(came, time.monotonic() - begin_s, sum(one.gaps for one in now.values()))
    busy = max((one.number for one in now.values()), default=0) / 16
    number = sum(one.number >= busy for one in now.values())
    for connection, window in windows.items():
        trip_us = least_us(connection)
        if trip_us <= NEAR_US:
            limit(connection, window, LINK.window(1e-6 * trip_us, number))
    return list(windows) if LINK.is_fast else []


LINK = NearLink()
FOLLOWED = Followed[ReceiveWindow]("windows", look)
