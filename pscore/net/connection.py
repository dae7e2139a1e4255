"""The answering half of the socket plane; channel.py is the requesting half.

A connection reads frames, checks them, and gives them to a handler. It knows frames and peers; the
meaning of a request is the handler's. One thread reads each connection (`serve`); replies are sent
from any thread, in any order, each with its request's id.

The first message is `Hello` with a token if the service asks for one. It must be small and come in
time; before it nothing else is read, and nothing allocated. Until the handler has marked the peer
as known, its long headers count against a budget that all unknown peers share.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pscore.errors import (
    AccessError,
    DamagedError,
    DecodeError,
    LimitError,
    PacelineError,
    ThreadError,
    TransportError,
)
from pscore.net import faults, sockets, tls, wire
from pscore.net.budget import Budget, ReceiveBuffers
from pscore.net.endpoint import failure_of, parse_envelope
from pscore.net.send_queue import SendQueue
from pscore.net.shared_rate import SharedRate
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import ByteArray, FloatArray

HELLO_TIMEOUT_S = 10.0  # From accepting a connection to the end of its first message.
HELLO_NBYTES_MAX = 4 << 10
SILENCE_S = 30.0  # Without a byte in the middle of a frame; then the connection is closed.


class FrameHandler(Protocol):
    """Gives the frames of one connection their meaning; called on its reading thread only."""

    def on_frame(self, envelope: pb.Envelope, incoming: sockets.Incoming) -> None:
        """Reads the payload of a request and answers it, now or later.

        Raises:
            PacelineError: The request is refused. The connection reads the rest of its payload,
                sends the error to the peer, and continues.
        """

    def on_refused(self, envelope: pb.Envelope) -> None:
        """Notes that a request was refused."""

    def on_end(self) -> None:
        """Forgets the connection, which is closed; called once."""


class Service(Protocol):
    """The owner of a listener: it admits peers and handles their frames."""

    @property
    def needs_token(self) -> bool:
        """Whether a peer must say hello with a token first."""

    @property
    def budget(self) -> Budget:
        """Bytes of payloads and replies that may be under way on all connections."""

    @property
    def queued_nbytes_min(self) -> int:
        """Smallest payload of a reply that is left to a connection's writing thread, in bytes."""

    def admit(self, connection: Connection, token: str) -> FrameHandler:
        """Returns the handler of a new connection; called on its reading thread.

        Raises:
            AccessError: The token is missing or wrong; the peer receives the reason.
        """

    def broke(self, error: ThreadError) -> None:
        """Notes that a thread of the listener or of a connection has failed; only a bug does that.

        A connection is closed then, and its peer would send the same again.
        """

    def log(
        self,
        event: str,
        peer: str = "",
        *,
        level: int = logging.WARNING,
        kind: str = "",
        **fields: object,
    ) -> None:
        """Logs an event that a peer can cause as often as it likes; `kind` groups such events."""


