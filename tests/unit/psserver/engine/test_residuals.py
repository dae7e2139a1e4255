"""A checkpoint has each live worker's residual after one step, or names the missing ones."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscore.pb.ps.v1 import checkpoint_pb2 as cp
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.durability.journal_dir import JournalDir
from psserver.engine.resume import recover
from tests.unit.psserver.engine.test_capture import CheckpointClient
from tests.unit.psserver.front import (
    JOB,
    LEASE_S,
    NUMEL,
    Context,
    Front,
    Refused,
    grad,
    play,
    played,
    pull_header,
    push_header,
    sender,
    settle,
)

DECLARED: dict[str, Any] = {
    "tensors": [pb.Tensor(name="w", shape=[NUMEL], dtype="float32", compress=True)],
    "compressor": pb.Plugin(name="2bit"),
}


async def push(front: Front, rank: int, step: int) -> bool:
    """Pushes, in full as a push may be; returns whether the residual is requested."""
    return (await front.push(push_header(rank, step), grad(1.0))).send_residual


async def send_residual(
    front: Front, rank: int, step: int, value: float, name: str = "residual"
) -> None:
    request = pb.SendResidualRequest(
        job=JOB,
        worker=rank,
        incarnation=100 + rank,
        step=step,
        arrays=[pb.Array(name=name, data=grad(value).tobytes())],
    )
    await front.control.SendResidual(request, Context())


async def asked(front: Front, rank: int) -> list[tuple[int, list[int]]]:
    """Returns what a heartbeat is answered with: steps and slices."""
    request = pb.HeartbeatRequest(job=JOB, worker=rank, incarnation=100 + rank)
    reply = await front.control.Heartbeat(request, Context())
    return [(asked.step, list(asked.slices)) for asked in reply.residual_requests]


async def fetch_residuals(front: Front, job: str, rank: int) -> dict[int, float]:
    """Returns the first element of the residual kept for a rank, by slice."""
    request = pb.FetchResidualRequest(job=job, worker=rank, incarnation=100 + rank)
    found = {}
    for index in (await front.control.FetchResidual(request, Context())).slices:
        request.slice = index
        (array,) = (await front.control.FetchResidual(request, Context())).arrays
        found[index] = float(np.frombuffer(array.data, "<f4")[0])
    return found


async def residuals(client: CheckpointClient, name: str) -> dict[str, float]:
    reply = await client.capture(name, 0)
    assert reply.state == cp.CAPTURE_DONE
    arrays = json.loads(reply.about)["slices"]["0"]["arrays"]
    found = {}
    for array in [array for array in arrays if array.startswith("worker.")]:
        request = cp.ReadRequest(id=name, slice=0, array=array, nbytes=4)
        data = (await client.service.Read(request, Context())).data
        found[array] = float(np.frombuffer(data, "<f4")[0])
    return found


async def restored(front: Front) -> CheckpointClient:
    """Makes a job `again` of a checkpoint with residuals of 1 for rank 0 and 2 for rank 1."""
    await front.ready(**DECLARED)
    client = CheckpointClient(front)
    await client.capture("a", 1)
    for rank in (0, 1):
        await push(front, rank, 0)
        await send_residual(front, rank, 0, 1.0 + rank)
    reply = await client.capture("a", 1)
    await client.prepare(json.loads(reply.about), counts=[1])
    for array in json.loads(reply.about)["slices"]["0"]["arrays"]:
        read = cp.ReadRequest(id="a", slice=0, array=array, nbytes=4 * NUMEL)
        await client.write(array, 0, (await client.service.Read(read, Context())).data)
    await client.service.Finish(cp.FinishRequest(id="r"), Context())
    return client


async def push_again(front: Front, rank: int) -> None:
    header = push_header(rank, 3)  # The version that the checkpoint is said to be of.
    header.sender.job = "again"
    await front.push(header, grad(1.0))


@played
async def test_residuals_of_the_last_step_of_a_checkpoint_are_requested_and_waited_for(
    front: Front,
) -> None:
    await front.ready(**DECLARED)
    client = CheckpointClient(front)
    assert (await client.capture("a", 2)).state == cp.CAPTURE_WAITING
    assert [await push(front, rank, 0) for rank in (0, 1)] == [False, False]
    assert [await push(front, rank, 1) for rank in (0, 1)] == [True, True]
    assert await push(front, 0, 1)  # A repeated one too, as the answer may have been lost.
    await send_residual(front, 0, 0, 9.0)  # Of another step: not wanted.
    await send_residual(front, 0, 1, 0.5)
    assert not await push(front, 0, 1)
    reply = await client.capture("a", 2)
    assert (reply.state, list(reply.missing)) == (cp.CAPTURE_RESIDUALS, [1])
    await send_residual(front, 1, 1, 0.25)
    assert await residuals(client, "a") == {"worker.0.residual": 0.5, "worker.1.residual": 0.25}
    assert not front.engine.jobs[JOB].residuals.is_collecting


@played
async def test_idle_workers_get_requests_by_heartbeat_and_active_ones_have_passed(
    front: Front,
) -> None:
    await front.ready(**DECLARED)
    client = CheckpointClient(front)
    for rank in (0, 1):
        assert not await push(front, rank, 0)
    assert (await client.capture("a", 1)).state == cp.CAPTURE_RESIDUALS
    assert await asked(front, 0) == [(0, [0])]
    await send_residual(front, 0, 0, 0.5)
    assert await asked(front, 0) == []
    assert await asked(front, 1) == [(0, [0])]
    await push(front, 1, 1)
    assert (await client.capture("a", 1)).state == cp.CAPTURE_PASSED
    await client.release("a")
    assert await asked(front, 1) == []


@played
async def test_a_worker_that_may_skip_steps_sends_its_residual_after_its_last_push(
    front: Front,
) -> None:
    backup = pb.Plugin(name="ssgd", arguments='{"backup": 1}')
    await front.ready(**DECLARED, rule=backup)
    client = CheckpointClient(front)
    await client.capture("a", 3)
    assert await push(front, 1, 0)  # Each could be its last one up to step 2.
    await send_residual(front, 1, 0, 9.0)
    for step in range(3):
        assert await push(front, 0, step)
        await send_residual(front, 0, step, step)
    assert await push(front, 1, 1)  # Too late, and now its last one.
    assert list((await client.capture("a", 3)).missing) == [1]
    assert await asked(front, 1) == [(2, [0])]
    await send_residual(front, 1, 1, 0.5)
    assert not await push(front, 1, 3)
    assert await residuals(client, "a") == {"worker.0.residual": 2.0, "worker.1.residual": 0.5}


@played
async def test_a_capture_does_not_wait_for_workers_that_are_lost_or_pushed_nothing(
    front: Front,
) -> None:
    await front.ready(**DECLARED, rule=pb.Plugin(name="asgd"))
    client = CheckpointClient(front)
    await push(front, 0, 0)
    assert (await client.capture("a", -1)).missing == [0]
    assert await asked(front, 0) == [(-2, [0])]
    front.now_s = LEASE_S + 1.0
    front.engine.tick()
    assert await residuals(client, "a") == {}


@played
async def test_a_worker_that_joins_again_has_not_pushed_the_steps_that_it_leaves_out(
    front: Front,
) -> None:
    await front.ready(**DECLARED, rule=pb.Plugin(name="asgd"))
    for step in range(3):
        await push(front, 0, step)
    front.now_s = LEASE_S - 1.0
    await asked(front, 0)
    front.now_s = LEASE_S + 1.0
    front.engine.tick()
    await front.join(1, incarnation=200)
    await front.pull(pull_header(1, 0, 0, sender=sender(1, incarnation=200)))  # Its clock rises.
    assert list((await CheckpointClient(front).capture("a", -1)).missing) == [0]


@played
async def test_weights_alone_ask_nobody(front: Front) -> None:
    await front.ready(**DECLARED)
    client = CheckpointClient(front)
    request = cp.CaptureRequest(job=JOB, table="model", id="a", version=1, weights_only=True)
    await client.service.Capture(request, Context())
    assert [await push(front, rank, 0) for rank in (0, 1)] == [False, False]
    assert (await client.capture("a", 1)).state == cp.CAPTURE_DONE


@played
async def test_a_restored_rank_has_its_own_back_until_it_has_pushed(front: Front) -> None:
    client = await restored(front)
    for rank in (0, 1):
        await front.join(rank, job="again")
        assert await fetch_residuals(front, "again", rank) == {0: 1.0 + rank}
        assert await fetch_residuals(front, JOB, rank) == {}
    at_first = cp.CaptureRequest(job="again", table="model", id="b", version=3)
    assert (await client.service.Capture(at_first, Context())).state == cp.CAPTURE_DONE
    await push_again(front, 1)
    assert await fetch_residuals(front, "again", 0) == {0: 1.0}
    assert await fetch_residuals(front, "again", 1) == {}
    found = await client.service.Capture(at_first, Context())
    arrays = json.loads(found.about)["slices"]["0"]["arrays"]
    assert {"worker.0.residual", "worker.1.residual"} < set(arrays)


@played
async def test_a_push_that_is_parked_has_not_used_what_was_kept(front: Front) -> None:
    await restored(front)
    await front.join(0, job="again")
    header = push_header(0, 4)  # One step too far.
    header.sender.job = "again"
    parked = asyncio.ensure_future(front.push(header, grad(1.0)))
    await settle()
    assert await fetch_residuals(front, "again", 0) == {0: 1.0}
    parked.cancel()


def test_residuals_not_fetched_yet_survive_a_killed_shard(tmp_path: Path) -> None:
    async def scene(_: Front) -> None:
        journals = JournalDir(tmp_path)
        front = Front(journals)
        await restored(front)
        for rank in (0, 1):
            await front.join(rank, job="again")
        await push_again(front, 1)
        front.engine.tick()
        journals.close()
        after = Front(JournalDir(tmp_path))
        assert sorted(recover(after.engine)) == ["again", JOB]
        assert await fetch_residuals(after, "again", 0) == {0: 1.0}
        assert (
            await fetch_residuals(after, "again", 1) == {}
        )  # It has pushed, so it has had its own.
        after.engine.tick()
        assert len(list(tmp_path.glob("*/residuals"))) == 1
        await push_again(after, 0)
        after.engine.tick()
        assert not list(tmp_path.glob("*/residuals"))

    play(scene)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slice": 1}, "slice 1 of 'model' is not on this shard"),
        ({"table": 9}, "no table 9"),
        ({"incarnation": 5}, "rank 0 is now process 0"),
        ({"arrays": [pb.Array(name="momentum", data=bytes(128))]}, "128 bytes of 'momentum'"),
        ({"arrays": [pb.Array(name="residual", data=bytes(124))]}, "124 bytes of 'residual'"),
    ],
)
@played
async def test_residuals_that_nobody_asked_for_are_refused(
    front: Front, fields: dict[str, Any], said: str
) -> None:
    await front.ready(**DECLARED)
    values: dict[str, Any] = {"job": JOB, "incarnation": 100}
    with pytest.raises(Refused, match=said):
        await front.control.SendResidual(pb.SendResidualRequest(**values | fields), Context())
