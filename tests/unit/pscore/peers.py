"""Two peers on the socket plane, with pscore.net only: each listens, and each sends tensors.

As a program, it is one peer in a process of its own: it answers on a Unix socket until its standard
input ends, and then prints the modules of the other packages that it has loaded.
"""

from __future__ import annotations

import hmac
import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pscore.errors import AccessError, LimitError, ThreadError
from pscore.net import endpoint, sockets, tls
from pscore.net.budget import Budget
from pscore.net.channel import FrameChannel
from pscore.net.connection import Connection
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import ByteArray

TENSOR_NBYTES_MAX = 8 << 20


class Handler:
    """Adds one to each byte of a tensor that comes, and sends it back."""

    def __init__(self, service: Peer, connection: Connection) -> None:
        self._service = service
        self._connection = connection

    def on_frame(self, envelope: pb.Envelope, incoming: sockets.Incoming) -> None:
        if incoming.payload_nbytes > TENSOR_NBYTES_MAX:
            raise LimitError(f"tensor of {incoming.payload_nbytes} bytes")
        data = self._connection.buffers.take(incoming.payload_nbytes, "a tensor")
        incoming.read_into(memoryview(data))
        self._connection.note_known()
        self._service.seen.append(envelope.push.step)
        reply = pb.Envelope(id=envelope.id, pushed=pb.PushReply(version=envelope.push.step))
        if data.nbytes:
            self._connection.send(reply, [data + np.uint8(1)], lambda: None)
        else:
            self._connection.send(reply)

    def on_refused(self, envelope: pb.Envelope) -> None:
        self._service.num_refused += 1

    def on_end(self) -> None:
        self._service.num_ended += 1


class Peer:
    """A service with one token for all peers; empty: none is needed."""

    def __init__(self, token: str = "", budget_nbytes: int = 1 << 30) -> None:
        self._token = token
        self.budget = Budget(budget_nbytes, "")
        self.lines: list[str] = []
        self.failures: list[ThreadError] = []
        self.seen: list[int] = []
        self.num_refused = 0
        self.num_ended = 0

    @property
    def queued_nbytes_min(self) -> int:
        return 256 << 10

    @property
    def needs_token(self) -> bool:
        return bool(self._token)

    def admit(self, connection: Connection, token: str) -> Handler:
        if not hmac.compare_digest(token, self._token):
            raise AccessError("the token is wrong")
        return Handler(self, connection)

    def broke(self, error: ThreadError) -> None:
        self.failures.append(error)

    def log(
        self,
        event: str,
        peer: str = "",
        *,
        level: int = logging.WARNING,
        kind: str = "",
        **fields: object,
    ) -> None:
        self.lines.append(f"{event}: {fields.get('reason')}")


@dataclass(eq=False)
class Tensor:
    """One tensor on its way to a peer and back."""

    nbytes: int
    done: Future[int] = field(default_factory=Future)
    answer: ByteArray = field(init=False)


class Sender:
    """Sends tensors to one peer."""

    def __init__(
        self, where: Callable[[], endpoint.Endpoint], *, is_local: bool, limit_s: float = math.inf
    ) -> None:
        self.num_connects = 0
        self.on_answer: Callable[[], object] = lambda: None
        self._where = where
        self._is_local = is_local
        self._channel = FrameChannel[Tensor](self._connect, self._on_reply, "peer", limit_s)
        self.hold, self.let_go = self._channel.hold, self._channel.let_go
        self._channel.start()

    def send(self, step: int, data: ByteArray) -> Tensor:
        tensor = Tensor(data.nbytes)
        header = pb.Envelope(push=pb.PushHeader(step=step))
        self._channel.request(tensor, header, [memoryview(data)] if data.nbytes else ())
        return tensor

    def close(self) -> None:
        self._channel.close()

    def _connect(self) -> tls.Stream:
        self.num_connects += 1
        return endpoint.connect(self._where(), is_local=self._is_local)

    def _on_reply(
        self, envelope: pb.Envelope, call: Tensor, incoming: sockets.Incoming
    ) -> pb.Envelope | None:
        self.on_answer()
        call.answer = np.empty(incoming.payload_nbytes, np.uint8)
        incoming.read_into(memoryview(call.answer))
        call.done.set_result(envelope.pushed.version)
        return None


def main() -> None:
    from pscore.net.listener import Listener

    listener = Listener(Peer(), "127.0.0.1", 0, sys.argv[1])
    listener.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    listener.stop()
    loaded = {name.split(".")[0] for name in sys.modules}
    sys.stdout.write(" ".join(sorted(loaded & {"psserver", "psworker", "torch"})))


if __name__ == "__main__":
    main()
