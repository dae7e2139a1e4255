"""The wait of a shard that is asked to end, without shards."""

import asyncio

import pytest

from psserver.service import last_checkpoint
from psserver.service.last_checkpoint import LastCheckpoint

LONG_S = 1e6  # A test that waited for it would not end.


def test_a_shard_waits_from_the_begin_to_the_end() -> None:
    async def run() -> None:
        last = LastCheckpoint()
        waiting = asyncio.create_task(last.wait(LONG_S))
        for _ in range(3):
            await asyncio.sleep(0)
            assert not waiting.done()
            last.note(is_over=False)
        last.note(is_over=True)
        await waiting

    asyncio.run(run())


def test_one_that_is_announced_and_over_at_once_is_noticed() -> None:
    async def run() -> None:
        last = LastCheckpoint()
        waiting = asyncio.create_task(last.wait(LONG_S))
        await asyncio.sleep(0)
        last.note(is_over=False)
        last.note(is_over=True)
        await waiting
        await last.wait(LONG_S)  # Of the same stop: the shard was asked to end only now.

    asyncio.run(run())


def test_none_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_checkpoint, "WORD_PART", 1e-3 / LONG_S)
    asyncio.run(LastCheckpoint().wait(LONG_S))


def test_one_that_does_not_end_takes_no_longer_than_the_grace() -> None:
    async def run() -> None:
        last = LastCheckpoint()
        last.note(is_over=False)
        await last.wait(1e-3)

    asyncio.run(run())


def test_that_of_an_earlier_stop_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_checkpoint, "RECENT_S", 0.0)

    async def run() -> None:
        last = LastCheckpoint()
        last.note(is_over=False)
        last.note(is_over=True)
        waiting = asyncio.create_task(last.wait(LONG_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        last.note(is_over=False)
        last.note(is_over=True)
        await waiting

    asyncio.run(run())
