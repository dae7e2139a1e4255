"""Well-formed frames with hostile content: refused, or answered harmlessly, and nothing grows."""

import asyncio
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from pscore.json_text import COUNT_MAX
from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.decisions.parking import PARKED_MAX
from psserver.decisions.progress import LATE_KEPT
from psserver.slices.store import SliceStore
from tests.unit.psserver.front import (
    HYPER,
    JOB,
    LEASE_S,
    NUMEL,
    Context,
    Front,
    Refused,
    grad,
    played,
    pull_header,
    push_header,
    sender,
    settle,
    stores_of,
    told,
)

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
NAN, INF = float("nan"), float("inf")
RULES = ("ssgd", "asgd", "ssp", "dcasgd", "staleness")


async def offer(front: Front, header: data_pb2.PushHeader, *payload: np.ndarray) -> str:
    """Sends a push that may never be answered; returns what becomes of it at once."""
    task = asyncio.ensure_future(front.push(header, *payload))
    await settle()
    if not task.done():
        task.cancel()
        await settle()
        return "waits"
    try:
        return told(task.result())[0]
    except Refused as refusal:
        return refusal.kind


async def still_serves(front: Front) -> None:
    """The shard continues as if nothing had been sent: two workers make one exact step."""
    before = front.weights().copy()
    version = front.version()
    steps = [front.job.table(0).clock(0).clock(rank) for rank in (0, 1)]
    for rank in (0, 1):
        assert told(await front.push(push_header(rank, steps[rank]), grad(2.0)))[0] == "ACCEPTED"
    assert front.version() > version
    moved = before - front.weights()
    assert moved[0] == 2.0 * (front.version() - version)
    status = await front.control.Status(pb.StatusRequest(), Context())
    assert len(status.SerializeToString()) < 1 << 16


# ----- numbers out of their range

