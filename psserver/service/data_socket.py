"""The socket data plane of a shard: frames become requests to the engine.

A worker opens two or three connections per shard (pushes and pulls apart), over TCP or, on the same
host, over an abstract Unix socket. Each frame's header is an `Envelope` (proto/ps/v1/data.proto);
a reply repeats the request's id, and replies come in any order. Payloads are received in place and
sent from where they are. With shared memory (shared_memory.py) frames carry notices only.

Connections and their limits are pscore/net's; this module knows pushes and pulls.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pscore.errors import ConfigError, DecodeError, LimitError, ThreadError, TransportError
from pscore.memory.segment import Segment
from pscore.net.attach import ATTACH_SUFFIX, Attachments
from pscore.net.budget import Budget
from pscore.net.connection import Connection
from pscore.net.listener import THIS_HOST, Listener
from pscore.net.shared_rate import SharedRate
from pscore.net.sockets import Incoming
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import ByteArray, FloatArray
from psserver.access.authorizer import Authorizer, Grant
from psserver.engine.engine import Engine
from psserver.engine.requests import NO_BYTES
from psserver.logs.setup import sparsely

WAIT_S_MAX = 10.0  # A pull is answered within this time, ready or not.


def make_listener(
    engine: Engine,
    host: str,
    port: int,
    local: str,
    *,
    authorizer: Authorizer | None = None,
    context: ssl.SSLContext | None = None,
    fetches: Fetches | None = None,
) -> Listener:
    """Binds the socket data plane of a shard; nothing is accepted before `start`.

    Args:
        port: Port to listen on; 0 for a free one.
        local: Name of the abstract Unix socket.
        authorizer: Checks tokens; None: none is needed.
        context: TLS of the TCP port; None: none.
        fetches: Answers readers of published weights; None: there are none.

    Raises:
        OSError: An address is not available.
    """
    authorizer = Authorizer() if authorizer is None else authorizer
    service = DataService(engine, authorizer, fetches)
    others = {ATTACH_SUFFIX: Attachments(service.attach, service.note_refused).serve}
    return Listener(service, host, port, local, context=context, others=others)


class Fetches(Protocol):
    """Answers readers of published weights."""

    rate: SharedRate  # The rate that those on other hosts share.
    answers: Budget  # Bytes of answers that may be under way, apart from those of workers.

    def fetch(self, header: pb.FetchHeader) -> tuple[pb.FetchReply, list[ByteArray]]:
        """Returns an answer, and arrays that are not changed any more."""

    def connect(self, number: int, tell: Callable[[str], None]) -> None:
        """Notes a connection of a reader.

        Args:
            tell: Called under the engine's lock with the address where the shard will be.
        """

    def disconnect(self, number: int, tell: Callable[[str], None]) -> None:
        """Notes that a connection of a reader has ended."""


class DataService:
    """Admits workers to a shard and makes a handler for each of their connections."""

    log = staticmethod(sparsely)

    def __init__(
        self, engine: Engine, authorizer: Authorizer | None = None, fetches: Fetches | None = None
    ) -> None:
        """Serves `engine`.

        Args:
            authorizer: Checks tokens; None: none is needed.
            fetches: Answers readers of published weights; None: there are none.
        """
        self._engine = engine
        self.budget = engine.budget
        self.queued_nbytes_min = engine.placement.queued_nbytes_min
        self._fetches = fetches
        self._authorizer = Authorizer() if authorizer is None else authorizer

    @property
    def needs_token(self) -> bool:
        """Whether a worker must say hello with a token first."""
        return not self._authorizer.is_open

    def admit(self, connection: Connection, token: str) -> DataHandler:
        """Returns the handler of a new connection.

        Raises:
            AccessError: The token is missing or wrong.
        """
        allowed = self._authorizer.admit(token)
        return DataHandler(self._engine, connection, allowed, self._fetches)

    def attach(self, request: pb.Attach, fd: int) -> Segment:
        """Maps a worker's gradients, and returns the segment of the weights for it to map.

        Raises:
            AccessError: The token is missing or wrong.
            RemoteProtocolError: The segment is not of the table's size, or cannot be mapped.
        """
        self._authorizer.admit(request.token).require(request.sender.job)
        return self._engine.attach(request.sender, fd, request.nbytes)

    def note_refused(self, reason: str) -> None:
        """Logs a worker's attempt to share memory that came to nothing."""
        self.log("attachment refused", THIS_HOST, reason=reason)

    def broke(self, error: ThreadError) -> None:
        """Does nothing: the thread's error goes on, and ends the shard (daemon.py)."""


