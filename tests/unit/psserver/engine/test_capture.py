"""Numbers out of a shard at one version, and back into another: together, in bounds, in time."""

import asyncio
import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.pb.ps.v1 import control_pb2, data_pb2
from psserver.service import checkpoint_service
from psserver.service.checkpoint_service import Checkpointer
from psserver.service.last_checkpoint import LastCheckpoint
from tests.unit.psserver.front import (
    JOB,
    NUMEL,
    Context,
    Front,
    Refused,
    Refusing,
    grad,
    play,
    played,
    pull_header,
    push_header,
    stores_of,
)


class CheckpointClient:
    """The checkpoint service of a shard, called without a network."""

    def __init__(self, front: Front) -> None:
        self.servicer = Checkpointer(front.engine, LastCheckpoint())
        self.service: Any = Refusing(self.servicer)

    async def capture(self, name: str, version: int, wait_ms: int = 0) -> pb.CaptureReply:
        request = pb.CaptureRequest(
            job=JOB, table="model", id=name, version=version, wait_ms=wait_ms
        )
        reply: pb.CaptureReply = await self.service.Capture(request, Context())
        return reply

    async def weights(self, name: str) -> list[float]:
        request = pb.ReadRequest(id=name, slice=0, array="weights", nbytes=4 * NUMEL)
        reply = await self.service.Read(request, Context())
        return list(np.frombuffer(reply.data, np.float32))

    async def prepare(
        self, about: dict[str, Any], *more: str, name: str = "r", counts: Sequence[int] = (1, 1)
    ) -> None:
        """Declares the job again that `about` was said of, with more arrays."""
        arrays = [*about["slices"]["0"]["arrays"], *more]
        table = {"spec": about["spec"], "version": 3, "counts": [*counts], "arrays": arrays}
        request = pb.PrepareRequest(job="again", id=name, num_workers=2, tables=[json.dumps(table)])
        await self.service.Prepare(request, Context())

    async def write(self, array: str, offset: int, data: bytes) -> None:
        request = pb.WriteRequest(id="r", array=array, offset=offset, data=data)
        await self.service.Write(request, Context())

    async def release(self, name: str) -> None:
        await self.service.Release(pb.ReleaseRequest(id=name), Context())


@played
async def test_two_checkpoints_at_once_both_succeed(front: Front) -> None:
    await front.ready(num_workers=1)
    client = CheckpointClient(front)
    for name, version in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        reply = await client.capture(name, version)
        assert reply.state == pb.CAPTURE_WAITING
    await client.release("d")  # Takes nothing from the others.
    for step in range(3):
        await front.push(push_header(0, step), grad(1.0))
    for name, version in (("a", 1), ("b", 1), ("c", 2)):
        reply = await client.capture(name, version)
        assert reply.state == pb.CAPTURE_DONE
        assert json.loads(reply.about)["slices"]["0"]["version"] == version
        assert (await client.weights(name))[0] == -version
        await client.release(name)
    assert not front.engine.jobs[JOB].tables[0].has_scheduled


@pytest.mark.parametrize("base", ["[", "[1]", '{"0": 1}', '{"0": ["x"]}', "[" * 10_000])
@played
async def test_a_base_of_another_form_is_refused(front: Front, base: str) -> None:
    await front.ready(num_workers=1)
    request = pb.CaptureRequest(job=JOB, table="model", id="a", version=1, base=base)
    with pytest.raises(Refused, match="RemoteProtocolError: the base of a copy"):
        await CheckpointClient(front).service.Capture(request, Context())


@played
async def test_a_version_that_is_left_out_is_copied_too(front: Front) -> None:
    """Nobody pushes steps 1 to 3: the weights of version 1 get the next ones."""
    await front.ready(num_workers=1)
    client = CheckpointClient(front)
    await front.push(push_header(0, 0), grad(1.0))
    for name, version in (("a", 2), ("b", 4), ("c", 5)):
        assert (await client.capture(name, version)).state == pb.CAPTURE_WAITING
    reply, _ = await front.pull(pull_header(0, 4, 4, begins=True))
    assert (reply.ready, reply.version) == (True, 4)
    states = [(await client.capture(name, -1)).state for name in "abc"]
    assert states == [pb.CAPTURE_DONE, pb.CAPTURE_DONE, pb.CAPTURE_WAITING]
    assert [(await client.weights(name))[0] for name in "ab"] == [-1.0, -1.0]
    for name in "abc":
        await client.release(name)


@played
async def test_a_version_that_is_there_is_copied_and_a_former_one_has_passed(front: Front) -> None:
    await front.ready(num_workers=1)
    client = CheckpointClient(front)
    await front.push(push_header(0, 0), grad(1.0))
    assert (await client.capture("now", 1)).state == pb.CAPTURE_DONE
    assert (await client.capture("gone", 0)).state == pb.CAPTURE_PASSED
    await asyncio.gather(*(client.release(name) for name in ("now", "gone")))


