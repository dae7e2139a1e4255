"""Send buffers of connections to near hosts, which hold the bytes of some milliseconds.

A window of TCP grows until a switch on the way has no room left and drops packets. A host has a
connection to each shard and one from each, and all of them fill the same switch: they lose packets
together, and a slice waits until these have been sent again while its link is idle. A send buffer
limits the bytes that a connection has under way, so its size is the rate of delivery, which the
kernel measures, times `AHEAD_S`. The connections of a link then hold at most that time of it in the
switch, however many they are. One that is alone delivers more, and so may have more under way.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import sys
from dataclasses import dataclass

from pscore.net import followed
from pscore.net.congestion import NEAR_US, least_us

AHEAD_S = 5e-3  # Time for which a link has bytes, beyond one round trip.
LEAST_NBYTES = 32 << 10  # Bytes that every connection may have under way.
DELIVERY_OFFSET = 160  # `tcpi_delivery_rate` in `tcp_info`, bytes per second.
CHANGE = 0.25  # Relative change of a size that is worth a call.


def fit(connection: socket.socket) -> None:
    """Fits the send buffer of a connection to another host, while it is open and the host near.

    The kernel's own size stays as long as a larger one is wanted than a process may choose.
    """
    followed.FOLLOWED.add(connection, _Fitting())


@dataclass(slots=True)
class _Fitting:
    """The last rate of a connection, and the size that it has got."""

    rate: float = 0.0  # Bytes per second; 0: none yet.
    nbytes: int | None = None  # None: the kernel's own size.

    def __call__(self, connection: socket.socket) -> bool:
        """Looks at the rate and sets the size; returns whether to look again."""
        trip_us, rate = least_us(connection), delivered_rate(connection)
        if not rate or trip_us == sys.maxsize:  # Nothing was sent, or the kernel does not tell.
            return True
        # A look may fall into a burst, so it counts half.
        self.rate = (self.rate + rate) / 2 if self.rate else rate
        if trip_us > NEAR_US:
            return True  # Until a shorter round trip was measured.
        wanted = limit_of(self.rate, 1e-6 * trip_us)
        if self.nbytes is not None and abs(wanted - self.nbytes) <= CHANGE * wanted:
            return True
        if self.nbytes is None and wanted > most_nbytes():
            return True
        self.nbytes = min(wanted, most_nbytes())
        with contextlib.suppress(OSError):  # It is being closed.
            # The kernel doubles the number, since it counts its own records too.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.nbytes // 2)
        return True


def limit_of(rate: float, trip_s: float) -> int:
    """Returns the bytes that a connection may have under way.

    Args:
        rate: Bytes per second that it delivered lately.
        trip_s: Its shortest round trip, in seconds.
    """
    return max(LEAST_NBYTES, int(rate * (trip_s + AHEAD_S)))


@functools.cache
def most_nbytes() -> int:
    """Returns the largest size of a send buffer that this process may choose."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 29)
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def delivered_rate(connection: socket.socket) -> int:
    """Returns the bytes per second that a connection delivered lately; 0 where none are known."""
    nbytes = DELIVERY_OFFSET + 8
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, nbytes)
    except OSError:
        return 0
    return struct.unpack_from("=Q", info, DELIVERY_OFFSET)[0] if len(info) == nbytes else 0
