"""A shard whose other process fails at any call goes on to answer, and never beside that one."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pscore.errors import ConfigError, RemoteProtocolError, TransportError
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.standby import mover, parting
from psserver.standby.handover import Giver
from psserver.standby.mover import MoveOrder, Mover
from psserver.standby.parting import keep_name
from psserver.standby.registers import register_of
from psserver.standby.stream import JournalStream

STANDBY = MoveOrder(to="b:1", stays=True, same_host=True)


class Target:
    """The other process, whose calls fail as a test says."""

    failing: ClassVar[set[str]] = set()  # Also with an address: only there.
    hanging: ClassVar[set[str]] = set()  # Likewise.
    calls: ClassVar[list[str]] = []
    serves = False

    def __init__(self, address: str, credentials: object) -> None:
        self._address = address

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            if name == "close":
                return None
            self.calls.append(name)
            names = {name, f"{name} {self._address}"}
            end_s = time.monotonic() + 30.0
            while names & self.hanging and time.monotonic() < end_s:
                time.sleep(0.01)
            if names & self.failing:
                raise TransportError(f"{name} fails")
            return self.serves if name == "release" else SimpleNamespace(boot="another")

        return call


class Host:
    """A process that has a shard, without sockets."""

    address = "a:1"

    def __init__(self) -> None:
        self.is_open, self.done = True, list[str]()
        self.followed = self
        self.has_local = False  # Whether a worker could not follow.
        self.stream: Any = None
        self.failed: Callable[[], None] = lambda: None

    def offer(self) -> pb.OfferRequest:
        return pb.OfferRequest(source=self.address)

    def require_movable(self, boot: str) -> None:
        if self.has_local:
            raise ConfigError("a worker shares memory")

    def follow(self, send: object, failed: Callable[[], None]) -> JournalStream:
        self.failed = failed
        flushed = SimpleNamespace(problem="", sent_nbytes=0, is_whole=False)
        flushed.flush = lambda _: not flushed.problem
        self.stream = flushed
        return cast(JournalStream, flushed)

    def fail(self) -> None:
        self.stream.problem = "it is gone"
        self.failed()

    def slices(self, stream: JournalStream) -> Iterable[Any]:
        return ()

    def unfollow(self) -> None:
        self.done.append("unfollow")

    def sent_spans(self) -> list[Any]:
        return []

    async def announce(self, address: str) -> None:
        self.done.append(f"announce {address}".strip())

    async def freeze(self) -> None:
        self.is_open = False

    async def thaw(self) -> None:
        self.is_open = True

    async def fence(self) -> None:
        self.is_open = False

    async def renew(self) -> None:
        assert self.is_open, "workers' heartbeats are held, so they never know"
        self.done.append("renew")

    def reopen(self) -> None:
        self.is_open = True

    def show_moved(self, address: str) -> None:
        self.done.append(f"moved to {address}")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Target]]:
    for module in (mover, parting):
        monkeypatch.setattr(module, "MoveTarget", Target)
    monkeypatch.setattr(parting, "PART_S", 0.0)
    monkeypatch.setattr(mover, "RETRY_S", 1e6)
    Target.failing, Target.calls, Target.serves = set(), [], False
    yield Target
    Target.hanging.clear()


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(0)


def test_a_standby_that_fails_in_the_last_step_of_a_move_leaves_the_shard_open(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        assert host.done == ["announce b:1"]  # Workers know it before it may serve.
        target.failing = {"prepare", "release"}
        moves.start(MoveOrder(to="b:1"))
        await until(lambda: moves.giving.phase is Giver.SERVING)
        assert host.is_open
        assert host.done[-3:] == ["renew", "unfollow", "announce"]
        assert Mover(tmp_path, cast(Any, host), lambda: ANYONE).giving.serves  # Also after a kill.
        assert moves.has_standby  # It is to be one again.

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_stream_that_fails_before_the_standby_knows_leaves_none_behind(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)

        async def announce(address: str) -> None:
            if address:
                host.fail()  # While workers are told.

        host.announce = announce  # type: ignore[method-assign]
        moves.start(STANDBY)
        await until(lambda: moves.giving.phase is Giver.SERVING)
        assert "followed" not in target.calls
        assert moves.problem == "it is gone"

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_has_one_standby_which_may_be_named_again(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        moves.start(STANDBY)
        for other in (replace(STANDBY, to="c:1"), replace(STANDBY, failover_s=2.0)):
            with pytest.raises(ConfigError, match="has a standby at b:1"):
                moves.start(other)
        assert (moves.phase, moves.to, target.calls.count("offer")) == ("followed", "b:1", 1)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_moves_to_its_standby_also_while_that_is_filled(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        for phase in ("copying", "followed"):
            folder = tmp_path / phase
            folder.mkdir()
            moves = Mover(folder, cast(Any, Host()), lambda: ANYONE)
            moves.start(STANDBY)
            await until(lambda moves=moves, phase=phase: moves.phase == phase)  # type: ignore[misc]
            for mbit in (0, 0, 8):  # As a command does that was interrupted, and is given again.
                moves.start(MoveOrder(to="b:1", mbit=mbit))
            await until(lambda moves=moves: moves.giving.phase is Giver.MOVED)  # type: ignore[misc]
            moves.start(MoveOrder(to="b:1"))
            assert (folder / "given.json").exists()
            assert not (folder / "standby.json").exists()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_an_order_that_is_given_again_changes_nothing(target: type[Target], tmp_path: Path) -> None:
    async def scene() -> None:
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        order = MoveOrder(to="b:1")
        moves.start(order)
        assert moves.giving.phase is Giver.COPYING
        moves.start(order)
        with pytest.raises(RemoteProtocolError, match="cannot be moved now: it is copying"):
            moves.start(replace(order, to="c:1"))
        await until(lambda: moves.giving.phase is Giver.MOVED)
        moves.start(order)
        assert target.calls.count("offer") == 1
        for other in (replace(order, to="c:1"), replace(order, stays=True)):
            with pytest.raises(RemoteProtocolError, match="cannot be moved now: it is moved"):
                moves.start(other)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_standby_that_is_withdrawn_is_asked_to_forget_the_shard_and_never_wanted_again(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has everything, or sooner, or while it is away."""
    monkeypatch.setattr(mover, "RETRY_S", 0.0)

    async def scene() -> None:
        for phase in ("followed", "copying", "serving"):
            folder = tmp_path / phase
            folder.mkdir()
            target.failing, host = {"offer"} if phase == "serving" else set(), Host()
            moves = Mover(folder, cast(Any, host), lambda: ANYONE)
            moves.start(STANDBY)
            await until(lambda moves=moves, phase=phase: moves.phase == phase)  # type: ignore[misc]
            target.calls.clear()
            moves.withdraw()
            while moves.giving.phase is not Giver.SERVING:
                await asyncio.sleep(0)
            target.failing = set()
            for _ in range(1000):
                await asyncio.sleep(0)
            assert ("release" in target.calls) == (phase == "followed")
            assert (moves.phase, moves.has_standby, host.is_open) == ("serving", False, True)
            assert not (folder / "standby.json").exists()
            with pytest.raises(ConfigError, match="no standby of this shard is wanted"):
                moves.withdraw()
            moves.start(STANDBY)  # A person may change their mind.
            await until(lambda moves=moves: moves.phase == "followed")  # type: ignore[misc]

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_withdrawal_that_cannot_be_recorded_changes_nothing(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was recorded counts, also where the mark of the standby then stays."""

    def refuse(*_: object, **options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    async def scene() -> None:
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        with monkeypatch.context() as full:
            full.setattr(mover, "write_json", refuse)
            with pytest.raises(OSError, match="read-only"):
                moves.withdraw()
            await asyncio.sleep(0)
            assert (moves.phase, moves.has_standby) == ("followed", True)
        with monkeypatch.context() as full:
            full.setattr(Path, "unlink", refuse)
            moves.withdraw()
            await until(lambda: moves.giving.phase is Giver.SERVING)
        again = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)  # After a kill.
        again.resume()
        await until(lambda: again.giving.phase is Giver.SERVING)
        assert not again.has_standby
        assert not (tmp_path / "standby.json").exists()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_whose_standby_was_promoted_serves_no_more_where_that_cannot_be_recorded(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        monkeypatch.setattr(mover, "write_json", refuse)
        target.serves = True
        host.fail()
        await until(lambda: moves.giving.phase is Giver.MOVED)
        assert not host.is_open
        again = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)  # It has to ask again.
        assert again.giving.phase is Giver.ASKING

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_without_standby_and_room_answers_once_there_is_room(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next process would have the number that the standby has."""
    monkeypatch.setattr(parting, "PART_S", 0.0)
    monkeypatch.setattr(parting, "AGAIN_S", 0.0)

    async def scene() -> None:
        host: Any = Host()
        full = [OSError(errno.ENOSPC, "full")] * 3

        async def renew() -> None:
            if full:
                raise full.pop()

        host.renew = renew
        moves = Mover(tmp_path, host, lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        target.failing = {"release"}
        host.fail()
        await until(lambda: moves.giving.phase is Giver.SERVING)
        assert not full

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_standby_that_cannot_be_is_logged_once(
    target: type[Target],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is asked again every few seconds for as long as it is wanted."""
    monkeypatch.setattr(mover, "RETRY_S", 0.0)

    async def scene() -> None:
        target.failing = {"offer"}
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: target.calls.count("offer") == 5)
        assert capsys.readouterr().out.count("does not follow any more") == 1
        moves.withdraw()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_standby_that_is_withdrawn_and_was_promoted_has_the_shard(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        target.serves = True
        moves.withdraw()
        await until(lambda: moves.giving.phase is Giver.MOVED)
        assert not host.is_open

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_standby_that_was_promoted_has_the_shard(target: type[Target], tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        target.serves = True
        host.fail()
        await until(lambda: moves.giving.phase is Giver.MOVED)
        assert host.done[-2:] == ["unfollow", "moved to b:1"]
        again = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)  # After a kill.
        assert (again.giving.phase, again.to) == (Giver.GIVEN, "b:1")

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_that_was_killed_asks_its_standby_first(
    target: type[Target], tmp_path: Path
) -> None:
    async def scene() -> None:
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        for serves in (False, True):
            host = Host()
            host.is_open = False
            again = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
            assert not again.giving.serves
            mark = (tmp_path / "standby.json").read_bytes()
            target.serves = serves
            again.resume()
            wanted = Giver.MOVED if serves else Giver.SERVING
            while again.giving.phase is not wanted:
                await asyncio.sleep(0)
            assert host.is_open is not serves
            (tmp_path / "standby.json").write_bytes(mark)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_standby_that_does_not_answer_is_replaced_by_another_one(
    target: type[Target], tmp_path: Path
) -> None:
    """Its machine is lost: a connection there takes long to fail."""

    async def scene() -> None:
        for order in (replace(STANDBY, to="c:1"), MoveOrder(to="c:1")):
            folder = tmp_path / str(order.stays)
            folder.mkdir()
            moves = Mover(folder, cast(Any, Host()), lambda: ANYONE)
            target.hanging.add("offer b:1")
            moves.start(STANDBY)
            target.calls.clear()
            await until(lambda: "offer" in target.calls)
            moves.start(order)
            wanted = "followed" if order.stays else "moved"
            await until(lambda: moves.phase == wanted)  # noqa: B023
            assert moves.to == "c:1"
            target.hanging.clear()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_that_does_not_move_elsewhere_wants_its_standby_again(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "RETRY_S", 0.0)

    async def scene() -> None:
        moves = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        target.failing = {"offer"}
        moves.start(STANDBY)
        await until(lambda: bool(moves.problem))
        moves.start(MoveOrder(to="c:1"))
        await until(lambda: moves.to == "b:1")
        target.failing.clear()
        await until(lambda: moves.phase == "followed")
        assert (moves.to, moves.has_standby) == ("b:1", True)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_shard_that_is_killed_while_its_standby_is_away_wants_it_afterwards(
    target: type[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        moves.start(STANDBY)
        await until(lambda: moves.phase == "followed")
        host.fail()
        await until(lambda: moves.giving.phase is Giver.SERVING)
        monkeypatch.setattr(mover, "RETRY_S", 0.0)
        again = Mover(tmp_path, cast(Any, Host()), lambda: ANYONE)
        assert again.giving.serves  # The standby was told that the shard goes on without it.
        again.resume()
        await until(lambda: again.phase == "followed")
        assert again.has_standby

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_register_names_the_process_that_gets_a_shard_before_that_serves(
    target: type[Target], tmp_path: Path
) -> None:
    """So that also the new process can write that it has the shard, if the old one is lost."""
    journals, place = tmp_path / "shard-1-of-2", tmp_path / "register"
    journals.mkdir()
    place.mkdir()
    keep_name(journals, str(place), "p", 0)  # As a process that has taken the shard over.

    async def scene() -> None:
        host = Host()
        moves = Mover(journals, cast(Any, host), lambda: ANYONE)
        target.hanging.add("begin")
        moves.start(MoveOrder(to="b:1"))
        await until(lambda: "begin" in target.calls)
        newest = register_of(str(place), journals.name).newest()
        assert newest is not None
        assert (newest.holder, newest.heir_address) == ("p", "b:1")
        target.hanging.clear()
        await until(lambda: moves.giving.phase is Giver.MOVED)
        assert not moves.has_standby
        newest = register_of(str(place), journals.name).newest()
        assert newest is not None
        assert (newest.address, newest.heir) == ("b:1", "")

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("order", [MoveOrder(to="b:1"), STANDBY], ids=["move", "standby"])
def test_a_shard_does_not_leave_a_worker_behind_that_joins_meanwhile(
    order: MoveOrder, target: type[Target], tmp_path: Path
) -> None:
    """One that shares memory with the shard, or has begun to before it heard of the move."""

    async def scene() -> None:
        host = Host()
        moves = Mover(tmp_path, cast(Any, host), lambda: ANYONE)
        assert moves.shares_memory
        target.hanging.add("offer")
        moves.start(order)
        await until(lambda: "offer" in target.calls)
        assert not moves.shares_memory

        async def announce(address: str) -> None:
            host.has_local = bool(address)  # Its first heartbeat says so.

        host.announce = announce
        target.hanging.clear()
        await until(lambda: moves.giving.phase is Giver.SERVING)
        assert moves.problem == "a worker shares memory"
        assert not {"followed", "prepare"} & set(target.calls)

    asyncio.run(asyncio.wait_for(scene(), 60))
