"""Registers keep one claim for each epoch, also of many writers at the same time."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pscore.errors import ConfigError
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.durability.sealed import write_json
from psserver.standby import etcd_register
from psserver.standby import parting as module
from psserver.standby.folder_register import FolderRegister
from psserver.standby.handover import Taker, Taking
from psserver.standby.heir import Heir
from psserver.standby.parting import PartingByRegister, name_in
from psserver.standby.pieces import TAKEN
from psserver.standby.registers import Register, register_of, settle
from psserver.standby.succession import Claim, alone, give, left_to, pair, take
from tests.etcd import running_etcd
from tests.integration.command import taken_port
from tests.kube_api import KubeApi, running_kube_api
from tests.leases import Leases, enter_pod, make_place
from tests.leases import serving as serving_leases

SHARD = "shard-1-of-2"
FIRST = Claim(epoch=1, holder="p", address="a:1")


def places(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [str(folder), f"memory://{folder}"]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an etcd; skips where none is installed."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as url:
        yield url


@pytest.fixture(scope="module")
def kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    """A real API server of Kubernetes; skips where none is built."""
    with running_kube_api(tmp_path_factory.mktemp("kube")) as api:
        yield api


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[tuple[Leases, int]]:
    """A stand-in for it, and its port."""
    found = Leases(tmp_path)
    with serving_leases(found) as port:
        yield found, port


@pytest.fixture(params=["folder", "memory", "etcd", "leases", "kubernetes"])
def open_register(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Register]:
    if request.param == "memory":
        pytest.importorskip("fsspec")
    if request.param == "etcd":
        place = f"{request.getfixturevalue('etcd')}{tmp_path}"
    elif request.param == "leases":
        leases, port = request.getfixturevalue("leases")
        leases.add(f"night-{SHARD}")
        enter_pod(monkeypatch, leases.account, port)
        place = "kubernetes://night"
    elif request.param == "kubernetes":
        api = request.getfixturevalue("kube_api")
        enter_pod(monkeypatch, tmp_path / "account", api.port)
        place = make_place(api, tmp_path / "account", SHARD)
    else:
        place = places(tmp_path / "register")[request.param == "memory"]
    return lambda: register_of(place, SHARD)


def test_a_register_in_etcd_asks_the_next_member_and_believes_only_etcd(
    etcd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken_port() as silent:
        first = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(etcd_register, "TIMEOUT_S", 0.2)
        with pytest.raises(OSError, match="timed out"):
            register_of(f"etcd://{first}/night", SHARD).newest()
        monkeypatch.undo()
    register = register_of(f"etcd://{first},{etcd.partition('://')[2]}/night", SHARD)
    assert register.newest() is None
    assert register.create(FIRST)
    assert register.newest() == FIRST
    for name in ("shard-1-of-20", "shard-1-of-", "hard-1-of-2"):
        assert register_of(f"{etcd}/night", name).newest() is None
    with serving(b"{}") as other, pytest.raises(OSError, match="this is not etcd"):
        register_of(f"etcd://{other}/night", SHARD).create(FIRST)


@contextmanager
def serving(body: bytes) -> Iterator[str]:
    """Answers each POST with `body`; yields the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_url_that_cannot_be_a_register_in_etcd_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for url in ("etcd://", "etcd://host:2379", "etcd:///night"):
        with pytest.raises(ConfigError, match="must be like etcd://host:2379/night"):
            register_of(url, SHARD)
    with pytest.raises(ConfigError, match=r"register etcd://a:1,,b:1/night: entry 2 .* is empty"):
        register_of("etcd://a:1,,b:1/night", SHARD)
    monkeypatch.setenv("ETCDCTL_CACERT", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="a file of ETCDCTL_CACERT"):
        register_of("etcds://host:2379/night", SHARD)


def test_a_claim_is_made_once_and_stays(open_register: Callable[[], Register]) -> None:
    one, two = open_register(), open_register()
    assert one.newest() is None
    assert one.create(FIRST)
    other = Claim(epoch=1, holder="q", address="b:1", heir="x", heir_address="c:1", reason="r")
    assert not two.create(other)
    assert two.newest() == FIRST
    for epoch in range(2, 12):  # As numbers, not as words.
        assert two.create(Claim(epoch=epoch, holder="q", address="b:1"))
    newest = one.newest()
    assert newest is not None
    assert newest.epoch == 11


