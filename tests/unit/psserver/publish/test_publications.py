"""All that a shard publishes: how often, and how that outlives the shard's process."""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from pscore.net import sockets
from pscore.net.budget import Budget
from pscore.net.connection import Connection
from pscore.net.shared_rate import SharedRate
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ByteArray
from psserver.durability.journal_dir import PUBLISHED, JobJournal, JournalDir
from psserver.durability.sealed import read_json
from psserver.engine.resume import recover
from psserver.publish.publications import Publications
from psserver.service.data_socket import DataService
from tests.unit.psserver.front import JOB, NUMEL, Front, play, pull_header, push_header


@pytest.mark.parametrize(
    ("given", "later", "every", "continues"),
    [(4, 4, 2, True), (0, 0, 2, True), (4, 8, 8, False), (4, 2, 2, True)],
)
def test_a_killed_shard_continues_as_often_as_a_worker_has_asked(
    tmp_path: Path, given: int, later: int, every: int, continues: bool
) -> None:
    """Unless its operator has chosen another number since then."""
    lineages: list[int] = []

    async def scene(outer: Front, *, asks: bool) -> None:
        settings = given if asks else later
        journals = JournalDir(tmp_path)
        front = Front(journals)
        publications = Publications(front.engine, {JOB: settings} if settings else {})
        if asks:
            await front.ready(num_workers=1)
            publications.publish(front.running, 0, 2)
        else:
            recover(front.engine)
            publications.begin()
        await asyncio.wrap_future(front.executor.submit(lambda: None))
        ((_, _, found),) = publications.listed()
        lineages.append(found.publication.lineage)
        assert found.publication.every == (2 if asks else every)
        with front.engine.lock:
            assert len(front.running.table(0).observers) == 1
        front.executor.shutdown()
        journals.close()

    play(lambda front: scene(front, asks=True))
    play(lambda front: scene(front, asks=False))
    assert (lineages[0] == lineages[1]) == continues


def test_a_killed_shard_continues_all_tables_of_a_job(tmp_path: Path) -> None:
    async def scene(outer: Front, *, asks: bool) -> dict[str, tuple[int, int]]:
        journals = JournalDir(tmp_path)
        front = Front(journals)
        publications = Publications(front.engine, {JOB: 1}, now_s=lambda: 2e6 - 1e6 * asks)
        if asks:
            await front.ready(num_workers=1)
            await front.define(name="store")
            publications.publish(front.running, 1, 3)
        else:
            recover(front.engine)
            publications.begin()
        await asyncio.wrap_future(front.executor.submit(lambda: None))
        front.executor.shutdown()
        journals.close()
        listed = publications.listed()
        return {name: (it.publication.lineage, it.publication.every) for _, name, it in listed}

    before = play(lambda front: scene(front, asks=True))
    assert set(before) == {"model", "store"}
    assert play(lambda front: scene(front, asks=False)) == before