class Connection:
    """One accepted connection.

    Attributes:
        buffers: Memory for payloads.
        is_known: Whether the peer has shown a token, or has named itself in a way that the handler
            can check.
        send: Sends a reply, `(envelope, arrays=(), release=None)`, from any thread. Without
            `release`, which is called when the arrays have been sent, they are only valid during
            the call.
    """

    def __init__(
        self,
        stream: tls.Stream,
        service: Service,
        *,
        peer: str = "",
        on_asked: Callable[[], None] = lambda: None,
        on_answered: Callable[[], None] = lambda: None,
        on_known: Callable[[], None] = lambda: None,
        unknown: Budget | None = None,
    ) -> None:
        """Owns an accepted connection from now on.

        Args:
            stream: With TLS, if there is any.
            service: Admits the peer and handles its frames.
            peer: The host at the other end, for the log.
            on_asked: Called when a request of a peer that is not known has begun to come.
            on_answered: Called after it, if the peer is not known even now.
            on_known: Called once, when the peer is known.
            unknown: Bytes of headers that unknown peers may have under way.
        """
        self._stream = stream
        self._service = service
        self._peer = peer
        self._on_asked = on_asked
        self._on_answered = on_answered
        self._on_known = on_known
        self._unknown = unknown
        self._reserved_nbytes = 0  # Bytes of `unknown`, for the header that is being read.
        self._queue = SendQueue(
            stream, service.budget, service.queued_nbytes_min, self._note_overflow
        )
        self._reader = sockets.ReadAhead(stream, self._queue.let_go)
        self._handler: FrameHandler | None = None
        self._is_closed = threading.Event()
        self.buffers = ReceiveBuffers(service.budget)
        self.is_known = False
        self._faults = faults.from_environment().at_each(faults.REPLY_POINTS)
        self.send = self._send_faulty if self._faults else self._send

    def serve(self, deadline_s: float | None = None) -> None:
        """Reads frames until the peer closes, or sends bytes that are no frame.

        Args:
            deadline_s: Deadline by the monotonic clock, for the first message; None:
                `HELLO_TIMEOUT_S`.
        """
        if deadline_s is None:
            deadline_s = time.monotonic() + HELLO_TIMEOUT_S
        log, peer = self._service.log, self._peer
        try:
            incoming = self._greet(deadline_s)
            self._queue.hold()  # Until the next read: requests that come together are answered so.
            while incoming is not None:
                if not self.is_known:
                    self._on_asked()
                self._dispatch(incoming)
                if not self.is_known:
                    self._on_answered()
                self._return_reserved()
                incoming = sockets.read_header(self._reader, reserve=self._reserve)
        except AccessError as problem:
            log("refused", peer, kind="refused at a data socket", where="data", reason=str(problem))
        except TransportError as problem:
            log("data connection ended", peer, level=logging.INFO, reason=str(problem))
        except (DecodeError, LimitError) as problem:
            log("data connection refused", peer, reason=str(problem))
        finally:
            self._return_reserved()
            self._queue.let_go()
            self.close()
            if self._handler is not None:
                self._handler.on_end()

    def fail(self, number: int, error: PacelineError) -> None:
        """Refuses request `number`."""
        self.send(pb.Envelope(id=number, failed=failure_of(error)))

    def note_known(self) -> None:
        """Notes that the peer is no stranger; the handler calls it, perhaps often."""
        if not self.is_known:
            self.is_known = True
            self._on_known()

    def send_by_turns(
        self, envelope: pb.Envelope, arrays: Sequence[ByteArray], rate: SharedRate
    ) -> None:
        """Sends a reply from the reading thread, to another host by turns of a shared rate.

        It waits while the peer does not read. No other thread may send on this connection.

        Raises:
            TransportError: The connection broke, or was closed.
        """
        if self._faults:
            self.send(envelope, arrays)
            return
        self._queue.let_go()
        payload = [wire.as_bytes(array) for array in arrays]
        left = sockets.frame_parts(envelope.SerializeToString(), payload)
        if self._stream.family == socket.AF_UNIX:
            sockets.send_all(self._stream, left)
            return
        while left:
            turn = sockets.first_nbytes(left, rate.turn_nbytes)
            nbytes = sum(part.nbytes for part in turn)
            if self._is_closed.wait(rate.reserve(nbytes)):
                raise TransportError("connection closed")
            sockets.send_all(self._stream, turn)
            left = sockets.advance(left, nbytes)

    def close(self) -> None:
        """Closes the connection and releases the payloads that it was sending."""
        self._is_closed.set()
        self.buffers.close()
        self._queue.close()
        self._stream.close()

    def _greet(self, deadline_s: float) -> sockets.Incoming | None:
        """Reads the first frame, which is a hello if a token is needed; None if the peer closed.

        Raises:
            AccessError: The token is missing or wrong; the peer has received the reason.
            TransportError: The connection broke.
        """
        service = self._service
        number, token = 0, ""
        if not service.needs_token:
            incoming = sockets.read_header(
                self._reader, deadline_s=deadline_s, reserve=self._reserve
            )
        else:
            incoming = sockets.read_header(
                self._reader,
                header_nbytes_max=HELLO_NBYTES_MAX,
                payload_nbytes_max=0,
                deadline_s=deadline_s,
            )
            if incoming is None:
                return None
            incoming.read_into()
            envelope = parse_envelope(incoming.header)
            number, token = envelope.id, envelope.hello.token
        try:
            self._handler = service.admit(self, token)
        except AccessError as error:
            self.fail(number, error)
            raise
        try:
            self._stream.settimeout(None)
            sockets.limit_silence(self._stream, SILENCE_S)
        except OSError as problem:  # The process ends, and has closed it.
            raise TransportError(f"connection closed: {problem}") from problem
        if service.needs_token:
            self.note_known()
        return incoming

    def _reserve(self, nbytes: int) -> None:
        """Reserves memory for a long header of a peer that is not known yet.

        Raises:
            LimitError: Unknown peers have too many bytes under way.
        """
        if self._unknown is not None and not self.is_known and nbytes > HELLO_NBYTES_MAX:
            self._unknown.take(nbytes, "a header of a peer that is not authenticated yet")
            self._reserved_nbytes = nbytes

    def _return_reserved(self) -> None:
        if self._unknown is not None and self._reserved_nbytes:
            self._unknown.give(self._reserved_nbytes)
            self._reserved_nbytes = 0

    def _dispatch(self, incoming: sockets.Incoming) -> None:
        assert self._handler is not None
        envelope = parse_envelope(incoming.header)
        try:
            if envelope.WhichOneof("body") == "hello":
                incoming.read_into()
                self.send(pb.Envelope(id=envelope.id, hello=pb.Hello()))
            else:
                self._handler.on_frame(envelope, incoming)
        except (TransportError, DamagedError):
            raise  # Not even the request's id is sure; the peer sends it again.
        except PacelineError as error:
            if not incoming.is_read:
                incoming.skip()  # So that the next frame can be read.
            self._handler.on_refused(envelope)
            self.fail(envelope.id, error)

    def _send(
        self,
        envelope: pb.Envelope,
        arrays: Sequence[FloatArray | ByteArray] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        payload = [wire.as_bytes(array) for array in arrays]
        self._queue.send(envelope.SerializeToString(), payload, release)

    def _send_faulty(
        self,
        envelope: pb.Envelope,
        arrays: Sequence[FloatArray | ByteArray] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        """Sends a copy of a frame with the faults of PACELINE_FAULTS; replaces `_send`."""
        payload = [wire.as_bytes(array) for array in arrays]
        frame = b"".join(sockets.frame_parts(envelope.SerializeToString(), payload))
        if release is not None:
            release()
        queue = self._queue
        line = self._faults.get(envelope.WhichOneof("body") or "")
        if line is None:
            queue.send_parts([memoryview(frame)])
        else:
            line.send(frame, lambda sent: queue.send_parts([memoryview(sent)]), queue.cut)

    def _note_overflow(self, problem: LimitError) -> None:
        event = "connection closed: its peer does not read"
        self._service.log(event, self._peer, reason=str(problem))
