"""A shard that is sent anything: a fuzzer's entry point, and its first inputs.

Everything behind the socket is the daemon's own: the connection, the decoder, the requests, the
clocks and the stores of three tables, two of them compressed.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import numpy as np

from pscore.errors import DecodeError
from pscore.net import wire
from pscore.net.connection import Connection
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.service.data_socket import DataService
from tests.golden.frames.frames import frames
from tests.unit.psserver.front import NUMEL, Front, pull_header, push_header, sender

TABLES = (("ssgd", "none"), ("asgd", "topk"), ("asgd", "2bit"))


class Stream(socket.socket):
    """A peer that has sent `data` and closed its end; the answers are kept."""

    def __init__(self, data: bytes) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.answered = b""
        self._data = memoryview(data)

    def recv_into(  # type: ignore[override]
        self, buffer: memoryview, nbytes: int = 0, flags: int = 0
    ) -> int:
        count = min(buffer.nbytes, self._data.nbytes)
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def sendmsg(self, parts: Sequence[memoryview], *_: object) -> int:  # type: ignore[override]
        self.answered += b"".join(parts)
        return sum(part.nbytes for part in parts)


class Target:
    """The shard; must be made inside an event loop."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def prepare(self) -> None:
        """Makes a job of one worker with the three tables."""
        await self.front.join(0, 1)
        zeros = np.zeros(NUMEL, np.float32)
        for index, (rule, compressor) in enumerate(TABLES):
            tensors = [pb.Tensor(name="w", shape=[NUMEL], dtype="float32", compress=True)]
            await self.front.define(
                name=f"t{index}",
                tensors=tensors,
                rule=pb.Plugin(name=rule),
                compressor=pb.Plugin(name=compressor),
            )
            owner = sender(0, table=index)
            header = push_header(0, 0, role=data_pb2.ROLE_WEIGHTS, hyper=[], sender=owner)
            await self.front.push(header, zeros)

    def send(self, data: bytes) -> bytes:
        """Sends anything on a connection of its own and closes it; returns the answers.

        Raises:
            AssertionError: Something broke in the shard.
        """
        with Stream(data) as stream:
            Connection(stream, DataService(self.front.engine)).serve()
            answered = stream.answered
        assert not self.front.problems, self.front.problems
        assert not self.front.engine.requests.waiting
        return answered

    def still_serves(self) -> None:
        """A pull of each table is answered.

        Not with what: a worker that lies may push NaN, or a learning rate of 1e300.
        """
        for index in range(len(TABLES)):
            header = pull_header(0, 0, 0, sender=sender(0, table=index))
            answered = self.send(envelope(data_pb2.Envelope(id=1, pull=header)))
            header_raw, payload = wire.decode(answered)
            assert data_pb2.Envelope.FromString(bytes(header_raw)).pulled.ready
            assert payload.nbytes == 4 * NUMEL


def envelope(message: data_pb2.Envelope, payload: bytes = b"") -> bytes:
    return wire.encode(message.SerializeToString(), payload)


def seeds() -> list[bytes]:
    """Returns frames that the target takes, and the golden ones."""
    found = list(frames().values())
    ones = np.ones(NUMEL, np.float32).tobytes()
    for index, (_, compressor) in enumerate(TABLES):
        owner = sender(0, table=index)
        plain = data_pb2.Envelope(id=2, push=push_header(0, 0, sender=owner))
        found.append(envelope(plain, ones))
        found.append(envelope(data_pb2.Envelope(id=3, pull=pull_header(0, 0, 0, sender=owner))))
        state = push_header(0, 0, sender=owner, role=data_pb2.ROLE_STATE, counts=[1])
        found.append(envelope(data_pb2.Envelope(id=4, push=state), 2 * ones))
        if compressor != "none":
            packed = push_header(0, 1, sender=owner, compressor=compressor)
            found.append(envelope(data_pb2.Envelope(id=5, push=packed), ones[:24]))
    return found


def resealed(data: bytes, rng: random.Random) -> bytes:
    """Returns mutated bytes as a frame with right lengths and checksum, so that it is read."""
    body = data[wire.PREFIX.size :]
    try:
        header, _ = wire.decode(data)
        cut = len(header)
    except DecodeError:
        declared = int.from_bytes(data[4:8], "little")
        cut = declared if declared <= len(body) else rng.randint(0, len(body))
    return wire.encode(body[:cut], body[cut:])


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns a frame with some bytes changed, cut out, doubled or put in."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(broken))
        kind = rng.randrange(4)
        if kind == 0 and broken:
            broken[min(at, len(broken) - 1)] = rng.randrange(256)
        elif kind == 1:
            broken[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 2:
            del broken[at : at + rng.randint(1, 9)]
        else:
            broken[at:at] = broken[at : at + rng.randint(1, 20)]
    return bytes(broken)