def test_a_lineage_that_had_no_room_on_the_disk_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed shard would continue an older lineage else, which readers take for a late answer."""

    def full(self: JobJournal, meta: object) -> None:
        raise OSError("No space left on device")

    async def scene(outer: Front) -> None:
        journals = JournalDir(tmp_path)
        front = Front(journals)
        table = Publications(front.engine, {JOB: 4}, now_s=lambda: 1e6)
        with monkeypatch.context() as disk, capture_logs() as lines:
            disk.setattr(JobJournal, "write_published", full)
            await front.ready(num_workers=1)
            for _ in range(3):
                table.tick()
        assert [line["log_level"] for line in lines].count("error") == 1
        assert not list(tmp_path.glob(f"*/{PUBLISHED}"))
        table.tick()
        ((_, _, found),) = table.listed()
        (path,) = tmp_path.glob(f"*/{PUBLISHED}")
        assert read_json(path) == {"model": [found.publication.lineage, 4, 4]}
        with front.engine.lock:
            found.publication.begin_lineage()
        assert read_json(path)["model"][0] == found.publication.lineage
        front.executor.shutdown()
        journals.close()

    play(scene)


@pytest.mark.parametrize("before", ["goes back", "has no step in common"])
def test_a_job_that_goes_on_before_it_is_published_anew_is_published_at_a_multiple(
    before: str,
) -> None:
    """Another shard may have published the step before under the same number."""

    async def scene(front: Front) -> None:
        table = Publications(front.engine, {JOB: 4}, now_s=lambda: 1e6)
        await front.ready(num_workers=1)
        ((_, _, found),) = table.listed()
        publication, steps = found.publication, itertools.count()

        async def step() -> int:
            await front.push(push_header(0, next(steps)), np.ones(NUMEL, np.float32))
            await asyncio.wrap_future(front.executor.submit(lambda: None))
            table.tick()
            await asyncio.wrap_future(front.executor.submit(lambda: None))
            newest = publication.newest
            return -1 if newest is None else newest.step

        with front.engine.lock:
            publication.begin_lineage()
            publication.exact = before == "goes back"
        assert [await step() for _ in range(8)] == [-1, -1, -1, 4, 4, 4, 4, 8]

    play(scene)


def test_a_state_that_was_loaded_when_a_shard_was_killed_is_awaited_by_the_next_process(
    tmp_path: Path,
) -> None:
    """The other slices may lack it; the state has the version that they have."""
    lineages: list[int] = []

    async def idle(front: Front) -> None:
        await asyncio.wrap_future(front.executor.submit(lambda: None))

    async def before(outer: Front) -> None:
        journals = JournalDir(tmp_path)
        front = Front(journals)
        table = Publications(front.engine, {JOB: 1})
        await front.ready(num_workers=1)
        ((_, _, found),) = table.listed()
        lineages.append(found.publication.lineage)
        state = push_header(0, 0, role=data_pb2.ROLE_STATE, hyper=[])
        await front.push(state, np.ones((2, NUMEL), np.float32))
        await idle(front)
        assert found.publication.newest is None
        front.executor.shutdown()
        journals.close()

    async def after(outer: Front) -> None:
        journals = JournalDir(tmp_path)
        front = Front(journals)
        table = Publications(front.engine, {JOB: 1})
        recover(front.engine)
        table.begin()
        table.tick()
        await idle(front)
        ((_, _, found),) = table.listed()
        assert found.publication.newest is None
        await front.join(0, 1, incarnation=100)
        await front.pull(pull_header(0, 0, 0))
        await idle(front)
        assert found.publication.newest is not None
        assert found.publication.lineage > lineages[0]
        table.tick()
        (path,) = tmp_path.glob(f"*/{PUBLISHED}")
        assert read_json(path)["model"][0] == found.publication.lineage
        front.executor.shutdown()
        journals.close()

    play(before)
    play(after)


class Answers:
    """Answers each reader with the same bytes; there is room for two answers."""

    found = np.arange(4 << 20, dtype=np.uint64).view(np.uint8)  # More than sockets hold.

    def __init__(self) -> None:
        self.rate = SharedRate(1 << 30)
        self.answers = Budget(2 * self.found.nbytes, "")

    def fetch(self, header: data_pb2.FetchHeader) -> tuple[data_pb2.FetchReply, list[ByteArray]]:
        return data_pb2.FetchReply(lineage=1), [self.found[:100], self.found[100:]]

    def connect(self, number: int, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def disconnect(self, number: int, tell: Callable[[str], None]) -> None:
        pass


@contextlib.contextmanager
def pair(plane: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields two ends of a connection."""
    if plane == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("plane", ["tcp", "unix"])
def test_slow_readers_take_nothing_of_the_room_for_workers(plane: str) -> None:
    """Answers to 1,000 readers that join would disconnect workers else."""

    async def scene(front: Front) -> None:
        fetches = Answers()
        service = DataService(front.engine, fetches=fetches)
        with contextlib.ExitStack() as stack:
            answers, refused = [], 0
            for _ in range(3):
                ours, theirs = stack.enter_context(pair(plane))
                thread = threading.Thread(target=Connection(ours, service).serve)
                stack.callback(thread.join)
                stack.callback(theirs.close)
                thread.start()
                fetch = data_pb2.Envelope(id=1, fetch=data_pb2.FetchHeader(reader=1))
                sockets.send_all(theirs, sockets.frame_parts(fetch.SerializeToString(), ()))
                incoming = sockets.read_header(theirs)
                answers += [] if incoming is None else [incoming]
                refused += incoming is None  # Disconnected: it asks again.
            assert (len(answers), refused, fetches.answers.left) == (2, 1, 0)
            assert front.engine.budget.left == front.engine.budget.nbytes
            for incoming in answers:
                got = np.empty(fetches.found.nbytes, np.uint8)
                incoming.read_into(memoryview(got))
                np.testing.assert_array_equal(got, fetches.found)
        assert fetches.answers.left == fetches.answers.nbytes

    play(scene)


@pytest.mark.parametrize("plane", ["tcp", "unix"])
def test_a_reader_is_told_the_next_address_behind_an_answer_and_while_it_asks_nothing(
    plane: str,
) -> None:
    async def scene(front: Front) -> None:
        fetches = Answers()
        service = DataService(front.engine, fetches=fetches)
        with pair(plane) as (ours, theirs):
            thread = threading.Thread(target=Connection(ours, service).serve)
            thread.start()
            fetch = data_pb2.Envelope(id=1, fetch=data_pb2.FetchHeader(reader=1))
            sockets.send_all(theirs, sockets.frame_parts(fetch.SerializeToString(), ()))
            answer = sockets.read_header(theirs)
            assert answer is not None
            for address in ("early:1", "far:1"):  # While the answer is on its way.
                with front.engine.lock:
                    fetches.tell(address)
            got = np.empty(fetches.found.nbytes, np.uint8)
            answer.read_into(memoryview(got))
            np.testing.assert_array_equal(got, fetches.found)
            for address in ("far:1", ""):
                incoming = sockets.read_header(theirs)
                assert incoming is not None
                incoming.read_into()
                said = data_pb2.Envelope.FromString(incoming.header)
                assert said == data_pb2.Envelope(next=data_pb2.NextAddress(address=address))
                with front.engine.lock:
                    fetches.tell("")
            theirs.close()
            thread.join()

    play(scene)
