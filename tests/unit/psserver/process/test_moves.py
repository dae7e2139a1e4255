"""A shard waits, before it moves, for those who have to know where it will be."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscore.errors import LimitError
from psserver.process.moves import MENDERS_S, ShardMoves
from tests.unit.psserver.front import Front, play


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
