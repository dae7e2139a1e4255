"""The socket data plane: frames on a stream, where a lie costs at most its own connection.

A connection is served in the test's own thread: everything that the peer sends is in the socket
before, and its end is closed, so that nothing waits.
"""

import random
import socket
import struct
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pscore.net import connection, sockets, tls, wire
from pscore.net.connection import Connection
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Verdict
from psserver.service.data_socket import DataService
from tests.attacks.test_certificates import tls_pair
from tests.unit.psserver.front import (
    HYPER,
    NUMEL,
    Front,
    grad,
    played,
    pull_header,
    push_header,
    sender,
)

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
PAYLOAD = wire.as_bytes(grad(1.0))


def framed(envelope: data_pb2.Envelope, *payload: memoryview) -> bytes:
    return b"".join(sockets.frame_parts(envelope.SerializeToString(), payload))


def push_frame(step: int = 0, **fields: object) -> bytes:
    return framed(data_pb2.Envelope(id=9, push=push_header(0, step, **fields)), PAYLOAD)


def serve(front: Front, sent: bytes) -> list[data_pb2.Envelope]:
    """Feeds `sent` to a connection to its end; returns what it answered."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            sockets.tune(end)
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        Connection(theirs, DataService(front.engine)).serve()
        # A peer that closes before it has read all is reported once; then comes what it said.
        ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        answers = []
        while (incoming := sockets.read_header(ours)) is not None:
            incoming.read_into(memoryview(bytearray(incoming.payload_nbytes)))
            answers.append(data_pb2.Envelope.FromString(incoming.header))
        return answers


def nothing_has_changed(front: Front) -> None:
    clock = front.job.table(0).clock(0)
    assert (clock.version, clock.clock(0), clock.open_steps, list(clock.parking)) == (0, 0, {}, [])
    assert not front.weights().any()
    assert not front.engine.requests.waiting


async def still_serves(front: Front) -> None:
    """Another connection pushes and pulls as if nothing had been sent."""
    pull = framed(data_pb2.Envelope(id=10, pull=pull_header(0, 1, 1)))
    pushed, pulled = serve(front, push_frame() + pull)
    assert (pushed.id, pushed.pushed.verdict) == (9, int(Verdict.ACCEPTED))
    assert (pulled.id, pulled.pulled.ready, pulled.pulled.version) == (10, True, 1)
    assert front.weights()[0] == -1.0


@played
async def test_a_frame_that_is_one_is_taken(front: Front) -> None:
    await front.ready(num_workers=1)
    await still_serves(front)


@played
async def test_every_bit_flip_is_refused(front: Front) -> None:
    await front.ready(num_workers=1)
    frame = push_frame()
    for bit in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        assert serve(front, bytes(broken)) == []  # The sender itself is not known.
    nothing_has_changed(front)
    await still_serves(front)


@played
async def test_every_truncation_is_refused(front: Front) -> None:
    await front.ready(num_workers=1)
    frame = push_frame()
    for length in range(len(frame)):
        assert serve(front, frame[:length]) == []
    nothing_has_changed(front)
    await still_serves(front)


@pytest.mark.parametrize("nbytes", [0, 4, 4 * NUMEL + 4, 12 * NUMEL, 1 << 20, 64 << 20, 1 << 40])
@played
async def test_a_payload_that_is_declared_and_does_not_come_costs_nothing(
    front: Front, nbytes: int
) -> None:
    """A payload longer than any of the slice is refused before memory is taken for it."""
    await front.ready(num_workers=1)
    header = data_pb2.Envelope(id=9, push=push_header(0, 0)).SerializeToString()
    start = wire.CHECKED.pack(wire.MAGIC, len(header), nbytes)
    tracemalloc.start()
    answers = serve(front, start + struct.pack("<Q", 0) + header)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19
    assert all(answer.WhichOneof("body") == "failed" for answer in answers)
    nothing_has_changed(front)
    await still_serves(front)


@played
async def test_a_refused_payload_is_skipped_and_the_connection_continues(front: Front) -> None:
    await front.ready(num_workers=1)
    foreign = data_pb2.Envelope(id=1, push=push_header(0, 0, sender=sender(5)))
    answers = serve(front, framed(foreign, PAYLOAD, PAYLOAD) + push_frame())
    assert [answer.WhichOneof("body") for answer in answers] == ["failed", "pushed"]
    assert answers[0].failed.kind == "UnknownJobError"
    assert answers[1].pushed.verdict == int(Verdict.ACCEPTED)


@pytest.mark.parametrize(
    "body",
    [
        {"pushed": data_pb2.PushReply(version=1)},
        {"pulled": data_pb2.PullReply(ready=True, version=U64)},
        {"failed": data_pb2.Failure(kind="ReplacedError", message="go away")},
        {"attach": data_pb2.Attach(sender=sender(0), nbytes=U64)},
        {"attached": data_pb2.Attached(nbytes=U64)},
    ],
    ids=lambda body: next(iter(body)),
)
@played
async def test_messages_of_a_shard_are_refused_by_a_shard(
    front: Front, body: dict[str, object]
) -> None:
    await front.ready(num_workers=1)
    envelope = data_pb2.Envelope(id=3, **body)  # type: ignore[arg-type]
    (answer,) = serve(front, framed(envelope))
    assert (answer.id, answer.failed.kind) == (3, "DecodeError")
    nothing_has_changed(front)
    await still_serves(front)


@played
async def test_a_pull_with_a_payload_is_refused(front: Front) -> None:
    await front.ready(num_workers=1)
    envelope = data_pb2.Envelope(id=3, pull=pull_header(0, 0, 0))
    (answer,) = serve(front, framed(envelope, PAYLOAD))
    assert (answer.id, answer.failed.kind) == (3, "DecodeError")
    nothing_has_changed(front)
    await still_serves(front)


@played
async def test_noise_is_refused(front: Front) -> None:
    await front.ready(num_workers=1)
    rng = random.Random(1)
    for _ in range(300):
        noise = rng.randbytes(rng.randrange(100))
        assert serve(front, noise) == []
        assert serve(front, wire.MAGIC + noise) == []
        greeting = data_pb2.Envelope(id=1, hello=data_pb2.Hello(token="?"))
        (answer,) = serve(front, framed(greeting, memoryview(noise)))
        assert answer.WhichOneof("body") == ("failed" if noise else "hello")  # No payload.
        (answer,) = serve(front, framed(data_pb2.Envelope(id=1), memoryview(noise)))
        assert answer.failed.kind == "DecodeError"
    nothing_has_changed(front)
    await still_serves(front)


@played
async def test_a_connection_that_breaks_forgets_its_pulls(front: Front) -> None:
    await front.ready(num_workers=1)
    envelope = data_pb2.Envelope(id=3, pull=pull_header(0, 7, 7, wait_ms=U32))
    assert serve(front, framed(envelope) * 50) == []
    nothing_has_changed(front)
    assert front.job.table(0).clock(0).num_waiting == 0


@played
async def test_a_foreign_connection_cannot_make_a_worker_suspect(front: Front) -> None:
    """The end of a connection counts for its own incarnation only."""
    await front.ready(num_workers=1)
    forged = pull_header(0, 0, 0, sender=sender(0, incarnation=3))
    serve(front, framed(data_pb2.Envelope(id=1, pull=forged)))
    front.now_s = 9.0
    front.engine.tick()
    assert front.job.membership.expected() == [0]
    await still_serves(front)


@played
async def test_random_envelopes_never_break_the_shard(front: Front) -> None:
    await front.ready(num_workers=2)
    rng = random.Random(2)
    for _ in range(600):
        header = push_header(
            rng.choice((0, 1)),
            rng.choice((0, 1, 2, U64)),
            base_version=rng.choice((0, 0, 0, U64)),
            slice=rng.choice((0, 0, 0, 0, U32)),
            shared=rng.random() < 0.1,
            hyper=rng.choice((HYPER, HYPER, [float("nan")] * 6)),
        )
        payload = PAYLOAD[: rng.choice((0, 4, 4 * NUMEL, 4 * NUMEL))]
        serve(front, framed(data_pb2.Envelope(id=rng.randrange(U64), push=header), payload))
    assert np.isfinite(front.weights()).all()
    assert not front.engine.requests.waiting


def silent(
    monkeypatch: pytest.MonkeyPatch, front: Front, near: tls.Stream, far: tls.Stream
) -> None:
    """Runs a peer that pauses between two frames, and stops in the middle of the third."""
    monkeypatch.setattr(connection, "SILENCE_S", 0.1)
    serving = threading.Thread(target=Connection(far, DataService(front.engine)).serve)
    serving.start()
    for number in (9, 10):
        frame = framed(data_pb2.Envelope(id=number, pull=pull_header(0, 0, 0)))
        near.sendmsg([memoryview(frame)])
        answer = sockets.read_header(near)
        assert answer is not None
        assert data_pb2.Envelope.FromString(answer.header).id == number
        answer.read_into(memoryview(bytearray(answer.payload_nbytes)))
        threading.Event().wait(0.3)  # The kernel counts this, too.
        assert serving.is_alive()
    near.sendmsg([memoryview(push_frame()[:-1])])
    serving.join(200.0)
    assert not serving.is_alive()
    nothing_has_changed(front)


@played
async def test_a_peer_that_stops_in_the_middle_of_a_frame_is_not_waited_for(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two frames it may be silent for as long as it likes."""
    await front.ready(num_workers=1)
    near, far = socket.socketpair()
    with near, far:
        silent(monkeypatch, front, near, far)


@played
async def test_nor_is_one_with_tls(
    front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await front.ready(num_workers=1)
    near, far = tls_pair(tmp_path)
    silent(monkeypatch, front, near, far)
    near.close()
