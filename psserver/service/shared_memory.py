"""Shared memory with workers of the same host and user: file descriptors travel once, both ways.

A worker connects to a Unix socket of its own for this, sends the descriptor of its gradients, and
receives that of the table's weights (pscore/memory/segment.py).
"""

from __future__ import annotations

import contextlib
import os
import socket

from google.protobuf.message import DecodeError as ProtobufDecodeError

from pscore.errors import DecodeError, PacelineError
from pscore.net import wire
from pscore.net.endpoint import failure_of
from pscore.net.listener import peer_of
from pscore.pb.ps.v1 import data_pb2 as pb
from psserver.access.authorizer import Authorizer
from psserver.engine.engine import Engine
from psserver.logs import setup

ATTACH_SUFFIX = ".attach"  # Suffix of the Unix socket's name.
ATTACH_NBYTES_MAX = 1 << 16


class Attachments:
    """Exchanges descriptors with workers."""

    def __init__(self, engine: Engine, authorizer: Authorizer) -> None:
        """Shares the memory of `engine`; `authorizer` checks tokens."""
        self._engine = engine
        self._authorizer = authorizer

    def serve(self, accepted: socket.socket) -> None:
        """Receives the descriptor of a worker's gradients and sends that of the weights."""
        envelope, reply = pb.Envelope(), pb.Envelope()
        fds: list[int] = []
        try:
            frame, fds, _, _ = socket.recv_fds(accepted, ATTACH_NBYTES_MAX, 1)
            envelope.ParseFromString(bytes(wire.decode(frame)[0]))
            if len(fds) != 1 or envelope.WhichOneof("body") != "attach":
                raise DecodeError("an attachment must bring one file descriptor")
            request = envelope.attach
            self._authorizer.admit(request.token).require(request.sender.job)
            weights = self._engine.attach(request.sender, fds.pop(), request.nbytes)
            reply.attached.nbytes = weights.nbytes
            answer = wire.encode(reply.SerializeToString())
            socket.send_fds(accepted, [answer], [weights.fd])
        except PacelineError as error:
            reply.failed.CopyFrom(failure_of(error))
            with contextlib.suppress(OSError):  # The worker may have closed.
                accepted.sendall(wire.encode(reply.SerializeToString()))
        except (OSError, ProtobufDecodeError) as problem:
            setup.sparsely("attachment refused", peer_of(accepted), reason=str(problem))
        finally:
            for fd in fds:
                os.close(fd)
