"""Connecting to a listener (listener.py): TCP with or without TLS, or a Unix socket; then hello.

The hello carries the token. Its answer is the listener's consent: until then nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore import errors
from pscore.errors import DecodeError, PacelineError, RemoteProtocolError, TransportError
from pscore.net import sockets, tls
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.text import printable

CONNECT_TIMEOUT_S = 5.0
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a Unix socket's peer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The addresses of one listener, and the means to be admitted."""

    host: str
    port: int  # TCP; 0: none.
    local: str  # Name of the abstract Unix socket; empty if the listener is on another host.
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None  # TLS context of the TCP port.


def connect(endpoint: Endpoint, *, is_local: bool) -> tls.Stream:
    """Returns a connection on which the listener has answered the hello.

    Args:
        is_local: Connects to the Unix socket; else to the TCP port.

    Raises:
        TransportError: Nothing listens there, or a process of another user.
        RemoteProtocolError: The listener refuses the token or the certificate; says what to do.
    """
    where = endpoint.local if is_local else f"{endpoint.host}:{endpoint.port}"
    connection: tls.Stream | None = None
    try:
        connection = connect_locally(endpoint.local) if is_local else _connect_tcp(endpoint)
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
        raise TransportError(f"no data connection to {where}: {problem}") from problem
    return connection


def connect_locally(name: str) -> socket.socket:
    """Returns a connection to an abstract Unix socket of a process of the same user.

    Raises:
        OSError: Nothing listens there, or a process of another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(b"\0" + name.encode())
        uid = peer_user(connection)
        if uid != os.geteuid():
            raise OSError(f"the peer runs as user {uid}, this process as user {os.geteuid()}")
    except OSError:
        connection.close()
        raise
    sockets.tune(connection)
    return connection


def peer_user(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end of a Unix socket.

    Raises:
        OSError: The connection is closed.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    return int(PEER_CREDENTIALS.unpack(raw)[1])


def parse_envelope(header: bytes) -> pb.Envelope:
    """Returns the message in a frame's header.

    Raises:
        DecodeError: The header is no `Envelope`.
    """
    envelope = pb.Envelope()
    try:
        envelope.ParseFromString(header)
    except ProtobufDecodeError as problem:
        raise DecodeError(f"header of {len(header)} bytes is not a message") from problem
    return envelope


def failure_of(error: PacelineError) -> pb.Failure:
    """Returns the message by which `error` travels to the peer."""
    return pb.Failure(kind=type(error).__name__, message=printable(str(error), keep="\n"))


def error_of(failure: pb.Failure) -> PacelineError:
    """Returns the error that a peer has sent; `RemoteProtocolError` if its class is unknown."""
    kind = getattr(errors, failure.kind, RemoteProtocolError)
    known = isinstance(kind, type) and issubclass(kind, PacelineError)
    return (kind if known else RemoteProtocolError)(printable(failure.message, keep="\n"))


def _greet(connection: tls.Stream, token: str) -> None:
    """Sends the hello and waits for its answer."""
    hello = pb.Envelope(hello=pb.Hello(token=token)).SerializeToString()
    with contextlib.suppress(TransportError):  # The reason is in the bytes that can still be read.
        sockets.send_all(connection, sockets.frame_parts(hello, ()))
    incoming = sockets.read_header(connection)
    if incoming is None:
        raise TransportError("it was closed before an answer came")
    incoming.read_into()
    answer = parse_envelope(incoming.header)
    if answer.WhichOneof("body") == "failed":
        raise error_of(answer.failed)


def _connect_tcp(endpoint: Endpoint) -> tls.Stream:
    connection = sockets.connect(endpoint.host, endpoint.port, CONNECT_TIMEOUT_S)
    if endpoint.tls is None:
        return connection
    return tls.secure(connection, endpoint.tls, host=endpoint.host)
