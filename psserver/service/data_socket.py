"""The bulk data plane: frames on plain sockets, and shared memory for workers on the same host.

A worker opens two connections per shard, one for its pushes and one for its pulls, over TCP or, on
the same host, over an abstract Unix socket. Each frame's header is an `Envelope`
(proto/ps/v1/data.proto); a reply repeats the request's id, and replies come in any order. Payloads
are received in place and sent from where they are. Over the Unix socket a worker of the same user
may pass, on a connection of its own, the file descriptor of its gradients and gets that of the
weights (pscore/memory/segment.py); then pushes and answers carry notices only.

The first message is `Hello` with a token, where a token is asked for: small, and in time; before it
nothing else is read, and nothing allocated. Until a peer has named a live worker, its long headers
count against a budget that all such peers share; payloads are only read for known workers.
psserver/service/listener.py decides which connections to accept.

One thread reads each connection. Short answers are sent by whoever has them, as far as the peer
takes them at once; the rest, and long ones, are left to a thread of the connection, so that a slow
reader stalls nobody, and one core can receive and step while the other sends. Where the shard has
few cores the reading thread makes the step too, of what it has just received.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import (
    AccessError,
    DamagedError,
    DecodeError,
    LimitError,
    PacelineError,
    TransportError,
)
from pscore.net import faults, sockets, tls, wire
from pscore.net.credentials import EVERY
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.text import printable
from pscore.types import ByteArray, FloatArray
from psserver.access.gate import Gate, Pass
from psserver.decisions.limits import Budget
from psserver.engine.engine import Engine
from psserver.logs import setup

KEPT_BUFFERS = 4  # Receive buffers that a connection keeps for the next payloads.
HELLO_TIMEOUT_S = 10.0  # From being accepted to a whole first message; then it is closed.
HELLO_NBYTES_MAX = 4 << 10
SILENCE_S = 30.0  # In the middle of a frame, without a byte; then the connection is closed.
LONG_NBYTES = 256 << 10  # Of an answer: about 50 us of checksum and copy, as a switch of threads.


@dataclass(slots=True, kw_only=True)
class Unsent:
    """A frame, or what is left of one, that waits for the writing thread."""

    parts: list[memoryview]
    release: Callable[[], None] | None
    header: bytes | None = None  # Of a frame of which `parts` are the payload; its sum is not made.
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(part.nbytes for part in self.parts)

    def frame(self) -> list[memoryview]:
        """Returns what is to be sent."""
        if self.header is None:
            return self.parts
        return sockets.frame_parts(self.header, self.parts)


class Connection:
    """One connection of one worker."""

    def __init__(
        self,
        engine: Engine,
        connection: tls.Stream,
        gate: Gate | None = None,
        greeted: Callable[[], None] = lambda: None,
        *,
        peer: str = "",
        unknown: Budget | None = None,
    ) -> None:
        """Takes an accepted connection over.

        Args:
            engine: The shard.
            connection: With TLS, if there is any.
            gate: Who may do what; None: everybody everything.
            greeted: Called when the peer has said who it is.
            peer: The host at the other end, for the log.
            unknown: Bytes of headers that peers may have under way before they are known.
        """
        self._engine = engine
        self._socket = connection
        self._reader = sockets.Ahead(connection)
        self._gate = Gate() if gate is None else gate
        self._greeted = greeted
        self._pass = Pass(EVERY)
        self._lock = threading.Lock()
        self._unsent: deque[Unsent] = deque()
        self._unsent_nbytes = 0
        self._has_unsent = threading.Event()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._peer = peer
        self._unknown = unknown
        self._reserved_nbytes = 0  # Of `unknown`, for the header that is being read.
        self._sender: pb.Sender | None = None  # The worker that has spoken here, once it is known.
        self._buffers: deque[ByteArray] = deque(maxlen=KEPT_BUFFERS)
        wanted = faults.from_environment()
        self._faults = {point: wanted.at(point) for point in ("pushed", "pulled")}
        self.send = self._send_faulty if any(self._faults.values()) else self._send

    # ----- reading

    def serve(self, deadline_s: float | None = None) -> None:
        """Reads frames until the peer goes or sends something that is not one.

        Args:
            deadline_s: Of the monotonic clock, for the first one; None: soon.
        """
        if deadline_s is None:
            deadline_s = time.monotonic() + HELLO_TIMEOUT_S
        try:
            incoming = self._first(deadline_s)
            while incoming is not None:
                self._take(incoming)
                self._give_header_back()
                incoming = sockets.read_header(self._reader, reserve=self._reserve)
        except AccessError as problem:
            self._gate.refused(problem, "bulk", self._peer)
        except TransportError as problem:
            reason = str(problem)
            setup.sparsely("bulk connection ended", self._peer, level=logging.INFO, reason=reason)
        except (DecodeError, LimitError) as problem:
            setup.sparsely("bulk connection refused", self._peer, reason=str(problem))
        finally:
            self._give_header_back()
            self.close()
            if self._sender is not None:
                self._engine.suspect(self._sender)
            self._engine.requests.forget(lambda reply: getattr(reply, "connection", None) is self)

    def _first(self, deadline_s: float) -> sockets.Incoming | None:
        """Reads the first frame, which has to be a hello where a token is asked for.

        Raises:
            AccessError: The token is missing or wrong; the peer was told.
            TransportError: The connection broke.
        """
        if self._gate.is_open:
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
            if incoming is not None:
                incoming.read_into()
                self._admit(_parse(incoming))
        try:
            self._socket.settimeout(None)
            sockets.limit_silence(self._socket, SILENCE_S)
        except OSError as problem:  # The shard ends, and has closed it.
            raise TransportError(f"connection closed: {problem}") from problem
        self._greeted()
        return incoming

    def _reserve(self, nbytes: int) -> None:
        """Takes room for a long header of a peer that is not known yet.

        Raises:
            LimitError: Such peers have too much under way.
        """
        if self._unknown is not None and self._sender is None and nbytes > HELLO_NBYTES_MAX:
            self._unknown.take(nbytes, "a header of a peer that is not known yet")
            self._reserved_nbytes = nbytes

    def _give_header_back(self) -> None:
        if self._unknown is not None and self._reserved_nbytes:
            self._unknown.give(self._reserved_nbytes)
            self._reserved_nbytes = 0

    def _admit(self, envelope: pb.Envelope) -> None:
        try:
            self._pass = self._gate.admit(envelope.hello.token)
        except AccessError as error:
            SocketReply(self, envelope.id).failed(error)
            raise

    def _take(self, incoming: sockets.Incoming) -> None:
        envelope = _parse(incoming)
        reply = SocketReply(self, envelope.id)
        kind = envelope.WhichOneof("body")
        try:
            if kind != "push":
                incoming.read_into()  # No payload; and what is damaged is not believed.
            if kind == "push":
                self._push(envelope.push, incoming, reply)
            elif kind == "pull":
                self._pass.require(envelope.pull.sender.job)
                wait_s = min(envelope.pull.wait_ms / 1000, 10.0)
                self._engine.requests.on_pull(envelope.pull, reply, wait_s)
                self._sender = envelope.pull.sender
            elif kind == "hello":
                self.send(pb.Envelope(id=envelope.id, hello=pb.Hello()))
            else:
                raise DecodeError(f"bulk frame with {kind!r} in it")
        except (TransportError, DamagedError):
            raise  # Not even whom to answer is sure; the peer sends it again.
        except PacelineError as error:
            if kind == "push":
                self._engine.requests.note_refused()
            reply.failed(error)

    def _push(self, header: pb.PushHeader, incoming: sockets.Incoming, reply: SocketReply) -> None:
        nbytes = incoming.payload_nbytes
        try:
            self._pass.require(header.sender.job)
            self._engine.requests.admit(header, nbytes)
            self._sender = header.sender
        except PacelineError:
            incoming.skip()  # So that the next frame can be read.
            raise
        try:
            data = self._buffer(nbytes)
        except LimitError:
            incoming.skip()
            raise
        incoming.read_into(memoryview(data))
        release = (lambda: self._buffers.append(data)) if nbytes else None
        self._engine.requests.on_push(header, data, reply, release, here=nbytes > 0)

    def _buffer(self, nbytes: int) -> ByteArray:
        """Returns memory for a payload: one of the last ones, whose pages are there already.

        Raises:
            LimitError: Too many bytes are under way.
        """
        for _ in range(len(self._buffers)):
            buffer = self._buffers.popleft()
            if buffer.nbytes == nbytes:
                return buffer
            self._buffers.append(buffer)
        budget = self._engine.budget
        budget.take(nbytes, "a push")
        data = np.empty(nbytes, dtype=np.uint8)
        weakref.finalize(data, budget.give, nbytes)  # Wherever it is let go.
        return data

    # ----- writing

    def _send(
        self,
        envelope: pb.Envelope,
        arrays: Sequence[FloatArray | ByteArray] = (),
        release: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame, now as far as the peer takes it, the rest later; a long one later.

        Without `release`, arrays are only valid during the call: what is left of them is copied.
        """
        header = envelope.SerializeToString()
        payload = [wire.as_bytes(array) for array in arrays]
        if release is None or sum(part.nbytes for part in payload) < LONG_NBYTES:
            self._queue(sockets.frame_parts(header, payload), release)
            return
        with self._lock, contextlib.suppress(LimitError):  # The peer may take it at once.
            if not self._is_closed:
                self._leave(Unsent(parts=payload, release=release, header=header))
                return
        self._queue(sockets.frame_parts(header, payload), release)

    def _queue(self, parts: list[memoryview], release: Callable[[], None] | None = None) -> None:
        """Sends parts of a frame now as far as the peer takes them, the rest later."""
        with self._lock:
            if not self._is_closed and not self._unsent:
                parts = self._send_now(parts)
            if not self._is_closed and parts:
                try:
                    self._leave(Unsent(parts=parts, release=release))
                    return
                except LimitError as problem:
                    event = "connection closed, its peer does not read"
                    setup.sparsely(event, self._peer, reason=str(problem))
                    self._is_closed = True
                    self._cut()
        if release is not None:
            release()

    def _leave(self, unsent: Unsent) -> None:
        """Leaves a frame to the writing thread; called under the lock.

        It counts as under way. One peer may have half of that, so that something is left for all
        others.

        Raises:
            LimitError: Too many bytes wait already.
        """
        budget = self._engine.budget
        if self._unsent_nbytes + unsent.nbytes > budget.nbytes // 2:
            raise LimitError(
                f"{self._unsent_nbytes} bytes wait for it, at most {budget.nbytes // 2} may"
            )
        if self._writer is None:
            writer = threading.Thread(target=self._write, name="bulk-write", daemon=True)
            try:
                writer.start()
            except RuntimeError as problem:
                raise LimitError(f"nothing can send them: {problem}") from problem
            self._writer = writer
        budget.take(unsent.nbytes, "an answer")
        self._unsent_nbytes += unsent.nbytes
        if unsent.release is None:
            unsent.parts = [memoryview(bytes(part)) for part in unsent.parts]
        self._unsent.append(unsent)
        self._has_unsent.set()

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

    def _give_back(self, unsent: Unsent) -> None:
        self._unsent_nbytes -= unsent.nbytes
        self._engine.budget.give(unsent.nbytes)

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

    def _write(self) -> None:
        """Sends what was left here, frame by frame, as fast as the peer reads."""
        while True:
            self._has_unsent.wait()
            with self._lock:
                if self._is_closed:
                    return
                unsent = self._unsent[0]
            try:
                sockets.send_all(self._socket, unsent.frame())
            except TransportError:
                self.close()
                return
            with self._lock:
                if self._is_closed:
                    return  # `close` has given back what was being sent from.
                self._unsent.popleft()
                self._give_back(unsent)
                if not self._unsent:
                    self._has_unsent.clear()
            if unsent.release is not None:
                unsent.release()

    def close(self) -> None:
        """Ends the connection and gives back what it was sending from."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._unsent)
            self._unsent.clear()
            for unsent in dropped:
                self._give_back(unsent)
            self._buffers = deque(maxlen=0)  # What is let go from now on is not kept.
            self._has_unsent.set()
        for unsent in dropped:
            if unsent.release is not None:
                unsent.release()
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
        failure = pb.Failure(kind=type(error).__name__, message=printable(str(error), keep="\n"))
        self.connection.send(pb.Envelope(id=self._id, failed=failure))


def _parse(incoming: sockets.Incoming) -> pb.Envelope:
    envelope = pb.Envelope()
    try:
        envelope.ParseFromString(incoming.header)
    except ProtobufDecodeError as problem:
        raise DecodeError(f"header of {len(incoming.header)} bytes is no message") from problem
    return envelope