HOSTILE = {
    "unknown job": {"sender": sender(0, job="x" * 300)},
    "no job": {"sender": sender(0, job="")},
    "no sender": {"sender": data_pb2.Sender()},
    "foreign table": {"sender": sender(0, table=U32)},
    "foreign rank": {"sender": sender(0, worker=U32)},
    "foreign incarnation": {"sender": sender(0, incarnation=U64)},
    "slice beyond": {"slice": 1},
    "slice huge": {"slice": U32},
    "version to come": {"base_version": 1},
    "version huge": {"base_version": U64},
    "samples negative": {"samples": -1e-300},
    "samples nan": {"samples": NAN},
    "samples inf": {"samples": INF},
    "samples minus inf": {"samples": -INF},
    "samples huge": {"samples": 1e300},
    "hyper nan": {"hyper": (NAN, *HYPER[1:])},
    "hyper inf": {"hyper": (*HYPER[:5], INF)},
    "hyper missing": {"hyper": ()},
    "hyper short": {"hyper": HYPER[:5]},
    "hyper long": {"hyper": HYPER * 100},
    "present beyond": {"present": b"\x04"},
    "present long": {"present": bytes(1000)},
    "counts": {"counts": [1, 2, 3]},
    "compressor": {"compressor": "2bit"},
    "compressor unknown": {"compressor": "../../etc/passwd"},
    "role of another mode": {"role": 5},
    "role unknown": {"role": 6},
    "role negative": {"role": -1},
    "shared without a segment": {"shared": True},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
@played
async def test_a_hostile_push_is_refused_and_changes_nothing(
    front: Front, rule: str, fields: dict[str, object]
) -> None:
    await front.ready(rule=pb.Plugin(name=rule))
    before = front.weights().copy()
    with pytest.raises(Refused):
        await front.push(push_header(0, 0, **fields), grad(1.0))
    assert np.array_equal(front.weights(), before)
    assert front.version() == 0
    clock = front.job.table(0).clock(0)
    assert (clock.clock(0), clock.open_steps, list(clock.parking)) == (0, {}, [])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", [1 << 20, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, U64])
@played
async def test_a_step_far_ahead_does_no_harm(front: Front, rule: str, step: int) -> None:
    await front.ready(rule=pb.Plugin(name=rule))
    assert await offer(front, push_header(0, step), grad(0.0)) in ("waits", "ACCEPTED")
    counted = front.job.table(0).clock(0).counted[0]
    assert len(counted.ahead) + len(counted.late) <= 1
    status = await front.control.Status(pb.StatusRequest(), Context())
    assert status.jobs[0].workers[0].rank == 0
    assert told(await front.push(push_header(1, 0), grad(1.0)))[0] == "ACCEPTED"


@pytest.mark.parametrize(
    "fields",
    [
        {"sender": data_pb2.Sender()},
        {"sender": sender(0, worker=U32)},
        {"sender": sender(0, incarnation=3)},
        {"sender": sender(0, table=1)},
        {"slice": U32},
        {"estimate": True, "held": U64},
        {"begins": True, "clock": U64},
    ],
    ids=["no sender", "rank", "incarnation", "table", "slice", "no estimate", "begins"],
)
@played
async def test_a_hostile_pull_is_refused(front: Front, fields: dict[str, Any]) -> None:
    await front.ready()
    named: dict[str, Any] = {"sender": sender(0)} | fields
    with pytest.raises(Refused):
        await front.pull(data_pb2.PullHeader(**named))
    assert not front.engine.requests.waiting
    await still_serves(front)


@pytest.mark.parametrize("clock", [0, U64])
@pytest.mark.parametrize("min_version", [1, U64])
@played
async def test_a_pull_of_what_never_comes_is_put_off(
    front: Front, clock: int, min_version: int
) -> None:
    await front.ready()
    pull = asyncio.ensure_future(front.pull(pull_header(0, clock, min_version, wait_ms=U32)))
    await settle()
    front.now_s = LEASE_S
    front.engine.tick()
    assert not (await pull)[0].ready
    assert not front.engine.requests.waiting
    await still_serves(front)


# ----- payloads


@pytest.mark.parametrize("nbytes", [1, 3, 4 * NUMEL - 1, 4 * NUMEL + 1, 8 * NUMEL, 1 << 20])
@pytest.mark.parametrize("role", range(4))
@played
async def test_a_payload_of_another_length_is_refused(front: Front, nbytes: int, role: int) -> None:
    await front.ready()
    if role == data_pb2.ROLE_STATE and nbytes == 8 * NUMEL:
        return  # Weights and momentum: the right length.
    with pytest.raises(Refused, match="DecodeError"):
        await front.push(push_header(0, 0, role=role), np.zeros(nbytes, np.uint8))
    assert front.version() == 0
    await still_serves(front)


@played
async def test_a_header_that_is_no_message_is_refused(front: Front) -> None:
    await front.ready()
    rng = random.Random(3)
    for _ in range(500):
        frame = wire.encode(rng.randbytes(rng.randrange(1, 60)), b"")
        for call in (front.push_frame, front.pull_frame):
            with pytest.raises(Refused):
                await call(frame)
    await still_serves(front)


@played
async def test_a_message_of_another_kind_is_refused(front: Front) -> None:
    await front.ready()
    join = pb.JoinRequest(job=JOB, rank=0, num_workers=2, host="h" * 100)
    for message in (join, pb.StatusRequest(), data_pb2.PullReply(ready=True, version=3)):
        with pytest.raises(Refused):
            await front.push_frame(wire.encode(message.SerializeToString()))
    await still_serves(front)


# ----- replays and floods


@played
async def test_a_replayed_session_changes_nothing(front: Front) -> None:
    """Every frame of a session again, in order, backwards and at random."""
    await front.ready()
    frames = [
        wire.encode(push_header(rank, step).SerializeToString(), wire.as_bytes(grad(1.0)))
        for step in range(5)
        for rank in (0, 1)
    ]
    for frame in frames:
        await front.push_frame(frame)
    before = front.weights().copy()
    rng = random.Random(4)
    for replay in (frames, frames[::-1], rng.choices(frames, k=200)):
        for frame in replay:
            assert told(await front.push_frame(frame)) == ("DUPLICATE", 5)
    assert np.array_equal(front.weights(), before)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@played
async def test_pushes_for_far_steps_do_not_grow_memory(front: Front, rule: str) -> None:
    """In a synchronous mode they wait, up to a limit; in an asynchronous one they are updates."""
    await front.ready(rule=pb.Plugin(name=rule))
    clock = front.job.table(0).clock(0)
    (store,) = stores_of(front.running)
    outcomes = [
        await offer(front, push_header(0, 2 + 3 * number), grad(0.0))
        for number in range(LATE_KEPT // 2 if rule == "asgd" else 3 * PARKED_MAX)
    ]
    parked = outcomes.count("waits")
    assert parked in (0, PARKED_MAX)
    assert outcomes.count("RemoteProtocolError") == (len(outcomes) - parked if parked else 0)
    assert len(clock.parking) == parked
    assert len(clock.open_steps) <= 1
    assert len(clock.counted[0].ahead) <= LATE_KEPT
    assert isinstance(store, SliceStore)
    cells_max = len(store.state) + 2
    store.check_invariants(sums_max=1, cells_max=cells_max, buffers_max=cells_max)


@pytest.mark.slow
@played
async def test_parked_payloads_are_all_that_a_flood_costs(front: Front) -> None:
    await front.ready()
    for number in range(2 * PARKED_MAX):
        await offer(front, push_header(0, 1 + number), grad(0.0))
    tracemalloc.start()
    for number in range(500):
        assert await offer(front, push_header(0, 1000 + number), grad(0.0)) == (
            "RemoteProtocolError"
        )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18
    await still_serves(front)


@played
async def test_repeating_a_parked_push_keeps_one_payload(front: Front) -> None:
    await front.ready()
    for _ in range(100):
        assert await offer(front, push_header(0, 1), grad(0.0)) == "waits"
    assert len(front.job.table(0).clock(0).parking) == 1


@played
async def test_joins_for_impossible_ranks_fill_nothing(front: Front) -> None:
    await front.ready()
    for number in range(200):
        for rank in (2, 1 << 30, -(1 << 31)):
            request = pb.JoinRequest(
                job=f"job{number}", rank=rank, num_workers=0, protocol=wire.PROTOCOL
            )
            with pytest.raises(Refused):
                await front.control.Join(request, Context())
    assert list(front.engine.shard.jobs) == [JOB]
    await still_serves(front)


@pytest.mark.slow
@played
async def test_barriers_of_many_names_are_bounded(front: Front) -> None:
    await front.ready()
    for number in range(3000):
        request = pb.BarrierRequest(
            job=JOB,
            worker=0,
            incarnation=100,
            name=f"b{number}",
            round=COUNT_MAX - number,
            wait_ms=0,
        )
        await front.control.Barrier(request, Context())
    assert len(front.job.barriers.by_name) <= 1024
    await still_serves(front)


# ----- everything at once


@pytest.mark.slow
@played
async def test_random_messages_never_break_the_shard(front: Front) -> None:
    """Any field takes any value; the frames are right. The shard continues in any case."""
    await front.ready()
    rng = random.Random(5)
    seen: dict[str, int] = {}
    for _ in range(2500):
        payload = rng.choice([(), (grad(0.0),), (grad(0.0), grad(0.0)), (grad(0.0)[:3],)])
        if rng.random() < 0.5:
            result = await offer(front, random_push(rng), *payload)
        else:
            result = await ask(front, random_pull(rng))
        seen[result] = seen.get(result, 0) + 1
    assert {"waits", "ACCEPTED", "DUPLICATE", "DecodeError", "answered"} <= set(seen), seen
    assert len(front.job.table(0).clock(0).parking) <= 2 * PARKED_MAX
    assert np.isfinite(front.weights()).all()
    front.now_s = LEASE_S
    front.engine.tick()
    assert not front.engine.requests.waiting
    await front.control.Status(pb.StatusRequest(), Context())


async def ask(front: Front, header: data_pb2.PullHeader) -> str:
    """Sends a pull that may have to wait."""
    task = asyncio.ensure_future(front.pull(header))
    await settle()
    if not task.done():
        task.cancel()
        await settle()
        return "put off"
    try:
        task.result()
    except Refused as refusal:
        return refusal.kind
    return "answered"


def number(rng: random.Random, limit: int) -> int:
    return rng.choice([0, 0, 0, 0, 1, 2, 3, rng.randrange(limit + 1), limit])


def random_sender(rng: random.Random) -> data_pb2.Sender:
    if rng.random() < 0.8:
        return sender(rng.choice((0, 1)))
    return data_pb2.Sender(
        job=rng.choice((JOB, "", "other")),
        table=number(rng, U32),
        worker=number(rng, U32),
        incarnation=rng.choice((100, 101, number(rng, U64))),
    )


def random_push(rng: random.Random) -> data_pb2.PushHeader:
    floats = (0.0, 1.0, 2.0, -1.0, NAN, INF, 1e300)
    return data_pb2.PushHeader(
        sender=random_sender(rng),
        slice=0 if rng.random() < 0.9 else number(rng, U32),
        step=number(rng, U64),
        base_version=0 if rng.random() < 0.8 else number(rng, U64),
        role=rng.choice((0, 0, 0, 0, 0, 1, 2, 3, 7, -1)),  # type: ignore[arg-type]
        compressor=rng.choice(("", "", "", "none", "2bit", "x")),
        samples=1.0 if rng.random() < 0.7 else rng.choice(floats),
        present=rng.choice((b"", b"", b"", b"\0", b"\1", b"\3", b"\xff", bytes(9))),
        hyper=HYPER if rng.random() < 0.8 else [rng.choice(floats) for _ in range(6)],
        counts=rng.choice(([], [], [], [1, 2], [1], [-1, 1 << 62])),
        shared=rng.random() < 0.1,
    )


def random_pull(rng: random.Random) -> data_pb2.PullHeader:
    return data_pb2.PullHeader(
        sender=random_sender(rng),
        slice=0 if rng.random() < 0.9 else number(rng, U32),
        clock=number(rng, U64),
        min_version=number(rng, U64),
        with_state=rng.random() < 0.5,
        wait_ms=number(rng, U32),
        begins=rng.random() < 0.1,
    )
