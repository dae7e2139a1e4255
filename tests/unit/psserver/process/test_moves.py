"""A shard waits, before it moves, for those who have to know where it will be."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscore.errors import LimitError
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.process.moves import MENDERS_S, ShardMoves
from tests.unit.psserver.front import JOB, Context, Front, play


def moves_of(front: Front) -> ShardMoves:
    plan: Any = SimpleNamespace(pair=None, trust=SimpleNamespace(token_file=None))
    moves = ShardMoves(cast(Any, plan), front.engine, None, lambda: None)
    moves.control = front.servicer
    return moves


def test_a_mender_that_asks_and_does_not_note_the_address_ends_the_wait() -> None:
    async def scene(front: Front) -> None:
        front.servicer.menders.note("mender", "", front.now_s)
        waiting = asyncio.create_task(moves_of(front).announce("b:1"))
        await asyncio.sleep(0)
        front.now_s = MENDERS_S
        front.servicer.menders.note("mender", "", front.now_s)
        with pytest.raises(LimitError, match=r"has not noted for 60 s .* at b:1"):
            await waiting

    play(scene)


def test_the_wait_is_over_once_the_mender_has_noted_the_address() -> None:
    async def scene(front: Front) -> None:
        front.servicer.menders.note("mender", "", front.now_s)
        waiting = asyncio.create_task(moves_of(front).announce("b:1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        front.servicer.menders.note("mender", "b:1", front.now_s)
        await waiting

    play(scene)


def test_a_worker_knows_the_address_once_each_process_of_its_group_does() -> None:
    async def scene(front: Front) -> None:
        await front.join(0, 1)
        waiting = asyncio.create_task(moves_of(front).announce("b:1"))
        await asyncio.sleep(0)
        beats = [
            pb.HeartbeatRequest(job=JOB, incarnation=100, instance=7, process=process)
            for process in (0, 0, 1)
        ]
        for beat in beats:
            assert not front.servicer.told
            beat.num_processes = 2
            await front.control.Heartbeat(beat, Context())
        await waiting
        await asyncio.wait_for(moves_of(front).announce("b:1"), 60.0)

    play(scene)


def test_a_question_for_the_live_workers_is_no_heartbeat_that_looks_for_the_address() -> None:
    async def scene(front: Front) -> None:
        await front.join(0, 1)
        front.servicer.announce("b:1")
        asked = pb.HeartbeatRequest(job=JOB, incarnation=100, wants_live=True)
        await front.control.Heartbeat(asked, Context())
        assert not front.servicer.told

    play(scene)