class DataHandler:
    """Carries the pushes and pulls of one connection to the engine."""

    def __init__(
        self, engine: Engine, connection: Connection, allowed: Grant, fetches: Fetches | None
    ) -> None:
        """Handles `connection`, whose peer may do what `allowed` says."""
        self._fetches = fetches
        self._engine = engine
        self._requests = engine.requests
        self._connection = connection
        self._grant = allowed
        self._sender: pb.Sender | None = None  # The last worker that has spoken here.
        self._reader = 0  # Number of the reader of published weights; 0: none.
        self._is_answering = False  # Whether an answer to it is being sent.
        self._next: str | None = None  # An address of which it has yet to be told.

    def on_frame(self, envelope: pb.Envelope, incoming: Incoming) -> None:
        """Passes one request to the engine, which answers it now or later.

        Raises:
            PacelineError: The request is refused.
        """
        kind = envelope.WhichOneof("body")
        if kind == "push":
            reply = SocketReply(
                self._connection, envelope.id, is_for_both=envelope.push.HasField("pull")
            )
            self._push(envelope.push, incoming, reply)
            return
        if kind == "pull":
            self._pull(envelope.pull, incoming, SocketReply(self._connection, envelope.id))
            return
        incoming.read_into()  # There is no payload. Reading to the end verifies the checksum.
        if kind == "fetch":
            self._fetch(envelope)
            return
        raise DecodeError(f"data frame with {kind!r} in it")

    def on_refused(self, envelope: pb.Envelope) -> None:
        """Counts a push that was refused."""
        if envelope.WhichOneof("body") == "push":
            self._requests.note_refused()

    def on_end(self) -> None:
        """Drops the connection's pulls; its worker is suspected to be dead."""
        if self._fetches is not None and self._reader:
            self._fetches.disconnect(self._reader, self._tell)
        if self._sender is not None:
            self._engine.suspect(self._sender)
        connection = self._connection
        self._requests.forget(lambda reply: getattr(reply, "connection", None) is connection)

    def _pull(self, header: pb.PullHeader, incoming: Incoming, reply: SocketReply) -> None:
        data = NO_BYTES
        if incoming.payload_nbytes:
            self._grant.require(header.sender.job)
            self._requests.admit(header, incoming.payload_nbytes)
            data = self._connection.buffers.take(incoming.payload_nbytes, "a pull")
        incoming.read_into(memoryview(data))  # Reading to the end verifies the checksum.
        self._grant.require(header.sender.job)
        self._requests.on_pull(header, reply, min(header.wait_ms / 1000, WAIT_S_MAX), data)
        self._note_sender(header.sender)

    def _fetch(self, envelope: pb.Envelope) -> None:
        """Answers a reader of published weights, which has connections of its own."""
        self._grant.require_read(envelope.fetch.job)
        fetches = self._fetches
        if fetches is None:
            raise ConfigError("weights are not published here")
        if self._sender is not None:
            raise ConfigError("this connection is a worker's: a reader opens one of its own")
        reply, arrays = fetches.fetch(envelope.fetch)
        if not self._reader:
            self._reader = envelope.fetch.reader
            fetches.connect(self._reader, self._tell)
        if reply.lineage:
            self._connection.note_known()
        nbytes = sum(array.nbytes for array in arrays)
        try:
            fetches.answers.take(nbytes, "an answer to a reader")
        except LimitError as problem:
            raise TransportError(str(problem)) from problem  # It connects again, and asks again.
        with self._engine.lock:
            self._is_answering = True
        try:
            answer = pb.Envelope(id=envelope.id, fetched=reply)
            self._connection.send_by_turns(answer, arrays, fetches.rate)
        finally:
            fetches.answers.give(nbytes)
            with self._engine.lock:
                self._is_answering = False
                if self._next is not None:
                    self._tell(self._next)

    def _tell(self, address: str) -> None:
        """Sends the reader the address where the shard will be, behind an answer under way.

        Its kernel keeps the frame until it reads, also when this process has ended.
        """
        self._next = address if self._is_answering else None
        if self._next is None:
            self._connection.send(pb.Envelope(next=pb.NextAddress(address=address)))

    def _push(self, header: pb.PushHeader, incoming: Incoming, reply: SocketReply) -> None:
        nbytes = incoming.payload_nbytes
        self._grant.require(header.sender.job)
        data, release, buffers = NO_BYTES, None, self._connection.buffers
        if nbytes:
            self._requests.admit(header, nbytes)
            self._note_sender(header.sender)
            data = buffers.take(nbytes, "a push")
            release = partial(buffers.give, data)
        incoming.read_into(memoryview(data))
        wait_s = min(header.pull.wait_ms / 1000, WAIT_S_MAX) if reply.is_for_both else None
        self._requests.on_push(header, data, reply, release, here=nbytes > 0, pull_wait_s=wait_s)
        self._note_sender(header.sender)

    def _note_sender(self, sender: pb.Sender) -> None:
        """Records a worker that the engine knows."""
        self._sender = sender
        self._connection.note_known()


class SocketReply:
    """Answers one request on its connection.

    A push and its pull in one request are answered with the pull. If the push is not counted by
    then, its sender repeats it: the answer to this request is over.
    """

    __slots__ = ("_id", "_pushed", "connection", "is_for_both")

    def __init__(self, connection: Connection, number: int, *, is_for_both: bool = False) -> None:
        """Answers request `number`; `is_for_both`: it is a push and a pull."""
        self.connection = connection
        self.is_for_both = is_for_both
        self._id = number
        self._pushed: pb.PushReply | None = None  # Waits for the answer to the pull.

    def pushed(self, reply: pb.PushReply) -> None:
        """Answers a push."""
        if self.is_for_both:
            self._pushed = reply
        else:
            self.connection.send(pb.Envelope(id=self._id, pushed=reply))

    def pulled(
        self,
        reply: pb.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull."""
        if self._pushed is not None:
            reply.pushed.CopyFrom(self._pushed)
        self.connection.send(pb.Envelope(id=self._id, pulled=reply), arrays, release)
