"""The bulk data plane: frames on plain sockets, and shared memory for workers on the same host.

A worker opens two connections per shard, one for its pushes and one for its pulls, over TCP or, on
the same host, over an abstract Unix socket. Each frame's header is an `Envelope`
(proto/ps/v1/data.proto); a reply repeats the request's id, and replies come in any order. Payloads
are received in place and sent from where they are. Over the Unix socket a worker of the same user
may pass, on a connection of its own, the file descriptor of its gradients and gets that of the
weights (pscore/segment.py); then pushes and answers carry notices only.

One thread reads each connection. Answers are sent by whoever has them, as far as the peer takes
them at once; the rest is left to a thread of the connection, so that a slow reader stalls nobody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import structlog
from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore import faults, sockets, wire
from pscore.errors import DamagedError, DecodeError, PacelineError, TransportError
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import ByteArray, FloatArray
from psserver.driver import Driver

log = structlog.get_logger()
CONNECTIONS_MAX = 4096
ATTACH_SUFFIX = ".attach"  # Of the local socket over which file descriptors travel.
ATTACH_NBYTES_MAX = 1 << 16
KEPT_BUFFERS = 4  # Receive buffers that a connection keeps for the next payloads.
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a Unix socket's peer.
IDLE_TIMEOUT_S = 30.0  # A connection that has not sent a whole first frame by then is closed.


class Connection:
    """One connection of one worker."""

    def __init__(self, driver: Driver, connection: socket.socket) -> None:
        """Takes an accepted connection over."""
        self._driver = driver
        self._socket = connection
        self._lock = threading.Lock()
        self._unsent: deque[tuple[list[memoryview], Callable[[], None] | None]] = deque()
        self._has_unsent = threading.Event()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._sender: pb.Sender | None = None  # Who has spoken here.
        self._buffers: deque[ByteArray] = deque(maxlen=KEPT_BUFFERS)
        wanted = faults.from_environment()
        self._faults = {point: wanted.at(point) for point in ("pushed", "pulled")}
        self.send = self._send_faulty if any(self._faults.values()) else self._send

    # ----- reading

    def serve(self) -> None:
        """Reads frames until the peer goes or sends something that is not one."""
        try:
            self._socket.settimeout(IDLE_TIMEOUT_S)
            while (incoming := self._next()) is not None:
                self._socket.settimeout(None)
                self._take(incoming)
        except TransportError as problem:
            log.info("bulk connection ended", reason=str(problem))
        except DecodeError as problem:
            log.warning("bulk connection refused", reason=str(problem))
        finally:
            self.close()
            if self._sender is not None:
                self._driver.suspect(self._sender)
            self._driver.intake.forget(lambda reply: getattr(reply, "connection", None) is self)

    def _next(self) -> sockets.Incoming | None:
        return sockets.read_header(self._socket)

    def _take(self, incoming: sockets.Incoming) -> None:
        envelope = pb.Envelope()
        try:
            envelope.ParseFromString(incoming.header)
        except ProtobufDecodeError as problem:
            raise DecodeError(f"header of {len(incoming.header)} bytes is no message") from problem
        reply = SocketReply(self, envelope.id)
        kind = envelope.WhichOneof("body")
        try:
            if kind != "push":
                incoming.read_into()  # No payload; and what is damaged is not believed.
            if kind == "push":
                self._push(envelope.push, incoming, reply)
            elif kind == "pull":
                self._sender = envelope.pull.sender
                wait_s = min(envelope.pull.wait_ms / 1000, 10.0)
                self._driver.intake.pull(envelope.pull, reply, wait_s)
            elif kind is not None:  # That would be a greeting: somebody who means it.
                raise DecodeError(f"bulk frame with {kind!r} in it")
        except (TransportError, DamagedError):
            raise  # Not even whom to answer is sure; the peer sends it again.
        except PacelineError as error:
            if kind == "push":
                self._driver.tally.num_pushes_refused += 1
            reply.failed(error)

    def _push(self, header: pb.PushHeader, incoming: sockets.Incoming, reply: SocketReply) -> None:
        nbytes = incoming.payload_nbytes
        self._sender = header.sender
        try:
            self._driver.intake.admit(header, nbytes)
        except PacelineError:
            incoming.skip()  # So that the next frame can be read.
            raise
        data = self._buffer(nbytes)
        incoming.read_into(memoryview(data))
        release = (lambda: self._buffers.append(data)) if nbytes else None
        self._driver.intake.push(header, data, reply, release)

    def _buffer(self, nbytes: int) -> ByteArray:
        """Returns memory for a payload: one of the last ones, whose pages are there already."""
        for _ in range(len(self._buffers)):
            buffer = self._buffers.popleft()
            if buffer.nbytes == nbytes:
                return buffer
            self._buffers.append(buffer)
        return np.empty(nbytes, dtype=np.uint8)

    # ----- writing

    def _send(
        self,
        envelope: pb.Envelope,
        arrays: Sequence[FloatArray | ByteArray] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame, now as far as the peer takes it, the rest later.

        Without `release`, arrays are only valid during the call: what is left of them is copied.
        """
        payload = [wire.as_bytes(array) for array in arrays]
        self._queue(sockets.frame_parts(envelope.SerializeToString(), payload), release)

    def _queue(self, parts: list[memoryview], release: Callable[[], None] | None = None) -> None:
        """Sends parts of a frame now as far as the peer takes them, the rest later."""
        with self._lock:
            if not self._is_closed:
                if not self._unsent:
                    parts = self._send_now(parts)
                if parts:
                    if release is None:
                        parts = [memoryview(bytes(part)) for part in parts]
                    self._unsent.append((parts, release))
                    self._wake()
                    return
        if release is not None:
            release()

    def _send_faulty(
        self,
        envelope: pb.Envelope,
        arrays: Sequence[FloatArray | ByteArray] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        """Sends a copy of a frame as PACELINE_FAULTS says; in the place of `_send`."""
        payload = [wire.as_bytes(array) for array in arrays]
        frame = b"".join(sockets.frame_parts(envelope.SerializeToString(), payload))
        if release is not None:
            release()
        line = self._faults.get(envelope.WhichOneof("body") or "")
        if line is None:
            self._queue([memoryview(frame)])
        else:
            line.send(frame, lambda sent: self._queue([memoryview(sent)]), self._cut)

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # The peer may have closed it already.
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Sends what the kernel takes without waiting; returns the rest."""
        try:
            while parts:
                sent = self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                parts = sockets.advance(parts, sent)
        except BlockingIOError:
            pass
        except OSError:
            self._is_closed = True  # The reading thread sees it too, and cleans up.
            return []
        return parts

    def _wake(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="bulk-write", daemon=True)
            self._writer.start()
        self._has_unsent.set()

    def _write(self) -> None:
        """Sends what is left, frame by frame, as fast as the peer reads."""
        while True:
            self._has_unsent.wait()
            with self._lock:
                if self._is_closed:
                    return
                parts, release = self._unsent[0]
            try:
                sockets.send_all(self._socket, parts)
            except TransportError:
                self.close()
                return
            with self._lock:
                if self._unsent:
                    self._unsent.popleft()
                if not self._unsent:
                    self._has_unsent.clear()
            if release is not None:
                release()

    def close(self) -> None:
        """Ends the connection and gives back what it was sending from."""
        with self._lock:
            self._is_closed = True
            unsent = list(self._unsent)
            self._unsent.clear()
            self._has_unsent.set()
        for _, release in unsent:
            if release is not None:
                release()
        with contextlib.suppress(OSError):  # The peer may have closed it already.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SocketReply:
    """Answers one request on its connection."""

    __slots__ = ("_id", "connection")

    def __init__(self, connection: Connection, number: int) -> None:
        """Answers request `number`."""
        self.connection = connection
        self._id = number

    def pushed(self, reply: pb.PushReply) -> None:
        """Answers a push."""
        self.connection.send(pb.Envelope(id=self._id, pushed=reply))

    def pulled(
        self,
        reply: pb.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull."""
        self.connection.send(pb.Envelope(id=self._id, pulled=reply), arrays, release)

    def failed(self, error: PacelineError) -> None:
        """Refuses a request."""
        failure = pb.Failure(kind=type(error).__name__, message=str(error))
        self.connection.send(pb.Envelope(id=self._id, failed=failure))


class BulkServer:
    """Listens for workers' bulk connections, on TCP and on an abstract Unix socket.

    Attributes:
        port: TCP port.
        local: Name of the abstract Unix socket, without its leading zero byte.
    """

    def __init__(self, driver: Driver, host: str, port: int, local: str) -> None:
        """Binds both; nothing is accepted yet.

        Raises:
            OSError: The port cannot be had.
        """
        self._driver = driver
        self._connections: set[Connection] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.create_server((host, port), family=family, backlog=256)
        self.port = int(self._tcp.getsockname()[1])
        self.local = local
        self._unix = _listen_locally(local)
        self._attaching = _listen_locally(local + ATTACH_SUFFIX)

    def start(self) -> None:
        """Begins to accept."""
        for listener, take in (
            (self._tcp, self._serve),
            (self._unix, self._serve),
            (self._attaching, self._attach),
        ):
            threading.Thread(
                target=self._accept, args=(listener, take), name="bulk-accept", daemon=True
            ).start()

    def stop(self) -> None:
        """Closes the listeners and all connections."""
        for listener in (self._tcp, self._unix, self._attaching):
            with contextlib.suppress(OSError):  # Closing alone would not wake `accept`.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return  # The listener is closed: the daemon ends.
            if len(self._connections) >= CONNECTIONS_MAX or not _is_welcome(accepted):
                accepted.close()
                continue
            threading.Thread(target=take, args=(accepted,), name="bulk-read", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        """Serves one connection to its end."""
        sockets.tune(accepted)
        connection = Connection(self._driver, accepted)
        self._connections.add(connection)
        try:
            connection.serve()
        finally:
            self._connections.discard(connection)

    def _attach(self, accepted: socket.socket) -> None:
        """Takes the descriptor of a worker's gradients and gives that of the weights."""
        with accepted:
            accepted.settimeout(IDLE_TIMEOUT_S)
            envelope, reply = pb.Envelope(), pb.Envelope()
            fds: list[int] = []
            try:
                frame, fds, _, _ = socket.recv_fds(accepted, ATTACH_NBYTES_MAX, 1)
                envelope.ParseFromString(bytes(wire.decode(frame)[0]))
                if len(fds) != 1 or envelope.WhichOneof("body") != "attach":
                    raise DecodeError("an attachment must bring one file descriptor")
                request = envelope.attach
                weights = self._driver.attach(request.sender, fds.pop(), request.nbytes)
                reply.attached.nbytes = weights.nbytes
                answer = wire.encode(reply.SerializeToString())
                socket.send_fds(accepted, [answer], [weights.fd])
            except PacelineError as error:
                reply.failed.kind, reply.failed.message = type(error).__name__, str(error)
                accepted.sendall(wire.encode(reply.SerializeToString()))
            except (OSError, ProtobufDecodeError) as problem:
                log.warning("attachment refused", reason=str(problem))
            finally:
                for fd in fds:
                    os.close(fd)


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0" + name.encode())
    listener.listen(256)
    return listener


def _is_welcome(accepted: socket.socket) -> bool:
    """Whether the peer of a Unix socket is this user; TCP peers are known by what they send."""
    if accepted.family != socket.AF_UNIX:
        return True
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, uid, _ = CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())