def test_of_many_that_write_at_once_one_succeeds(open_register: Callable[[], Register]) -> None:
    registers = [open_register() for _ in range(8)]
    registers[0].create(pair(None, "p", "a:1", "s", "b:1"))

    def try_one(number: int) -> Claim | None:
        def decide(newest: Claim | None) -> Claim | None:
            is_own = number % 2 == 0
            return alone(newest, "p", "a:1", "r") if is_own else take(newest, "s", "r")

        return settle(registers[number], decide)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(try_one, range(8)))
    newest = registers[0].newest()
    assert newest is not None
    assert newest.epoch == 2
    winners = {it.holder for it in found if it is not None}
    assert winners == {newest.holder}
    assert found.count(None) == 4


def test_a_store_that_replaces_objects_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no folder here"):
        register_of(str(tmp_path / "none"), SHARD)
    with pytest.raises(ConfigError, match="no folder here"):
        register_of("relative", SHARD)
    with pytest.raises(ConfigError, match="kubernetes://, s3:// or gs://"):
        register_of(f"file://{tmp_path}", SHARD)
    memory: Any = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    make = memory.pipe_file
    monkeypatch.setattr(
        memory, "pipe_file", lambda self, path, data, mode="": make(self, path, data)
    )
    with pytest.raises(ConfigError, match="does not keep"):
        register_of("memory://night", SHARD)
    monkeypatch.setattr(importlib, "import_module", _missing)
    with pytest.raises(ConfigError, match="install fsspec"):
        register_of("s3://night", SHARD)


def _missing(name: str) -> object:
    raise ImportError(name)


@pytest.mark.parametrize(
    "values", [{}, {"epoch": 0}, {"epoch": True}, {**FIRST.to_json(), "heir": 1}], ids=str
)
def test_a_file_without_a_claim_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"epoch|values"):
        Claim.from_json(values)


def test_claims_follow_each_other() -> None:
    paired = pair(FIRST, "p", "a:1", "s", "b:1")
    assert (paired.epoch, paired.holder, paired.heir) == (2, "p", "s")
    with pytest.raises(ConfigError, match="is at a:1 since epoch 1"):
        pair(FIRST, "q", "c:1", "s", "b:1")
    assert alone(FIRST, "p", "a:1", "r") is FIRST
    assert alone(paired, "q", "c:1", "r") is None
    taken = take(paired, "s", "silence")
    assert taken == Claim(epoch=3, holder="s", address="b:1", reason="silence")
    assert take(taken, "s", "again") is taken
    assert (take(None, "s", ""), take(FIRST, "s", ""), take(paired, "x", "")) == (None,) * 3
    assert alone(taken, "p", "a:1", "r") is None
    given = give(paired, "p", "s", "b:1")
    assert given is not None
    assert (given.epoch, given.holder, given.heir) == (3, "s", "")
    assert (give(given, "p", "s", "b:1"), give(None, "p", "s", "b:1")) == (given, None)
    further = take(pair(taken, "s", "b:1", "t", "c:1"), "t", "silence")
    assert give(further, "p", "s", "b:1") is further  # By one that was stopped meanwhile.
    assert (left_to(None, "b:1"), left_to(given, "b:1")) == (None, given)
    with pytest.raises(ConfigError, match="lost its journals"):
        left_to(given, "c:1")


# ----- the two processes


def parting(folder: Path, place: Path, move: str = "s") -> PartingByRegister:
    return PartingByRegister(folder, str(place), 1.0, "a:1", move, "b:1")


async def no_close() -> None:
    raise AssertionError