@played
async def test_rounds_with_a_quorum_are_copied_each_at_its_version_when_all_workers_have_left(
    front: Front,
) -> None:
    """A last move that is late in one slice and in time in another leaves different versions."""
    rule = control_pb2.Plugin(name="local", arguments='{"steps": 1, "quorum": 1}')
    await front.ready(num_workers=1, rule=rule)
    client = CheckpointClient(front)
    await front.push(push_header(0, 0, role=data_pb2.ROLE_DELTA), grad(1.0))
    assert (await client.capture("live", 2)).by_step
    await client.release("live")
    front.engine.leave(JOB, 0, 100, "finished")
    assert not (await client.capture("one", 2)).by_step
    reply = await client.capture("own", -1)
    assert reply.state == pb.CAPTURE_DONE
    assert json.loads(reply.about)["slices"]["0"]["version"] == 1
    await asyncio.gather(*(client.release(name) for name in ("one", "own")))


async def taken(front: Front, client: CheckpointClient) -> dict[str, Any]:
    """Trains for a step, and returns what the shard says of a checkpoint of it."""
    await front.ready(num_workers=1)
    await front.push(push_header(0, 0), grad(1.0))
    about: dict[str, Any] = json.loads((await client.capture("a", 1)).about)
    return about


@played
async def test_a_written_checkpoint_is_a_job_once_it_is_whole(front: Front) -> None:
    client = CheckpointClient(front)
    await client.prepare(await taken(front, client))
    half, all_ = grad(7.0).tobytes()[: 2 * NUMEL], grad(7.0).tobytes()
    await client.write("weights", 0, half)
    await client.write("state.0", 0, all_)
    with pytest.raises(Refused, match="bytes 100 to 228 of 'weights', it has 128 and 64 are"):
        await client.write("weights", 100, all_)
    await client.write("weights", 0, half)  # Sent twice.
    await client.write("weights", len(half), half)
    await client.service.Finish(pb.FinishRequest(id="r"), Context())
    (store,) = stores_of(front.engine.jobs["again"])
    assert store.weights.tolist() == grad(7.0).tolist()
    clock = front.engine.shard.jobs["again"].table(0).clock(0)
    assert (clock.version, clock.clock(0), clock.clock(1)) == (3, 3, 3)
    await client.prepare({**json.loads((await client.capture("b", 1)).about)})
    with pytest.raises(Refused, match="of slice 0 of the checkpoint is incomplete"):
        await client.service.Finish(pb.FinishRequest(id="r"), Context())


@played
async def test_only_what_was_declared_is_taken(front: Front) -> None:
    client = CheckpointClient(front)
    about = await taken(front, client)
    with pytest.raises(Refused, match=r"array 'worker.0.residual' of"):
        await client.prepare(about, "worker.0.residual")  # Nothing is compressed.
    with pytest.raises(Refused, match=r"array 'more' of table 'model' .* not one that a shard"):
        await client.prepare(about, "more")
    await client.prepare(about, "memory.mean")
    with pytest.raises(Refused, match=r"no array 'memory.other' of slice 0 of table 0"):
        await client.write("memory.other", 0, b"1234")
    await client.write("memory.mean", 0, b"1234")


@played
async def test_room_is_asked_for_before_anything_is_written(front: Front) -> None:
    client, shard = CheckpointClient(front), front.engine.shard
    about = await taken(front, client)
    held = front.job.table(0).nbytes * 4  # Weights twice, momentum and a sum.
    shard.limits = replace(shard.limits, memory_nbytes=held + 3 * 4 * NUMEL)
    await client.prepare(about)  # Two arrays.
    with pytest.raises(Refused, match="needs 256 bytes of memory, 128 of 896 are left"):
        await client.prepare(about, name="other")


def test_the_captures_of_a_killed_client_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_service, "IDLE_S", 0.02)

    async def scene(front: Front) -> None:
        client = CheckpointClient(front)
        about = await taken(front, client)
        await client.capture("later", 5)
        await client.prepare(about)
        service = client.servicer
        left = [
            weakref.ref(service.captures["a"].copy.slices[0]["weights"]),
            weakref.ref(service.uploads["r"].arrays[0, 0]["weights"]),
        ]
        await asyncio.sleep(0.05)
        assert all(ref() is not None for ref in left)  # By the shard's clock no time has passed.
        front.now_s = 1.0
        while service.captures or service.uploads:
            await asyncio.sleep(0.01)
        gc.collect()
        assert [ref() for ref in left] == [None, None]
        assert not front.engine.jobs[JOB].tables[0].has_scheduled

    play(scene)
