"""Delays every packet that the kernel forwards in a namespace, where it has no netem.

    ip netns exec NAMESPACE python -m benchmarks.links.delay 0.010   # until standard input ends

Packets wait in a queue of netfilter (`iptables -j NFQUEUE`). This process is told the number of
each and nothing of its bytes, and gives its verdict some time later. So no payload is copied, those
of up to 64 KiB that the kernel passes on whole stay whole, and one TCP connection spans the delay.
All packets wait equally long, so that a verdict is for all up to a number.
"""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

NETLINK_NETFILTER, SOL_NETLINK, NETLINK_NO_ENOBUFS, SO_RCVBUFFORCE = 12, 270, 5, 33
# Messages and attributes of linux/netfilter/nfnetlink_queue.h.
PACKET, CONFIG, VERDICT_BATCH = 0x300, 0x302, 0x303
COMMAND, PARAMS, MAXLEN, MASK, FLAGS = 1, 2, 3, 4, 5
BIND, COPY_META, KEEP_WHOLE = 1, 1, 4
VERDICT_HEADER, ACCEPT = 2, 1
REQUEST, ACKNOWLEDGE, ERROR = 1, 4, 2
NUMBER = slice(24, 28)  # Of a packet, in the message that tells of it.
MESSAGE_NBYTES = 512
PACKETS_MAX = 1 << 17  # In the queue; those beyond are lost.
BUFFER_NBYTES = 1 << 26  # Of messages that wait to be read.
GRAIN_S = 0.2e-3  # Packets that come within this time share a verdict.


def main() -> None:
    """Delays packets by the argument, in seconds, until standard input ends."""
    delay_s = float(sys.argv[1])
    queue = _opened()
    subprocess.run(["iptables", "-I", "FORWARD", "-j", "NFQUEUE"], check=True)
    print("ready", flush=True)
    held: deque[tuple[float, bytes]] = deque()  # Moments, and the newest packet of each.
    while True:
        left_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        if sys.stdin in select.select([queue, sys.stdin], [], [], left_s)[0]:
            return
        if (newest := _newest(queue)) is not None:
            held.append((time.monotonic() + delay_s, newest))
        due = None
        while held and held[0][0] <= time.monotonic():
            _, due = held.popleft()
        if due is not None:
            verdict = struct.pack(">I", ACCEPT) + due
            queue.send(_message(VERDICT_BATCH, REQUEST, (VERDICT_HEADER, verdict)))
        time.sleep(GRAIN_S)


def _opened() -> socket.socket:
    """Returns a netlink socket that is told of the packets of queue 0.

    Raises:
        OSError: The kernel has no such queues.
    """
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    queue.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_NBYTES)
    queue.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
    for attributes in (
        [(COMMAND, struct.pack(">BxH", BIND, socket.AF_UNSPEC))],
        [(PARAMS, struct.pack(">IB", 0, COPY_META)), (MAXLEN, struct.pack(">I", PACKETS_MAX)),
         (MASK, struct.pack(">I", KEEP_WHOLE)), (FLAGS, struct.pack(">I", KEEP_WHOLE))],
    ):  # fmt: skip
        queue.send(_message(CONFIG, REQUEST | ACKNOWLEDGE, *attributes))
        answer = queue.recv(MESSAGE_NBYTES)
        kind, error = struct.unpack_from("=4xH10xi", answer)
        if kind == ERROR and error:
            raise OSError(-error, "the kernel refuses a queue of packets")
    queue.setblocking(False)
    return queue


def _newest(queue: socket.socket) -> bytes | None:
    """Returns the number of the newest packet that was told of; None: of none."""
    newest = None
    try:
        while True:
            message = queue.recv(MESSAGE_NBYTES)
            if message[5] == PACKET >> 8:
                newest = message[NUMBER]
    except BlockingIOError:
        return newest


def _message(kind: int, flags: int, *attributes: tuple[int, bytes]) -> bytes:
    """Returns a message to queue 0 with some attributes."""
    body = b"".join(
        struct.pack("=HH", 4 + len(value), name) + value + bytes(-len(value) % 4)
        for name, value in attributes
    )
    return struct.pack("=IHHIIBBH", 20 + len(body), kind, flags, 0, 0, 0, 0, 0) + body


if __name__ == "__main__":
    main()
