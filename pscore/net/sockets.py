"""Frames (wire.py) on a stream socket, without a copy of a payload in either direction.

A frame's header is read first; the caller then says where the payload goes. The checksum covers
both and is compared after the last byte has come.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import xxhash

from pscore.errors import DamagedError, DecodeError, TransportError
from pscore.net import congestion, receive_windows
from pscore.net.tls import Stream, TLSSocket
from pscore.net.wire import (
    CHECKED,
    HEADER_NBYTES_MAX,
    MAGIC,
    PAYLOAD_NBYTES_MAX,
    PREFIX,
)

BACKLOG = 4096  # Connections that wait to be accepted; the kernel's limit may be lower.
SCRATCH_NBYTES = 1 << 16
_LIBC = ctypes.PyDLL(None, use_errno=True)  # Calls keep the interpreter's lock.
NAME_NBYTES = 128  # A socket's name, of any family.
SILENT_S = 5  # Time for which the kernel keeps a connection on which nothing has come.
AHEAD_NBYTES = 1 << 12  # A few dozen frames without a payload.
CLOSED_S = 5.0  # Interval at which a waiting reader checks that its connection is still open.
SOCKET_NBYTES = 4 << 20  # Kernel buffers of a Unix socket, as far as granted.
SAME_HOST_NBYTES = 512 << 10  # Kernel buffers of TCP within one host: they fit into the cache.
nbytes_of = attrgetter("nbytes")


def defer_silent(listener: socket.socket) -> None:
    """Leaves new connections to the kernel until something comes on them (Linux only).

    A crowd that connects and says nothing then costs a server much less time, and fills the queue
    later in which the connections of others would be lost (`TCP_DEFER_ACCEPT`).
    """
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)


def accept_waiting(listener: socket.socket, most: int) -> list[tuple[socket.socket, str]]:
    """Accepts connections that wait, and keeps the interpreter's lock meanwhile.

    `socket.accept` gives it away for each connection, and queues for it again behind all busy
    threads: a crowd then comes faster than it is accepted, and the kernel's queue fills.

    Args:
        listener: One that does not wait.
        most: Number of connections.

    Returns:
        Each connection with the address of its peer; without one on a Unix socket.

    Raises:
        OSError: The first one cannot be accepted, for another reason than that none waits.
    """
    found: list[tuple[socket.socket, str]] = []
    name, nbytes = ctypes.create_string_buffer(NAME_NBYTES), ctypes.c_uint32()
    family, kind, protocol = listener.family, listener.type, listener.proto
    is_local = family == socket.AF_UNIX
    # Place of the address in the name.
    begin, end = (4, 8) if family == socket.AF_INET else (8, 24)
    while len(found) < most:
        nbytes.value = NAME_NBYTES
        number = _LIBC.accept4(listener.fileno(), name, ctypes.byref(nbytes), socket.SOCK_CLOEXEC)
        if number < 0:
            problem = ctypes.get_errno()
            if found or problem in (errno.EAGAIN, errno.EINTR):
                break
            raise OSError(problem, os.strerror(problem))
        host = "" if is_local else socket.inet_ntop(family, name.raw[begin:end])
        found.append((socket.socket(family, kind, protocol, fileno=number), host))
    return found


def close_all(connections: Iterable[socket.socket]) -> None:
    """Closes connections, and keeps the interpreter's lock meanwhile (`accept_waiting`)."""
    for connection in connections:
        _LIBC.close(connection.detach())


def listen(host: str, port: int) -> tuple[socket.socket, bytes]:
    """Listens on TCP; accepted connections must be passed to `tune`.

    Returns:
        The listener, and the congestion control for `tune`.

    Raises:
        OSError: The address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    return listener, congestion.defer_pacing(listener)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Returns a tuned TCP connection without a time limit.

    Raises:
        OSError: There is no such host, or nothing listens there.
    """
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            usual = congestion.defer_pacing(connection)
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.settimeout(None)
            tune(connection, usual)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    raise problem


def tune(connection: socket.socket, usual: bytes = b"") -> None:
    """Sets the options of a data connection: no delay for small frames, and the sizes of buffers.

    Between two processes of one host there is no latency to hide, and small buffers are faster.
    To another host TCP adapts its buffers to the bytes under way, and receive_windows.py limits
    these on a slow link.

    Args:
        connection: TCP, or a Unix socket.
        usual: The system's congestion control, for a connection to another host.
    """
    nbytes = SOCKET_NBYTES
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not is_within_host(connection):
            congestion.choose(connection, usual)
            receive_windows.follow(connection)
            return
        nbytes = SAME_HOST_NBYTES
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, nbytes)


def is_within_host(connection: Stream) -> bool:
    """Returns whether the two ends of a TCP connection have the same address."""
    try:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:
        return False  # It has ended; the reading thread notices that.


