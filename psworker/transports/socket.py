"""The bulk data plane: frames on plain sockets, and shared memory on the same host.

The other side is psserver/service/data_socket.py. Two connections per shard, one for pushes and one
for pulls, so that a small request never stands behind four megabytes going the other way. Over TCP
within one host, where cores are the limit and not the link, there are two for pushes: one brings a
slice while the shard makes the step of another's. What has not been answered is remembered, and
sent again when a connection has broken and somebody answers anew: every request may come twice, the
second time changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore import errors
from pscore.errors import DecodeError, PacelineError, RemoteProtocolError, TransportError
from pscore.memory import streaming
from pscore.memory.segment import Segment, WeightsMap
from pscore.net import faults, sockets, tls, wire
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.text import printable
from pscore.types import FloatArray, IntArray, SliceSpec
from psworker.transports.base import PullCall, PushCall, Transport
from psworker.transports.daemon_threads import Crew
from psworker.transports.retry import Patience

CONNECT_TIMEOUT_S = 5.0
CREDENTIALS = struct.Struct("3i")
ATTACH_SUFFIX = ".attach"
ATTACHED_NBYTES_MAX = 1 << 16
NEAR_UPS = 2  # Connections for pushes over TCP within one host.

Call = PushCall | PullCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a shard's bulk data plane listens."""

    host: str
    port: int
    local: str  # Abstract Unix socket, if this host can reach it; else empty.
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None  # Of the TCP port.


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A table whose gradients and weights lie in shared memory."""

    sender: pb.Sender
    grads: Segment
    layout: WeightsMap
    specs: Sequence[SliceSpec]
    weights: Segment | None = None
    # Of each slice, its two buffers and their versions: of one segment, whoever reads meanwhile.
    maps: dict[int, tuple[list[FloatArray], IntArray]] = field(default_factory=dict)
    # Of weights; whether they are finite is moot.
    copy: Callable[[FloatArray, FloatArray], bool] = field(init=False)

    def __post_init__(self) -> None:
        self.copy = streaming.copier(4 * sum(spec.numel for spec in self.specs))


class Channel:
    """One connection that is made anew when it breaks."""

    def __init__(self, connect: Callable[[], tls.Stream], patience: Patience, name: str) -> None:
        """Connects on its own thread.

        Args:
            connect: Returns a connected socket, or raises `TransportError`.
            patience: How connecting is repeated.
            name: For the thread.
        """
        self._connect = connect
        self._patience = patience
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Call, bytes, Sequence[memoryview]]] = {}
        self._lock = threading.Lock()  # Of `_open`.
        self._sending = threading.Lock()  # Of `_socket` for sending.
        self._socket: tls.Stream | None = None
        self._is_closed = False
        self._failure: PacelineError | None = None
        self._send_all = faults.sender(faults.from_environment().at(name), sockets.send_all)
        self.take: Callable[[pb.Envelope, Call, sockets.Incoming], bool] = lambda *_: True
        self._thread = threading.Thread(target=self._run, name=f"bulk-{name}", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def request(
        self, call: Call, envelope: pb.Envelope, payload: Sequence[memoryview] = ()
    ) -> None:
        """Sends a request; its reply, whenever it comes, goes to `take`."""
        number = envelope.id = next(self._numbers)
        header = envelope.SerializeToString()
        with self._lock:
            if self._failure is None:
                self._open[number] = (call, header, payload)
        if self._failure is not None:
            call.done.set_exception(self._failure)
            return
        with self._sending:
            if self._socket is not None:
                self._send(header, payload)

    def close(self) -> None:
        """Ends the connection; what is under way fails."""
        self._is_closed = True
        with self._sending:
            self._shut()
        if self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    def _send(self, header: bytes, payload: Sequence[memoryview]) -> None:
        """Sends under the lock; a connection that breaks is left to the reading thread."""
        assert self._socket is not None
        try:
            self._send_all(self._socket, sockets.frame_parts(header, payload))
        except TransportError:
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                self._socket.close()

    # ----- the reading thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                connection = self._patience.insist(self._connect)
                with connection:
                    self._resume(connection)
                    self._read(connection)
                with self._sending:
                    self._socket = None
            self._fail(TransportError("the connection was closed"))
        except PacelineError as error:
            self._fail(error)

    def _resume(self, connection: tls.Stream) -> None:
        """Sends again what has not been answered, in order."""
        with self._sending:
            self._socket = connection
            with self._lock:
                unanswered = [item for _, item in sorted(self._open.items())]
            for _, header, payload in unanswered:
                self._send(header, payload)

    def _read(self, connection: tls.Stream) -> None:
        reader = sockets.Ahead(connection)
        try:
            while (incoming := sockets.read_header(reader)) is not None:
                self._dispatch(incoming)
        except (TransportError, DecodeError):
            return  # Connect again; what was under way is asked again.

    def _dispatch(self, incoming: sockets.Incoming) -> None:
        try:
            envelope = pb.Envelope.FromString(incoming.header)
        except ProtobufDecodeError as problem:
            raise DecodeError(f"header of {len(incoming.header)} bytes is no message") from problem
        with self._lock:
            item = self._open.get(envelope.id)
        if item is None:
            incoming.skip()
            return
        call = item[0]
        if envelope.WhichOneof("body") == "failed":
            incoming.read_into()
            self._answered(envelope.id)
            call.done.set_exception(_error_of(envelope.failed))
        elif self.take(envelope, call, incoming):
            self._answered(envelope.id)
        else:
            self._answered(envelope.id)
            assert isinstance(call, PullCall)
            self.request(call, pb.Envelope(pull=call.header))

    def _answered(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)

    def _fail(self, error: PacelineError) -> None:
        with self._lock:
            self._failure = error
            unanswered = list(self._open.values())
            self._open.clear()
        for call, _, _ in unanswered:
            if not call.done.done():
                call.done.set_exception(error)


class Up(NamedTuple):
    """A connection for pushes, and the thread that makes and sends them."""

    channel: Channel
    sender: Crew


class SocketTransport(Transport):
    """TCP, or a Unix socket and shared memory."""

    name: ClassVar[str] = "tcp"

    def __init__(
        self, endpoint: Callable[[], Endpoint], patience: Patience, *, is_local: bool
    ) -> None:
        """Connects.

        Args:
            endpoint: Returns where the shard listens now; asked again when a connection breaks.
            patience: How connecting is repeated.
            is_local: Use the Unix socket, and shared memory.
        """
        self._endpoint = endpoint
        self.shares_memory = is_local
        self._attachments: dict[int, Attachment] = {}  # By table.
        self._patience = patience
        self._widening = threading.Lock()
        self._is_closed = False
        self._ups: list[Up] = []  # A slice's push takes the one that its index falls on.
        self._widen(1)
        self._down = Channel(self._connect, patience, "pull")
        self._down.take = self._pulled
        self._down.start()

    # ----- Transport

    def push(self, call: PushCall) -> None:
        """Sends one slice; a notice at once, unless it is of what a device has not copied yet."""
        if call.is_shared and not call.waits:
            self._push_now(call)
        else:
            self._up(call).sender.submit(lambda: self._push_now(call), Future())

    def pull(self, call: PullCall) -> None:
        """Asks for one slice."""
        call.header.shared = call.header.sender.table in self._attachments
        self._down.request(call, pb.Envelope(pull=call.header))

    def attach(self, sender: pb.Sender, grads: Segment, specs: Sequence[SliceSpec]) -> None:
        """Shares a table's gradients with the shard, and maps its weights.

        Raises:
            PacelineError: The shard cannot map them.
        """
        attachment = Attachment(sender=sender, grads=grads, layout=WeightsMap(specs), specs=specs)
        _attach(self._endpoint(), attachment)
        self._attachments[sender.table] = attachment

    def close(self) -> None:
        """Ends all connections."""
        with self._widening:
            self._is_closed = True
        for up in self._ups:
            up.sender.close()
        for up in self._ups:
            up.channel.close()
        self._down.close()
        for up in self._ups:
            up.sender.join()

    # ----- inside

    def _connect(self) -> tls.Stream:
        endpoint = self._endpoint()
        connection = connect(endpoint, is_local=self.shares_memory)
        if not self.shares_memory and sockets.is_within_host(connection):
            self._widen(NEAR_UPS)
        for attachment in list(self._attachments.values()):
            _attach(endpoint, attachment)
        return connection

    def _widen(self, num_ups: int) -> None:
        """Opens connections for pushes until there are so many."""
        with self._widening:
            while len(self._ups) < num_ups and not self._is_closed:
                channel = Channel(self._connect, self._patience, "push")
                channel.take = self._pushed
                channel.start()
                self._ups.append(Up(channel, Crew(1, "bulk-send")))

    def _up(self, call: PushCall) -> Up:
        """Returns what a push is sent by.

        One slice's pushes come one by one, each when the former is acknowledged: they stay in
        order, though there may be more connections by then.
        """
        return self._ups[call.slice % len(self._ups)]

    def _push_now(self, call: PushCall) -> None:
        try:
            header, payload = call.make()
        except PacelineError as problem:
            call.done.set_exception(problem)
            return
        self._up(call).channel.request(call, pb.Envelope(push=header), payload)

    def _pushed(self, envelope: pb.Envelope, call: Call, incoming: sockets.Incoming) -> bool:
        incoming.read_into()
        assert isinstance(call, PushCall)
        call.done.set_result(envelope.pushed)
        return True

    def _pulled(self, envelope: pb.Envelope, call: Call, incoming: sockets.Incoming) -> bool:
        """Lands an answer; returns False if it has to be asked again."""
        assert isinstance(call, PullCall)
        reply = envelope.pulled
        if not reply.ready:
            incoming.read_into()
            call.put_off(reply)
            return False
        if reply.buffer:
            incoming.read_into()
            if call.copy_on_wait:
                call.fetch = partial(self._copy, call, reply)
            elif not self._copy(call, reply):
                return False
        elif call.copy_on_wait:  # A slow reader of another version has the buffers that are mapped.
            payload = bytearray(incoming.payload_nbytes)
            incoming.read_into(memoryview(payload))
            call.fetch = partial(_land, call, reply, memoryview(payload))
        else:
            incoming.read_into(*call.targets(reply, incoming.payload_nbytes))
            if not call.settle(reply):
                return False
        call.done.set_result(reply)
        return True

    def _copy(self, call: PullCall, reply: pb.PullReply) -> bool:
        """Copies weights from shared memory; returns False if they changed meanwhile."""
        attachment = self._attachments[call.header.sender.table]
        buffers, versions = attachment.maps[call.header.slice]
        number = reply.buffer - 1
        attachment.copy(buffers[number], call.weights)
        return bool(versions[number] == reply.version)


def _land(call: PullCall, reply: pb.PullReply, payload: memoryview) -> bool:
    call.land(reply, payload)
    return True


def connect(endpoint: Endpoint, *, is_local: bool) -> tls.Stream:
    """Returns a bulk connection on which the shard has answered our hello.

    Raises:
        TransportError: Nobody listens there, or somebody who is not this user.
        RemoteProtocolError: The shard does not let us in; says what to do.
    """
    where = endpoint.local if is_local else f"{endpoint.host}:{endpoint.port}"
    connection: tls.Stream | None = None
    try:
        connection = _connect_locally(endpoint.local) if is_local else _connect_tcp(endpoint)
        connection.settimeout(CONNECT_TIMEOUT_S)
        _greet(connection, endpoint.token)
        connection.settimeout(None)
    except (OSError, TransportError, RemoteProtocolError) as problem:
        if connection is not None:
            connection.close()
        cause = problem.__cause__ if isinstance(problem, TransportError) else problem
        if isinstance(cause, OSError) and (reason := tls.explain(cause, where)):
            raise reason from problem
        if isinstance(problem, RemoteProtocolError):
            raise
        raise TransportError(f"no bulk connection to {where}: {problem}") from problem
    return connection


def _greet(connection: tls.Stream, token: str) -> None:
    """Says who we are, and waits for the answer.

    Raises:
        TransportError: There is none.
        RemoteProtocolError: The shard refuses.
    """
    hello = pb.Envelope(hello=pb.Hello(token=token)).SerializeToString()
    with contextlib.suppress(TransportError):  # Why it was closed stands in what can be read.
        sockets.send_all(connection, sockets.frame_parts(hello, ()))
    incoming = sockets.read_header(connection)
    if incoming is None:
        raise TransportError("it was closed before an answer came")
    incoming.read_into()
    answer = pb.Envelope.FromString(incoming.header)
    if answer.WhichOneof("body") == "failed":
        raise _error_of(answer.failed)


def _connect_tcp(endpoint: Endpoint) -> tls.Stream:
    connection = sockets.connect(endpoint.host, endpoint.port, CONNECT_TIMEOUT_S)
    if endpoint.tls is None:
        return connection
    return tls.secure(connection, endpoint.tls, host=endpoint.host)


def _connect_locally(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(b"\0" + name.encode())
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        uid = CREDENTIALS.unpack(raw)[1]
        if uid != os.geteuid():
            raise OSError(f"the shard runs as user {uid}, this worker as user {os.geteuid()}")
    except OSError:
        connection.close()
        raise
    sockets.tune(connection)
    return connection


def _attach(endpoint: Endpoint, attachment: Attachment) -> None:
    """Passes the gradients' descriptor to the shard and maps the weights it answers with.

    Raises:
        TransportError: The connection failed.
        RemoteProtocolError: The shard refused, or answered something else.
    """
    request = pb.Envelope(
        id=1,
        attach=pb.Attach(
            sender=attachment.sender, nbytes=attachment.grads.nbytes, token=endpoint.token
        ),
    )
    try:
        with _connect_locally(endpoint.local + ATTACH_SUFFIX) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            frame = wire.encode(request.SerializeToString())
            socket.send_fds(connection, [frame], [attachment.grads.fd])
            answer, fds, _, _ = socket.recv_fds(connection, ATTACHED_NBYTES_MAX, 1)
    except OSError as problem:
        raise TransportError(f"cannot share memory with the shard: {problem}") from problem
    envelope = pb.Envelope.FromString(bytes(wire.decode(answer)[0]))
    if envelope.WhichOneof("body") == "failed":
        raise _error_of(envelope.failed)
    if len(fds) != 1 or envelope.attached.nbytes != attachment.layout.nbytes:
        for fd in fds:
            os.close(fd)
        raise RemoteProtocolError(
            f"the shard shares {envelope.attached.nbytes} bytes of weights, "
            f"{attachment.layout.nbytes} wanted"
        )
    weights = Segment.attach(fds[0], envelope.attached.nbytes)
    attachment.weights = weights
    for spec in attachment.specs:
        layout = attachment.layout
        maps = layout.buffers(weights, spec.index), layout.versions(weights, spec.index)
        attachment.maps[spec.index] = maps


def _error_of(failure: pb.Failure) -> PacelineError:
    kind = getattr(errors, failure.kind, RemoteProtocolError)
    known = isinstance(kind, type) and issubclass(kind, PacelineError)
    return (kind if known else RemoteProtocolError)(printable(failure.message, keep="\n"))
