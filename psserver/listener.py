"""Where workers' bulk connections arrive: on TCP, and on an abstract Unix socket of the same host.

Who connects has a few seconds for the TLS handshake, where there is TLS, and for its first message;
where too many are at that, the one that has been longest has to go, so that slow ones stall nobody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore import sockets, tls, wire
from pscore.errors import DecodeError, PacelineError
from pscore.pb.ps.v1 import data_pb2 as pb
from psserver import bulk
from psserver.bulk import Connection
from psserver.driver import Driver
from psserver.gate import Gate

log = structlog.get_logger()
CONNECTIONS_MAX = 4096
PENDING_MAX = 256  # Connections that have not said hello yet.
ATTACH_SUFFIX = ".attach"  # Of the local socket over which file descriptors travel.
ATTACH_NBYTES_MAX = 1 << 16
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a Unix socket's peer.


class BulkServer:
    """Listens for workers' bulk connections, on TCP and on an abstract Unix socket.

    Attributes:
        port: TCP port.
        local: Name of the abstract Unix socket, without its leading zero byte.
    """

    def __init__(
        self,
        driver: Driver,
        host: str,
        port: int,
        local: str,
        *,
        gate: Gate | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Binds both; nothing is accepted yet.

        Args:
            driver: The shard.
            host: Address to listen on.
            port: Port to listen on; 0 for a free one.
            local: Name of the abstract Unix socket.
            gate: Who may do what; None: everybody everything.
            context: TLS of the TCP port; None: none.

        Raises:
            OSError: The port cannot be had.
        """
        self._driver = driver
        self._gate = Gate() if gate is None else gate
        self._context = context
        self._pending: dict[socket.socket, None] = {}  # In the order of their coming.
        self._pending_lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._tcp, self._congestion = sockets.listen(host, port)
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
            self._expect(accepted)
            threading.Thread(target=take, args=(accepted,), name="bulk-read", daemon=True).start()

    def _expect(self, accepted: socket.socket) -> None:
        """Notes one that has yet to say hello; the one that has been longest may have to go."""
        with self._pending_lock:
            self._pending[accepted] = None
            if len(self._pending) > PENDING_MAX:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                with contextlib.suppress(OSError):  # It may have gone by itself.
                    oldest.shutdown(socket.SHUT_RDWR)

    def _greeted(self, accepted: socket.socket) -> None:
        with self._pending_lock:
            self._pending.pop(accepted, None)

    def _serve(self, accepted: socket.socket) -> None:
        """Serves one connection to its end."""
        deadline_s = time.monotonic() + bulk.HELLO_TIMEOUT_S
        sockets.tune(accepted, self._congestion)
        with accepted:
            try:
                stream = self._secured(accepted, deadline_s)
            except OSError as problem:
                self._greeted(accepted)
                log.info("bulk connection without TLS refused", reason=str(problem))
                return
            connection = Connection(
                self._driver, stream, self._gate, lambda: self._greeted(accepted)
            )
            self._connections.add(connection)
            try:
                connection.serve(deadline_s)
            finally:
                self._greeted(accepted)
                self._connections.discard(connection)

    def _secured(self, accepted: socket.socket, deadline_s: float) -> tls.Stream:
        """Returns the connection with TLS if it came over TCP and there is any.

        Raises:
            OSError: The handshake failed.
        """
        if self._context is None or accepted.family == socket.AF_UNIX:
            return accepted
        # A copy: TLS takes its socket away, and this one must be there to be shut down.
        return tls.secure(accepted.dup(), self._context, deadline_s=deadline_s)

    def _attach(self, accepted: socket.socket) -> None:
        """Takes the descriptor of a worker's gradients and gives that of the weights."""
        with accepted, contextlib.ExitStack() as undo:
            undo.callback(self._greeted, accepted)
            accepted.settimeout(bulk.HELLO_TIMEOUT_S)
            envelope, reply = pb.Envelope(), pb.Envelope()
            fds: list[int] = []
            try:
                frame, fds, _, _ = socket.recv_fds(accepted, ATTACH_NBYTES_MAX, 1)
                envelope.ParseFromString(bytes(wire.decode(frame)[0]))
                if len(fds) != 1 or envelope.WhichOneof("body") != "attach":
                    raise DecodeError("an attachment must bring one file descriptor")
                request = envelope.attach
                self._gate.admit(request.token).require(request.sender.job)
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