def has_said(connection: socket.socket) -> bool:
    """Returns whether bytes of the peer can be read, and not only the end of its connection."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def limit_silence(connection: Stream, limit_s: float) -> None:
    """Limits the wait of each read to `limit_s` seconds; writes may wait longer.

    Between two frames `read_header` continues to wait; in the middle of a frame it is an error.
    """
    if isinstance(connection, TLSSocket):
        connection.limit_silence(limit_s)
        return
    # The kernel's limit: with Python's own, reads would return early with parts, again and again.
    seconds, rest = divmod(limit_s, 1.0)
    timeval = struct.pack("@ll", int(seconds), int(1e6 * rest))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def limit_unacknowledged(connection: Stream, limit_s: float) -> None:
    """Limits the silence of the other host to `limit_s` seconds; then the connection breaks.

    Its kernel then acknowledges neither bytes nor probes: reads and writes that wait end with an
    error, where TCP by itself would try for a quarter of an hour.
    """
    if connection.family == socket.AF_UNIX:
        return
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, round(1e3 * limit_s)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _nothing() -> None:
    """Does nothing before a read."""


class ReadAhead:
    """Reads a connection; takes several frames without a payload in one call.

    Behind a frame without a payload there is often another one: requests to pull, answers to
    pushes. So such a frame takes two system calls, `wait` and one read, and often fewer.
    """

    def __init__(self, connection: Stream, before_read: Callable[[], None] = _nothing) -> None:
        """Reads `connection` from now on, alone.

        Args:
            before_read: Called before each read that may wait for the peer.
        """
        self._connection = connection
        self._before_read = before_read
        self._buffer = memoryview(bytearray(AHEAD_NBYTES))
        self._left = self._buffer[:0]
        self.is_short = False  # Whether the last frame had no payload.
        self._poll = select.poll()
        if not isinstance(connection, TLSSocket):  # That one polls by itself.
            self._poll.register(connection, select.POLLIN)

    def wait(self) -> None:
        """Waits for a frame behind a short one, or for the end of the connection.

        While another thread sends on the same connection, the kernel wakes a thread in `recv` at
        each part that has been sent; it does not wake one in `poll`.
        """
        if not self.is_short or self._left or isinstance(self._connection, TLSSocket):
            return
        self._before_read()
        # Once another thread has closed it, its number may belong to another connection.
        while self._connection.fileno() >= 0 and not self._poll.poll(1e3 * CLOSED_S):
            pass

    def settimeout(self, timeout_s: float | None) -> None:
        """Limits how long one call waits, in seconds."""
        self._connection.settimeout(timeout_s)

    def take(self, nbytes: int) -> bytes:
        """Returns that many bytes if so many are here already; else none."""
        if self._left.nbytes < nbytes:
            return b""
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return bytes(taken)

    def recv_into(self, target: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Reads some bytes; returns 0 when the peer has closed."""
        if not self._left:
            self._before_read()
            if not self.is_short or target.nbytes >= AHEAD_NBYTES:
                return self._connection.recv_into(target, nbytes, flags)
            count = self._connection.recv_into(self._buffer)
            self._left = self._buffer[:count]
        count = min(target.nbytes, self._left.nbytes)
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def frame_parts(header: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
    """Returns a frame as parts for `sendmsg`; the payload is not copied."""
    if not payload:
        start = CHECKED.pack(MAGIC, len(header), 0)
        checksum = xxhash.xxh3_64_intdigest(start + header)
        return [memoryview(start + checksum.to_bytes(8, "little") + header)]
    start = CHECKED.pack(MAGIC, len(header), sum(map(nbytes_of, payload)))
    digest = xxhash.xxh3_64(start + header)
    for part in payload:
        digest.update(part)
    head = b"".join((start, digest.intdigest().to_bytes(8, "little"), header))
    return [memoryview(head), *(part for part in payload if part.nbytes)]


def send_all(connection: Stream, parts: Sequence[memoryview]) -> None:
    """Sends all parts in order; waits while the peer does not read.

    Raises:
        TransportError: The connection broke.
    """
    left = list(parts)
    try:
        while left:
            left = advance(left, connection.sendmsg(left))
    except OSError as problem:
        raise TransportError(f"connection broke: {problem}") from problem


def advance(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """Returns the rest of `parts` behind their first `nbytes`."""
    position = 0
    while position < len(parts) and nbytes >= parts[position].nbytes:
        nbytes -= parts[position].nbytes
        position += 1
    left = parts[position:]
    if nbytes:
        left[0] = left[0][nbytes:]
    return left


def first_nbytes(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """Returns the first `nbytes` of `parts`, or all if they have fewer."""
    first = []
    for part in parts:
        first.append(part[:nbytes])
        nbytes -= first[-1].nbytes
        if not nbytes:
            break
    return first


class Incoming:
    """One frame with its header read and its payload still to come."""

    def __init__(
        self, connection: Stream | ReadAhead, header: bytes, nbytes: int, start: bytes
    ) -> None:
        """Continues the frame's checksum; `read_header` makes these objects."""
        self.header = header
        self.payload_nbytes = nbytes
        self._connection = connection
        self._declared = int.from_bytes(start[CHECKED.size :], "little")
        self._digest = xxhash.xxh3_64(start[: CHECKED.size] + header)
        self.is_read = False  # Whether all of the payload has been read.

    def read_into(self, *targets: memoryview) -> None:
        """Reads the payload into `targets` and verifies the checksum.

        Raises:
            DecodeError: The targets have another length than the payload, which is skipped.
            DamagedError: The checksum differs.
            TransportError: The connection broke.
        """
        if (wanted := sum(map(nbytes_of, targets))) != self.payload_nbytes:
            self.skip()  # Raises if the frame is damaged, which then is the cause.
            raise DecodeError(f"payload of {self.payload_nbytes} bytes, {wanted} wanted")
        for target in targets if wanted else ():
            receive_into(self._connection, target)
            self._digest.update(target)
        self._check()

    def skip(self) -> None:
        """Reads the payload, drops it, and verifies the checksum of the frame.

        Raises:
            DamagedError: The checksum differs.
            TransportError: The connection broke.
        """
        scratch = memoryview(bytearray(min(self.payload_nbytes, SCRATCH_NBYTES)))
        left = self.payload_nbytes
        while left:
            part = scratch[: min(left, scratch.nbytes)]
            receive_into(self._connection, part)
            self._digest.update(part)
            left -= part.nbytes
        self._check()

    def _check(self) -> None:
        self.is_read = True
        if self._digest.intdigest() != self._declared:
            raise DamagedError(
                f"checksum of a frame of {self.payload_nbytes} bytes of payload differs from its "
                "content"
            )


def read_header(
    connection: Stream | ReadAhead,
    *,
    header_nbytes_max: int = HEADER_NBYTES_MAX,
    payload_nbytes_max: int = PAYLOAD_NBYTES_MAX,
    deadline_s: float | None = None,
    reserve: Callable[[int], None] | None = None,
) -> Incoming | None:
    """Reads up to a frame's header; returns None if the peer has closed between two frames.

    Args:
        header_nbytes_max: A longer header is refused.
        payload_nbytes_max: A longer payload is refused.
        deadline_s: Deadline by the monotonic clock, for the whole header, even if it comes byte by
            byte.
        reserve: Called with the header's length before memory is taken for it; may raise.

    Raises:
        DecodeError: The bytes are no frame; nothing has been allocated for them.
        TransportError: The connection broke.
    """
    if isinstance(connection, ReadAhead) and deadline_s is None:
        connection.wait()
    start = _read(connection, PREFIX.size, may_end=True, deadline_s=deadline_s)
    if not start:
        return None
    magic, header_nbytes, payload_nbytes, _ = PREFIX.unpack(start)
    if magic != MAGIC:
        raise DecodeError(f"frame begins with {magic!r}, {MAGIC!r} wanted")
    if header_nbytes > header_nbytes_max or payload_nbytes > payload_nbytes_max:
        raise DecodeError(
            f"frame declares {header_nbytes} bytes of header and {payload_nbytes} of payload, "
            f"at most {header_nbytes_max} and {payload_nbytes_max}"
        )
    if reserve is not None:
        reserve(header_nbytes)
    header = _read(connection, header_nbytes, deadline_s=deadline_s)
    if isinstance(connection, ReadAhead):
        connection.is_short = payload_nbytes == 0
    return Incoming(connection, header, payload_nbytes, start)


def _read(
    connection: Stream | ReadAhead,
    nbytes: int,
    *,
    may_end: bool = False,
    deadline_s: float | None = None,
) -> bytes:
    """Returns that many bytes; none if the peer closed before the first one and `may_end`."""
    if isinstance(connection, ReadAhead) and (taken := connection.take(nbytes)):
        return taken
    data = bytearray(nbytes)
    is_whole = receive_into(connection, memoryview(data), may_end=may_end, deadline_s=deadline_s)
    return bytes(data) if is_whole else b""


def receive_into(
    connection: Stream | ReadAhead,
    target: memoryview,
    *,
    may_end: bool = False,
    deadline_s: float | None = None,
) -> bool:
    """Fills `target`; returns False if the peer closed before the first byte and `may_end`.

    Raises:
        TransportError: The connection broke.
    """
    filled = 0
    try:
        while filled < target.nbytes:
            if deadline_s is not None:
                connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
            try:
                count = connection.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # `limit_silence`.
                if may_end and filled == 0:
                    continue  # Nothing has begun that could be late.
                raise TransportError(
                    f"nothing arrived for too long, after {filled} of {target.nbytes} bytes"
                ) from None
            if count == 0:
                if may_end and filled == 0:
                    return False
                raise TransportError(f"connection closed after {filled} of {target.nbytes} bytes")
            filled += count
    except OSError as problem:
        raise TransportError(f"connection broke: {problem}") from problem
    return True
