"""The service by which a shard moves: the order of its calls, and requests that are refused."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pscore.errors import ConfigError, LimitError, PacelineError, RemoteProtocolError
from pscore.net.credentials import ANYONE, Credentials
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.decisions.limits import Limits
from psserver.decisions.shard import Shard
from psserver.engine.engine import Engine
from psserver.service.standby_service import SILENT_S, StandbyServicer
from psserver.standby.handover import Giver
from psserver.standby.mover import MoveOrder, Mover, described
from psserver.standby.pieces import ArrivingJournals
from psserver.standby.spans import Span, digest_of_span

CONTEXT = cast(Any, None)


class Process:
    """An empty process of shard 1 of 2, without sockets."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        shard = Shard(1, 2, 10.0, Limits(memory_nbytes=1 << 20))
        self.engine = Engine(shard, now=lambda: self.now_s)
        self.incoming = ArrivingJournals(folder / "target")
        self.begun: list[object] = []
        self.mover = mover = Mover(None, cast(Any, self), lambda: ANYONE)
        own = lambda: described(1, 2, "night")  # noqa: E731
        self.closed: list[str] = []
        parts = (own, self.take_over, self.closed.append)
        self.service = StandbyServicer(self.engine, mover, self.incoming, *parts)

    def take_over(self) -> bool:
        self.begun.append(self.incoming.begin())
        return True

    def offer(self) -> pb.OfferRequest:
        raise ConfigError("it has no journals")


def offered(**changes: Any) -> pb.OfferRequest:
    offer = described(1, 2, "night")
    offer.id, offer.instance = "m", 7
    for name, value in changes.items():
        setattr(offer, name, value)
    return offer


def sent(folder: Path) -> tuple[list[pb.PutRequest], pb.PrepareMoveRequest]:
    """Returns the requests that send the journals in a folder: two that count together."""
    (folder / "1-a").mkdir(parents=True)
    (folder / "1-a" / "arena").write_bytes(b"numbers")
    span = Span(path="1-a/arena", offset=0, nbytes=7)
    puts = [
        pb.PutRequest(
            id="m",
            pieces=[pb.MovedPiece(path="1-a/arena", offset=offset, data=data, size=7, reserved=7)],
            more=offset == 0,
        )
        for offset, data in ((0, b"numb"), (4, b"ers"))
    ]
    digest = digest_of_span(folder, span)
    part = pb.MovedPart(path=span.path, offset=0, nbytes=7, digest=digest)
    return puts, pb.PrepareMoveRequest(id="m", parts=[part])


def test_a_shard_that_is_whole_begins_once_however_often_that_is_asked(tmp_path: Path) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        service = process.service
        puts, prepare = sent(tmp_path / "source")
        begin = pb.BeginMoveRequest(id="m")
        await service.Offer(offered(), CONTEXT)
        await service.Put(puts[0], CONTEXT)
        assert list(tmp_path.glob("*/1-a/arena")) == [tmp_path / "source" / "1-a" / "arena"]
        await service.Put(puts[1], CONTEXT)
        with pytest.raises(RemoteProtocolError, match="not complete"):
            await service.Begin(begin, CONTEXT)
        await service.Prepare(prepare, CONTEXT)
        for _ in range(2):
            await service.Begin(begin, CONTEXT)
        ((mark),) = process.begun
        assert mark == {"id": "m", "instance": 7, "source": ""}
        assert (tmp_path / "target" / "1-a" / "arena").read_bytes() == b"numbers"

    asyncio.run(scene())


def test_a_process_that_is_about_to_end_takes_no_shard(tmp_path: Path) -> None:
    """A shard that is whole here already is taken: the other process has given it."""

    async def scene() -> None:
        ends, begin = pb.MoveRequest(ends=True), pb.BeginMoveRequest(id="m")
        early, late = Process(tmp_path / "early").service, Process(tmp_path / "late").service
        puts, prepare = sent(tmp_path / "source")
        for service in (early, late):
            await service.Offer(offered(), CONTEXT)
            for put in puts:
                await service.Put(put, CONTEXT)
        assert (await early.Move(ends, CONTEXT)).taking == "taking"
        await late.Prepare(prepare, CONTEXT)
        assert (await late.Move(ends, CONTEXT)).taking == "prepared"
        for refused in (early.Prepare(prepare, CONTEXT), early.Offer(offered(), CONTEXT)):
            with pytest.raises(RemoteProtocolError, match="about to end"):
                await refused
        await late.Begin(begin, CONTEXT)
        assert (await late.Move(pb.MoveRequest(), CONTEXT)).taking == "serving"

    asyncio.run(scene())


