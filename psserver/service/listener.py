"""Where workers' bulk connections arrive: on TCP, and on an abstract Unix socket of the same host.

A peer has a few seconds for the TLS handshake, where there is TLS, and for its first message. If
too many are at that, the oldest is closed, so that slow peers stall nobody. Without descriptors or
threads for one more, newcomers are refused, the log says so once, and the listener goes on: it ends
with the daemon, and in no other way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import DecodeError, PacelineError
from pscore.net import sockets, tls, wire
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.text import printable
from psserver.access.gate import Gate
from psserver.decisions.limits import Budget
from psserver.engine.engine import Engine
from psserver.logs import setup
from psserver.service import data_socket, descriptors
from psserver.service.data_socket import Connection

CONNECTIONS_MAX = 4096
PENDING_MAX = 256  # Connections that have not said hello yet.
PENDING_SHARE = 4  # They get one of so many descriptors at most.
UNKNOWN_NBYTES = 32 << 20  # Of long headers from peers that have not named a live worker yet.
RECOVERED_S = 3.0  # After the last refusal for lack of means.
PAUSE_S = 0.1
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
        engine: Engine,
        host: str,
        port: int,
        local: str,
        *,
        gate: Gate | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Binds both; nothing is accepted yet.

        Args:
            engine: The shard.
            host: Address to listen on.
            port: Port to listen on; 0 for a free one.
            local: Name of the abstract Unix socket.
            gate: Who may do what; None: everybody everything.
            context: TLS of the TCP port; None: none.

        Raises:
            OSError: The port cannot be had.
        """
        self._engine = engine
        self._gate = Gate() if gate is None else gate
        self._context = context
        self._pending: dict[socket.socket, None] = {}  # In the order of their coming.
        self._pending_lock = threading.Lock()
        share = PENDING_SHARE if context is None else 2 * PENDING_SHARE  # TLS takes a copy.
        self._pending_max = min(PENDING_MAX, descriptors.limit() // share)
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._refused_s = -math.inf  # When somebody was last refused for lack of means.
        self._unknown = Budget(UNKNOWN_NBYTES, "")
        self._connections: set[Connection] = set()
        self.local = local
        with contextlib.ExitStack() as undo:
            self._tcp, self._congestion = sockets.listen(host, port)
            undo.enter_context(self._tcp)
            self.port = int(self._tcp.getsockname()[1])
            self._unix = undo.enter_context(_listen_locally(local))
            self._attaching = _listen_locally(local + ATTACH_SUFFIX)
            undo.pop_all()

    def start(self) -> None:
        """Begins to accept."""
        for listener, take in (
            (self._tcp, self._serve),
            (self._unix, self._serve),
            (self._attaching, self._attach),
        ):
            poll = select.poll()  # Made here: `stop` may close the listener before a thread runs.
            poll.register(listener, select.POLLIN)
            thread = threading.Thread(
                target=self._accept, args=(listener, poll, take), name="bulk-accept", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @property
    def is_well(self) -> bool:
        """Whether newcomers are accepted, and none was refused just now for lack of means."""
        is_late = time.monotonic() - self._refused_s >= RECOVERED_S
        return is_late and all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Closes the listeners and all connections."""
        self._is_closing = True
        for listener in (self._tcp, self._unix, self._attaching):
            with contextlib.suppress(OSError):  # Closing alone would not wake `accept`.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(
        self, listener: socket.socket, poll: select.poll, take: Callable[[socket.socket], None]
    ) -> None:
        spare = descriptors.Spare()
        while not self._is_closing:
            poll.poll()  # `accept` without a descriptor left would not wait for anybody.
            try:
                accepted, _ = listener.accept()
            except OSError as problem:
                self._on_accept_failed(problem, listener, spare)
                continue
            self._admit(accepted, take)
        spare.close()

    def _on_accept_failed(
        self, problem: OSError, listener: socket.socket, spare: descriptors.Spare
    ) -> None:
        """Turns a newcomer away if there is nothing to accept it with; else it has gone itself."""
        if self._is_closing:
            return
        if problem.errno not in descriptors.EXHAUSTED:
            time.sleep(PAUSE_S)
            return
        self._note_refusal(problem.strerror or str(problem))
        with contextlib.suppress(OSError):
            if not spare.turn_away(listener):
                time.sleep(PAUSE_S)

    def _admit(self, accepted: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """Gives a newcomer a thread, or closes it."""
        if len(self._connections) >= CONNECTIONS_MAX:
            self._note_refusal(f"{CONNECTIONS_MAX} connections are there already")
        elif descriptors.is_scarce(accepted.fileno()) and not self._drop_oldest():
            self._note_refusal(f"few of the {descriptors.limit()} file descriptors are left")
        elif _is_welcome(accepted):
            self._expect(accepted)
            try:
                threading.Thread(
                    target=take, args=(accepted,), name="bulk-read", daemon=True
                ).start()
            except RuntimeError as problem:
                self._greeted(accepted)
                self._note_refusal(str(problem))
            else:
                return
        accepted.close()

    def _note_refusal(self, reason: str) -> None:
        self._refused_s = time.monotonic()
        setup.sparsely("bulk connection refused, the shard has no room", reason=reason)

    def _drop_oldest(self) -> bool:
        """Closes the one that has been longest about its hello; returns whether there was one."""
        with self._pending_lock:
            if not self._pending:
                return False
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            with contextlib.suppress(OSError):  # It may have gone by itself.
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _expect(self, accepted: socket.socket) -> None:
        """Notes one that has yet to say hello; the one that has been longest may have to go."""
        with self._pending_lock:
            self._pending[accepted] = None
            is_full = len(self._pending) > self._pending_max
        if is_full:
            self._drop_oldest()

    def _greeted(self, accepted: socket.socket) -> None:
        with self._pending_lock:
            self._pending.pop(accepted, None)

    def _serve(self, accepted: socket.socket) -> None:
        """Serves one connection to its end."""
        deadline_s = time.monotonic() + data_socket.HELLO_TIMEOUT_S
        peer = peer_of(accepted)
        with accepted:
            try:
                sockets.tune(accepted, self._congestion)
                stream = self._secured(accepted, deadline_s)
            except OSError as problem:
                self._greeted(accepted)
                reason = str(problem)
                setup.sparsely("bulk handshake failed", peer, level=logging.INFO, reason=reason)
                return
            connection = Connection(
                self._engine,
                stream,
                self._gate,
                lambda: self._greeted(accepted),
                peer=peer,
                unknown=self._unknown,
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
        copied = accepted.dup()
        try:
            return tls.secure(copied, self._context, deadline_s=deadline_s)
        except OSError:
            copied.close()  # Of no effect once TLS has taken it.
            raise

    def _attach(self, accepted: socket.socket) -> None:
        """Takes the descriptor of a worker's gradients and gives that of the weights."""
        with accepted, contextlib.ExitStack() as undo:
            undo.callback(self._greeted, accepted)
            accepted.settimeout(data_socket.HELLO_TIMEOUT_S)
            envelope, reply = pb.Envelope(), pb.Envelope()
            fds: list[int] = []
            try:
                frame, fds, _, _ = socket.recv_fds(accepted, ATTACH_NBYTES_MAX, 1)
                envelope.ParseFromString(bytes(wire.decode(frame)[0]))
                if len(fds) != 1 or envelope.WhichOneof("body") != "attach":
                    raise DecodeError("an attachment must bring one file descriptor")
                request = envelope.attach
                self._gate.admit(request.token).require(request.sender.job)
                weights = self._engine.attach(request.sender, fds.pop(), request.nbytes)
                reply.attached.nbytes = weights.nbytes
                answer = wire.encode(reply.SerializeToString())
                socket.send_fds(accepted, [answer], [weights.fd])
            except PacelineError as error:
                reply.failed.kind, reply.failed.message = (
                    type(error).__name__,
                    printable(str(error), keep="\n"),
                )
                with contextlib.suppress(OSError):  # It may have gone.
                    accepted.sendall(wire.encode(reply.SerializeToString()))
            except (OSError, ProtobufDecodeError) as problem:
                setup.sparsely("attachment refused", peer_of(accepted), reason=str(problem))
            finally:
                for fd in fds:
                    os.close(fd)


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name.encode())
        listener.listen(256)
    except OSError:
        listener.close()
        raise
    return listener


def peer_of(accepted: socket.socket) -> str:
    """Returns the host at the other end, for the log."""
    if accepted.family == socket.AF_UNIX:
        return "this host"
    try:
        return str(accepted.getpeername()[0])
    except OSError:
        return "gone"


def _is_welcome(accepted: socket.socket) -> bool:
    """Whether the peer of a Unix socket is this user; TCP peers are known by what they send."""
    if accepted.family != socket.AF_UNIX:
        return True
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, uid, _ = CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())