def test_a_holder_keeps_its_name_and_goes_on_alone_unless_the_standby_has_the_shard(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        journals, place = tmp_path / SHARD, tmp_path / "register"
        journals.mkdir()
        place.mkdir()
        holder, offer = parting(journals, place), pb.OfferRequest()
        await holder.prepare(offer)
        assert (offer.register, offer.epoch, offer.failover_s) == (str(place), 1, 1.0)
        await holder.pair()
        again = parting(journals, place)  # After a kill.
        assert await again.part(no_close)
        assert again.claim is not None
        assert (again.claim.holder, again.claim.epoch) == (offer.holder, 3)
        await again.pair()
        settle(register_of(str(place), SHARD), lambda newest: take(newest, "s", "silence"))
        assert not await again.part(no_close)
        await again.give()  # Changes nothing: it is there.
        with pytest.raises(ConfigError, match="another process has the shard"):
            await parting(journals, place).prepare(offer)
        (tmp_path / "b").mkdir()
        write_json(tmp_path / "b" / TAKEN, {"id": "s"})
        # The one that has taken it.
        assert name_in(tmp_path / "b", str(place)) == ("s", 0)

    asyncio.run(scene())


def test_a_process_that_got_the_shard_writes_that_once_the_register_answers(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        (tmp_path / SHARD).mkdir()
        place, away = tmp_path / "register", tmp_path / "away"
        place.mkdir()
        holder = parting(tmp_path / SHARD, place)
        await holder.prepare(pb.OfferRequest())
        await holder.pair()  # It gives the shard away, and is lost.
        place.rename(away)
        task = asyncio.create_task(Heir(Standby(), SHARD, str(place), 0.1, "a:1").confirm("s"))
        await asyncio.sleep(0)
        away.rename(place)
        await task
        newest = register_of(str(place), SHARD).newest()
        assert newest is not None
        assert (newest.holder, newest.address, newest.epoch) == ("s", "b:1", 3)

    asyncio.run(scene())


def test_a_holder_without_a_register_answers_nobody_until_it_is_back(tmp_path: Path) -> None:
    async def scene() -> None:
        journals, place, away = tmp_path / SHARD, tmp_path / "register", tmp_path / "away"
        journals.mkdir()
        place.mkdir()
        holder = parting(journals, place)
        await holder.prepare(pb.OfferRequest())
        await holder.pair()
        place.rename(away)
        closed: list[str] = []

        async def close() -> None:
            closed.append("once")
            away.rename(place)

        assert await parting(journals, place).part(close)
        assert closed == ["once"]
        (place / f"{SHARD}.9.claim").write_text("{")
        with pytest.raises(ConfigError, match="the register at"):
            await holder.prepare(pb.OfferRequest())

    asyncio.run(scene())


def test_a_register_that_shows_less_than_it_had_gives_the_shard_to_nobody(tmp_path: Path) -> None:
    """As a folder whose mount is not there any more."""

    async def scene() -> None:
        journals, place, away = tmp_path / SHARD, tmp_path / "register", tmp_path / "away"
        journals.mkdir()
        place.mkdir()
        first = parting(journals, place)
        await first.prepare(pb.OfferRequest())
        await first.pair()
        place.rename(away)
        place.mkdir()
        standby = Standby()
        heir = Heir(standby, SHARD, str(place), 1.0, "a:1")
        heir.known = 2
        await heir.try_now("s", "silence")
        assert standby.done == []
        closed: list[str] = []

        async def close() -> None:
            closed.append("once")
            assert not list(place.iterdir())
            place.rmdir()
            away.rename(place)

        for holder in (parting(journals, place), first):  # The first one is another process.
            assert await holder.part(close)
        assert closed == ["once"]

    asyncio.run(scene())


def test_a_holder_answers_nobody_while_its_register_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        (tmp_path / SHARD).mkdir()
        holder, ends = parting(tmp_path / SHARD, tmp_path), threading.Event()
        await holder.prepare(pb.OfferRequest())
        monkeypatch.setattr(module, "PART_S", 0.0)
        monkeypatch.setattr(FolderRegister, "newest", lambda _: ends.wait() and None)

        async def close() -> None:
            monkeypatch.undo()
            ends.set()

        assert await holder.part(close)
        assert ends.is_set()

    asyncio.run(scene())


class Standby:
    """A process that is a standby, without a shard."""

    def __init__(self) -> None:
        self.taking, self.num_heard, self.done = Taking(Taker.FOLLOWING, "s"), 0, list[object]()

    def keep(self) -> None:
        self.done.append("keep")
        self.taking.prepare("s")

    def drop(self) -> None:
        self.done.append("drop")
        self.taking.release()

    def serve(self, claim: Claim) -> None:
        self.done.append(claim.epoch)
        self.taking.begin("s")


@pytest.mark.parametrize("first", ["heir", "holder"])
def test_a_standby_takes_over_after_silence_unless_the_holder_was_first(
    first: str, tmp_path: Path
) -> None:
    place = str(tmp_path)
    register, standby = register_of(place, SHARD), Standby()
    heir = Heir(standby, SHARD, place, 0.01, "a:1")
    with pytest.raises(ConfigError, match="not the same place"):
        heir.require("p", 1)
    register.create(FIRST)
    heir.require("p", 1)
    register.create(pair(FIRST, "p", "a:1", "s", "b:1"))
    if first == "holder":
        settle(register, lambda newest: alone(newest, "p", "a:1", "r"))
    asyncio.run(heir.watch("s"))
    assert standby.done == ["keep", 3 if first == "heir" else "drop"]
    assert standby.taking.phase is (Taker.SERVING if first == "heir" else Taker.EMPTY)


def test_a_standby_that_cannot_reach_the_register_goes_on_to_follow(tmp_path: Path) -> None:
    place, standby = tmp_path / "register", Standby()
    heir = Heir(standby, SHARD, str(place), 1.0, "a:1")
    asyncio.run(heir.try_now("s", "r"))
    assert standby.done == []
    assert standby.taking.phase is Taker.FOLLOWING
