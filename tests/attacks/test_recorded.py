"""The frames of a real session, recorded as they left: flipped, cut and lying, all are refused."""

import random
import struct
from collections.abc import Callable, Sequence

import pytest
import torch
import xxhash

import psworker
from pscore.errors import DecodeError
from pscore.net import sockets, wire
from pscore.pb.ps.v1 import data_pb2
from tests.attacks.target import Target, mutated, resealed, seeds
from tests.integration.cluster import Shards, Station
from tests.unit.psserver.front import Front, played

U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def record(me: Station) -> list[bytes]:
    """Trains a small model, and returns every frame that this worker has sent or received."""
    frames: list[bytes] = []
    frame_parts: Callable[..., list[memoryview]] = sockets.frame_parts
    read_into = sockets.Incoming.read_into

    def sent(header: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
        parts = frame_parts(header, payload)
        frames.append(b"".join(parts))
        return parts

    def received(incoming: sockets.Incoming, *targets: memoryview) -> None:
        read_into(incoming, *targets)
        frames.append(wire.encode(incoming.header, *targets))

    sockets.frame_parts = sent
    sockets.Incoming.read_into = received  # type: ignore[assignment, method-assign]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(plain, model.named_parameters(), compression="fp16")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizer.state_dict()
    psworker.shutdown()
    return frames


@pytest.fixture(scope="module")
def frames() -> list[bytes]:
    """The longest frame of each kind of a session over plain sockets."""
    with Shards(1) as shards:
        (found,) = shards.run(record, num_workers=1, env={"PACELINE_DATA_PLANE": "tcp"})
    kinds: dict[str, bytes] = {}
    for frame in sorted(found, key=len):
        header, payload = wire.decode(frame)
        envelope = data_pb2.Envelope.FromString(bytes(header))
        kinds[f"{envelope.WhichOneof('body')} {len(payload) > 0}"] = frame
    assert {"push True", "pull False", "pushed False", "pulled True"} <= kinds.keys()
    return list(kinds.values())


@pytest.mark.slow
def test_every_flip_of_a_bit_is_refused(frames: list[bytes]) -> None:
    for frame in frames:
        for bit in range(8 * len(frame)):
            broken = bytearray(frame)
            broken[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DecodeError):
                wire.decode(broken)


def test_every_truncation_and_every_addition_is_refused(frames: list[bytes]) -> None:
    for frame in frames:
        for length in range(len(frame)):
            with pytest.raises(DecodeError):
                wire.decode(frame[:length])
        with pytest.raises(DecodeError):
            wire.decode(frame + b"\0")


def lies(true: int, most: int) -> set[int]:
    near = {true + step for step in (-1, 1)} | {true * 2, true // 2}
    return {value for value in (near | {0, 1, most // 2, most}) if 0 <= value <= most} - {true}


def test_every_lying_header_is_refused(frames: list[bytes]) -> None:
    """Even with a checksum that is right for the lie."""
    for frame in frames:
        _, header_nbytes, payload_nbytes, _ = wire.PREFIX.unpack_from(frame)
        told = [(lie, payload_nbytes) for lie in lies(header_nbytes, U32)]
        told += [(header_nbytes, lie) for lie in lies(payload_nbytes, U64)]
        for header_lie, payload_lie in told:
            start = wire.CHECKED.pack(wire.MAGIC, header_lie, payload_lie)
            digest = xxhash.xxh3_64(start)
            digest.update(frame[wire.PREFIX.size :])
            sealed = start + struct.pack("<Q", digest.intdigest()) + frame[wire.PREFIX.size :]
            with pytest.raises(DecodeError):
                wire.decode(sealed)


@pytest.mark.slow
@played
async def test_a_shard_answers_no_frame_that_was_damaged(front: Front, frames: list[bytes]) -> None:
    target = Target(front)
    await target.prepare()
    for frame in frames:
        for bit in range(8 * len(frame)):
            broken = bytearray(frame)
            broken[bit // 8] ^= 1 << bit % 8
            assert target.send(bytes(broken)) == b""
        for length in range(len(frame)):
            assert target.send(frame[:length]) == b""
    target.still_serves()


@pytest.mark.slow
@played
async def test_a_shard_survives_what_a_fuzzer_would_send(front: Front) -> None:
    """The fuzzer's own loop (`fuzz_frames.py`), short and without its guide."""
    target = Target(front)
    await target.prepare()
    rng = random.Random(1)
    corpus = seeds()
    for _ in range(5000):
        data = mutated(rng.choice(corpus), rng)
        target.send(data if rng.random() < 0.25 else resealed(data, rng))
    target.still_serves()
