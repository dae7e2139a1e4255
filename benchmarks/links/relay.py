"""A switch that holds every frame for some time, where the kernel has no netem.

It runs in the switch's namespace of a lab (`netlab.py`), reads each port with a packet socket and
writes frames to the port behind which their receiver is. Frames carry the kernel's offload header
(`PACKET_VNET_HDR`), so that those of up to 64 KiB pass whole. Each port sends through its own
shaped queue, as without the relay.

Paced connections (BBR) seem to be too much for it at 500 Mbit/s and more: plain sockets over 10 ms,
all to all between four hosts, do not fill such links on 2 cores, without pacing they do.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 3, 263, 15, 4
VNET_NBYTES = 10  # Of the offload header, in front of each frame.
FRAME_NBYTES_MAX = 1 << 17
BUFFER_NBYTES = 1 << 25
GROUP = 1  # Bit of a receiver's first byte: it is a group, or all.


def run(line: Connection, ports: Sequence[str], delay_s: float) -> None:
    """Forwards frames between ports until this process is ended.

    Args:
        line: Told once when frames are forwarded.
        ports: Network devices in this namespace.
        delay_s: Seconds for which each frame is held.
    """
    sockets = [_opened(port) for port in ports]
    places: dict[bytes, socket.socket] = {}  # By address of a sender seen before.
    held: deque[tuple[float, bytes, list[socket.socket]]] = deque()
    line.send("ready")
    while True:
        left_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for one in select.select(sockets, [], [], left_s)[0]:
            frame, address = one.recvfrom(FRAME_NBYTES_MAX)
            if address[2] == PACKET_OUTGOING:
                continue
            receiver, sender = frame[VNET_NBYTES:][:6], frame[VNET_NBYTES + 6 :][:6]
            places[sender] = one
            known = None if receiver[0] & GROUP else places.get(receiver)
            to = [known] if known is not None else [other for other in sockets if other is not one]
            held.append((time.monotonic() + delay_s, frame, to))
        while held and held[0][0] <= time.monotonic():
            _, frame, to = held.popleft()
            for other in to:
                with contextlib.suppress(OSError):  # A full queue drops frames, as a switch does.
                    other.send(frame)


def _opened(port: str) -> socket.socket:
    """Returns a packet socket of one device."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)
    found.bind((port, ETH_P_ALL))
    return found