def test_a_full_disk_at_the_end_of_a_move_is_a_refusal_and_begin_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is none of ours would end the process."""

    async def scene() -> None:
        process = Process(tmp_path)
        puts, prepare = sent(tmp_path / "source")
        await process.service.Offer(offered(), CONTEXT)
        for put in puts:
            await process.service.Put(put, CONTEXT)
        await process.service.Prepare(prepare, CONTEXT)
        with monkeypatch.context() as full:
            full.setattr(process.incoming, "note_begun", fail)
            with pytest.raises(LimitError, match="no room"):
                await process.service.Begin(pb.BeginMoveRequest(id="m"), CONTEXT)
            assert process.begun == []
        await process.service.Begin(pb.BeginMoveRequest(id="m"), CONTEXT)
        assert len(process.begun) == 1

    asyncio.run(scene())


def test_a_disk_that_cannot_be_written_is_a_refusal_of_the_first_call_and_of_a_withdrawal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(process.incoming, "start", fail)
            full.setattr(process.mover, "withdraw", fail)
            with pytest.raises(LimitError, match="no room"):
                await process.service.Offer(offered(), CONTEXT)
            with pytest.raises(LimitError, match="still wanted"):
                await process.service.Move(pb.MoveRequest(withdraws=True), CONTEXT)
        await process.service.Offer(offered(), CONTEXT)

    asyncio.run(scene())


def test_a_move_whose_token_cannot_be_read_is_refused_and_the_shard_serves(tmp_path: Path) -> None:
    def unreadable() -> Credentials:
        raise ConfigError("cannot read the token file")

    async def scene() -> None:
        process: Any = Process(tmp_path)
        process.offer = offered
        mover = Mover(None, process, unreadable)
        with pytest.raises(ConfigError, match="token file"):
            mover.start(MoveOrder(to="127.0.0.1:1"))
        assert mover.task is None
        assert mover.giving.phase is Giver.SERVING

    asyncio.run(scene())


def test_a_process_is_not_its_own_standby(tmp_path: Path) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        process.mover.giving.start()
        with pytest.raises(ConfigError, match="has the shard itself"):
            await process.service.Offer(offered(), CONTEXT)
        process.mover.giving.phase = Giver.MOVED  # It may come back from where it is.
        await process.service.Offer(offered(), CONTEXT)

    asyncio.run(scene())


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_standby_is_promoted_once_its_source_is_silent_and_takes_nothing_more(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        service, promotion = process.service, pb.PromoteRequest()
        puts, _ = sent(tmp_path / "source")
        await service.Offer(offered(), CONTEXT)
        process.now_s = 100.0
        for put in puts:
            await service.Put(put, CONTEXT)
        with pytest.raises(RemoteProtocolError, match="no standby that has everything"):
            await service.Promote(promotion, CONTEXT)
        await service.Followed(pb.FollowedRequest(id="m"), CONTEXT)
        process.now_s += SILENT_S / 2
        with pytest.raises(ConfigError, match="still sends"):
            await service.Promote(promotion, CONTEXT)
        for sign in (
            service.Put(puts[1], CONTEXT),
            service.Followed(pb.FollowedRequest(id="m"), CONTEXT),
        ):
            await sign
            process.now_s += SILENT_S - 1.0
            with pytest.raises(ConfigError, match="still sends"):
                await service.Promote(promotion, CONTEXT)
        assert not process.begun
        process.now_s += 1.0
        assert list((await service.Promote(promotion, CONTEXT)).jobs) == []
        ((mark),) = process.begun
        assert mark == {"id": "m", "instance": 7, "source": "", "standby": True, "epoch": 0}
        assert (tmp_path / "target" / "1-a" / "arena").read_bytes() == b"numbers"
        with pytest.raises(RemoteProtocolError, match="serving"):
            await service.Put(puts[1], CONTEXT)  # The source was cut off, and lives.
        assert (await service.Release(pb.ReleaseStandbyRequest(), CONTEXT)).serves
        await service.Begin(pb.BeginMoveRequest(id="m"), CONTEXT)  # Of a source that has lost it.
        assert len(process.begun) == 1

    asyncio.run(scene())


@pytest.mark.parametrize("place", ["note_begun", "begin"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_promotion_that_fails_is_repeated_also_by_the_next_process(
    place: str, is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        puts, _ = sent(tmp_path / "source")
        await process.service.Offer(offered(), CONTEXT)
        for put in puts:
            await process.service.Put(put, CONTEXT)
        await process.service.Followed(pb.FollowedRequest(id="m"), CONTEXT)
        process.now_s = 100.0
        with monkeypatch.context() as full:
            full.setattr(process.incoming, place, fail)
            for _ in range(2):
                with pytest.raises(LimitError, match="no room to take the shard over"):
                    await process.service.Promote(pb.PromoteRequest(), CONTEXT)
        if is_killed:
            process = Process(tmp_path)
            process.now_s = 100.0
        for _ in range(2):  # Its answer may be lost.
            await process.service.Promote(pb.PromoteRequest(), CONTEXT)
        assert len(process.begun) == 1
        assert (tmp_path / "target" / "1-a" / "arena").read_bytes() == b"numbers"

    asyncio.run(scene())


def test_a_standby_that_is_released_forgets_the_shard(tmp_path: Path) -> None:
    async def scene() -> None:
        process = Process(tmp_path)
        service = process.service
        puts, _ = sent(tmp_path / "source")
        await service.Offer(offered(), CONTEXT)
        for put in puts:
            await service.Put(put, CONTEXT)
        await service.Followed(pb.FollowedRequest(id="m"), CONTEXT)
        assert not (await service.Release(pb.ReleaseStandbyRequest(), CONTEXT)).serves
        assert not list(tmp_path.glob("incoming-*"))
        assert process.closed == ["it is the standby of ", ""]  # Workers may join again.
        process.now_s = 100.0
        with pytest.raises(RemoteProtocolError, match="empty"):
            await service.Promote(pb.PromoteRequest(), CONTEXT)
        with pytest.raises(RemoteProtocolError, match="empty"):
            await service.Put(puts[0], CONTEXT)

    asyncio.run(scene())


Call = Callable[[StandbyServicer], Awaitable[object]]
REFUSED: dict[str, tuple[Call, type[PacelineError], str]] = {
    "another shard": (lambda s: s.Offer(offered(shard=0), CONTEXT), ConfigError, "has shard 0"),
    "another cluster": (
        lambda s: s.Offer(offered(cluster="day"), CONTEXT), ConfigError, "has cluster 'day'",
    ),
    "another version": (
        lambda s: s.Offer(offered(protocol=99), CONTEXT), ConfigError, "has protocol 99",
    ),
    "another format": (
        lambda s: s.Offer(offered(journal_format=99), CONTEXT), ConfigError, "journal_format 99",
    ),
    "too large": (lambda s: s.Offer(offered(table_nbytes=1 << 40), CONTEXT), LimitError, "memory"),
    "no table": (
        lambda s: s.Offer(pb.OfferRequest.FromString(
            offered().SerializeToString() + pb.OfferRequest(tables=["[]"]).SerializeToString()
        ), CONTEXT),
        RemoteProtocolError, "a table of a shard",
    ),
    "pieces of no move": (
        lambda s: s.Put(pb.PutRequest(id="m"), CONTEXT), RemoteProtocolError, "empty",
    ),
    "files of no move": (
        lambda s: s.Prepare(pb.PrepareMoveRequest(id="m"), CONTEXT), RemoteProtocolError, "empty",
    ),
    "the begin of no move": (
        lambda s: s.Begin(pb.BeginMoveRequest(id=""), CONTEXT), RemoteProtocolError, "not complete",
    ),
    "a standby of no move": (
        lambda s: s.Followed(pb.FollowedRequest(id="m"), CONTEXT), RemoteProtocolError, "empty",
    ),
    "a promotion of no standby": (
        lambda s: s.Promote(pb.PromoteRequest(), CONTEXT), RemoteProtocolError, "is empty",
    ),
    "two addresses": (
        lambda s: s.Move(pb.MoveRequest(to="a:1,b:1"), CONTEXT), ConfigError, "several",
    ),
    "no address": (lambda s: s.Move(pb.MoveRequest(to="a"), CONTEXT), ConfigError, "a"),
    "no journals": (lambda s: s.Move(pb.MoveRequest(to="a:1"), CONTEXT), ConfigError, "journals"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    call, kind, text = REFUSED[name]
    process = Process(tmp_path)

    async def scene() -> None:
        await call(process.service)

    with pytest.raises(kind, match=text):
        asyncio.run(scene())
    assert not process.begun
