"""Numbers out of a shard at one version, for several at once."""

import asyncio
import json
from typing import Any

import numpy as np

from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from psserver.capture import Checkpointer
from tests.unit.psserver.front import JOB, NUMEL, Context, Front, grad, play, push_header


class Desk:
    """The checkpoint service of a shard, called without a network."""

    def __init__(self, front: Front) -> None:
        self.service: Any = Checkpointer(front.driver)

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

    async def release(self, name: str) -> None:
        await self.service.Release(pb.ReleaseRequest(id=name), Context())


def test_two_checkpoints_at_once_both_succeed() -> None:
    async def scene(front: Front) -> None:
        await front.ready(num_workers=1)
        desk = Desk(front)
        for name, version in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
            reply = await desk.capture(name, version)
            assert reply.state == pb.CAPTURE_WAITING
        await desk.release("d")  # Takes nothing from the others.
        for step in range(3):
            await front.push(push_header(0, step), grad(1.0))
        for name, version in (("a", 1), ("b", 1), ("c", 2)):
            reply = await desk.capture(name, version)
            assert reply.state == pb.CAPTURE_DONE
            assert json.loads(reply.about)["slices"]["0"]["version"] == version
            assert (await desk.weights(name))[0] == -version
            await desk.release(name)
        assert not front.driver.intake.armed

    play(scene)


def test_a_version_that_is_there_is_copied_and_a_former_one_has_passed() -> None:
    async def scene(front: Front) -> None:
        await front.ready(num_workers=1)
        desk = Desk(front)
        await front.push(push_header(0, 0), grad(1.0))
        assert (await desk.capture("now", 1)).state == pb.CAPTURE_DONE
        assert (await desk.capture("gone", 0)).state == pb.CAPTURE_PASSED
        await asyncio.gather(*(desk.release(name) for name in ("now", "gone")))

    play(scene)
