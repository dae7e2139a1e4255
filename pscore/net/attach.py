"""Shared memory between two processes of one host and user: descriptors travel once, both ways.

One connects to a Unix socket of the other for this (`Listener`, `others`), passes the descriptor of
a segment of its own (pscore/memory/segment.py), and receives that of a segment of the other's.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import DecodeError, PacelineError, RemoteProtocolError, TransportError
from pscore.memory.segment import Segment
from pscore.net import wire
from pscore.net.endpoint import (
    CONNECT_TIMEOUT_S,
    Endpoint,
    connect_locally,
    error_of,
    failure_of,
    parse_envelope,
)
from pscore.pb.ps.v1 import data_pb2 as pb

ATTACH_SUFFIX = ".attach"  # Suffix of the Unix socket's name.
ATTACH_NBYTES_MAX = 1 << 16

OnAttach = Callable[[pb.Attach, int], Segment]


def attach(
    endpoint: Endpoint,
    request: pb.Attach,
    own: Segment,
    nbytes: int,
    *,
    may_be_file: bool = False,
) -> Segment:
    """Passes the descriptor of a segment; returns that of the listener's answer, mapped.

    Args:
        request: The sender and purpose; token and length are set here.
        may_be_file: Whether that may be a file of this user (`Segment.attach`).

    Raises:
        TransportError: The connection failed, or the answer cannot be mapped.
        RemoteProtocolError: The listener refused, or answered something else.
    """
    request.token, request.nbytes = endpoint.token, own.nbytes
    frame = wire.encode(pb.Envelope(id=1, attach=request).SerializeToString())
    try:
        with connect_locally(endpoint.local + ATTACH_SUFFIX) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            socket.send_fds(connection, [frame], [own.fd])
            answer, fds, _, _ = socket.recv_fds(connection, ATTACH_NBYTES_MAX, 1)
            if not answer:  # The listener's process has ended meanwhile.
                raise ConnectionResetError("the connection was closed without an answer")
    except OSError as problem:
        where = endpoint.local + ATTACH_SUFFIX
        raise TransportError(f"cannot share memory through {where}: {problem}") from problem
    try:
        envelope = parse_envelope(bytes(wire.decode(answer)[0]))
        if envelope.WhichOneof("body") == "failed":
            raise error_of(envelope.failed)
        if len(fds) != 1 or envelope.attached.nbytes != nbytes:
            raise RemoteProtocolError(
                f"{envelope.attached.nbytes} bytes of shared memory in the answer, {nbytes} wanted"
            )
    except PacelineError:
        for fd in fds:
            os.close(fd)
        raise
    try:
        return Segment.attach(fds[0], nbytes, may_be_file=may_be_file)
    except OSError as problem:
        raise TransportError(f"cannot map shared memory: {problem}") from problem


class Attachments:
    """The listening half: exchanges descriptors with processes of this host."""

    def __init__(self, on_attach: OnAttach, on_problem: Callable[[str], None]) -> None:
        """Prepares to serve.

        Args:
            on_attach: Takes a request and the descriptor that came with it, which is closed
                afterwards; returns the segment whose descriptor is the answer, or raises a
                `PacelineError`, which the other process receives.
            on_problem: Notes why a connection was closed without an answer.
        """
        self._on_attach = on_attach
        self._on_problem = on_problem

    def serve(self, accepted: socket.socket) -> None:
        """Receives a descriptor and sends one back; serves a connection of a `Listener`."""
        envelope, reply = pb.Envelope(), pb.Envelope()
        fds: list[int] = []
        try:
            frame, fds, _, _ = socket.recv_fds(accepted, ATTACH_NBYTES_MAX, 1)
            envelope.ParseFromString(bytes(wire.decode(frame)[0]))
            if len(fds) != 1 or envelope.WhichOneof("body") != "attach":
                raise DecodeError("an attachment must bring one file descriptor")
            shared = self._on_attach(envelope.attach, fds[0])
            reply.attached.nbytes = shared.nbytes
            socket.send_fds(accepted, [wire.encode(reply.SerializeToString())], [shared.fd])
        except PacelineError as error:
            reply.failed.CopyFrom(failure_of(error))
            with contextlib.suppress(OSError):  # The other process may have closed.
                accepted.sendall(wire.encode(reply.SerializeToString()))
        except (OSError, ProtobufDecodeError) as problem:
            self._on_problem(str(problem))
        finally:
            for fd in fds:
                os.close(fd)
