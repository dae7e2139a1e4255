"""State machines are touched under the shard's lock alone, and shown by views made under it."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pscore.net import sockets
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.engine import reading
from psserver.service.control import ControlServicer
from psserver.service.data_socket import make_listener
from psserver.service.metrics import MetricsPage
from psserver.service.shared_view import SharedView
from tests.unit.psserver.engine.test_lock_order import Worker
from tests.unit.psserver.front import (
    JOB,
    NUMEL,
    Context,
    Front,
    grad,
    play,
    played,
    pull_header,
    push_header,
    sender,
)

NUM_SLICES = 24  # Tables of one slice each.
NUM_THREADS = 4
NUM_STEPS = 12


class Silent:
    """Accepts every answer."""

    def pushed(self, reply: object) -> None:
        """Drops it."""

    def pulled(self, reply: object, arrays: object, release: object) -> None:
        """Drops it."""
        if callable(release):
            release()


@contextmanager
def switching(interval_s: float) -> Iterator[None]:
    """Makes threads change places as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


async def many_tables(front: Front) -> None:
    for rank in range(NUM_THREADS):
        await front.join(rank, NUM_THREADS)
    for index in range(NUM_SLICES):
        await front.define(name=f"t{index}", rule=pb.Plugin(name="ssp"))
        owner = sender(0, table=index)
        header = push_header(0, 0, role=data_pb2.ROLE_WEIGHTS, hyper=[], sender=owner)
        await front.push(header, np.zeros(NUMEL, np.float32))


def train(front: Front, rank: int) -> None:
    """Plays one worker's connection: pushes and pulls that wait for others, refused pushes."""
    data = grad(1.0).view(np.uint8)
    for step in range(NUM_STEPS):
        for index in range(NUM_SLICES):
            owner = sender(rank, table=index)
            front.engine.requests.on_push(push_header(rank, step, sender=owner), data, Silent())
            header = pull_header(rank, step + 1, step, sender=owner)
            front.engine.requests.on_pull(header, Silent(), 9.0)
        front.engine.requests.note_refused()


@pytest.mark.slow
@played
async def test_status_is_read_while_threads_push(front: Front) -> None:
    await many_tables(front)
    failed: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda args: failed.append(args[1])
    threads = [threading.Thread(target=train, args=(front, rank)) for rank in range(NUM_THREADS)]
    num_looks = 0
    with switching(1e-6):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await front.control.Status(pb.StatusRequest(), Context())
            reading.figures(front.engine)
            front.engine.tick()
            num_looks += 1
        for thread in threads:
            thread.join()
    threading.excepthook = before
    assert not failed
    assert num_looks > 1
    assert reading.figures(front.engine).counters.num_pushes_refused == NUM_THREADS * NUM_STEPS


@played
async def test_pushes_refused_on_the_threads_of_connections_are_counted_under_the_lock(
    front: Front,
) -> None:
    await front.ready(num_workers=1)
    server = make_listener(front.engine, "127.0.0.1", 0, f"test-owned-{os.getpid()}")
    server.start()
    try:
        workers = [Worker(server, 0) for _ in range(NUM_THREADS)]
        for worker in workers:
            for _ in range(NUM_STEPS):
                refused = push_header(0, 0, slice=7)
                worker.send(data_pb2.Envelope(id=1, push=refused), grad(1.0))
        for worker in workers:
            for _ in range(NUM_STEPS):
                incoming = sockets.read_header(worker.socket)
                assert incoming is not None
                incoming.skip()
                assert data_pb2.Envelope.FromString(incoming.header).HasField("failed")
            worker.socket.close()
    finally:
        server.stop()
    assert reading.figures(front.engine).counters.num_pushes_refused == NUM_THREADS * NUM_STEPS


@played
async def test_every_page_and_service_reads_under_the_lock(front: Front) -> None:
    await front.ready()
    await front.push(push_header(0, 0), grad(1.0))
    request = pb.HeartbeatRequest(
        job=JOB, worker=0, incarnation=100, waiting_for="shard 1", wants_live=True
    )
    await front.control.Heartbeat(request, Context())
    (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
    assert list(job.waiting_for) == ["worker 0, for shard 1"]
    kind, _ = await MetricsPage(front.engine, lambda: True)._metrics()
    assert kind
    front.engine.suspect(sender(0))
    front.engine.requests.put_off()
    assert not front.engine.is_busy
    front.engine.leave(JOB, 1, 101, "done")


def test_a_reader_without_the_lock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(self: ControlServicer, request: object, context: object) -> pb.StatusReply:
        return pb.StatusReply(jobs=[pb.JobStatus(job=name) for name in self._engine.shard.jobs])

    file = sys.modules[ControlServicer.__module__].__file__ or ""
    careless.__code__ = careless.__code__.replace(co_filename=file)
    monkeypatch.setattr(ControlServicer, "Status", careless)

    async def scene(front: Front) -> None:
        await front.control.Status(pb.StatusRequest(), Context())

    with pytest.raises(AssertionError, match=r"Shard.jobs is read without the lock at control.py"):
        play(scene)


def test_a_thread_that_outlives_its_scene_is_not_mistaken_for_a_careless_reader() -> None:
    former: list[Front] = []

    async def first(front: Front) -> None:
        await front.ready()
        former.append(front)

    async def second(front: Front) -> None:
        thread = threading.Thread(target=former[0].engine.suspect, args=(sender(0),))
        thread.start()
        thread.join()

    play(first)
    play(second)


@played
async def test_a_view_does_not_change_with_its_job(front: Front) -> None:
    await front.ready(num_workers=1)
    (before,) = reading.status(front.engine).jobs
    await front.push(push_header(0, 0), grad(1.0))
    (after,) = reading.status(front.engine).jobs
    assert (before.num_pushes, after.num_pushes) == (1, 2)
    assert (before.tables[0].version_max, after.tables[0].version_max) == (0, 1)


def test_many_readers_share_one_view_made_after_they_asked() -> None:
    async def scene() -> None:
        made: list[int] = []

        def make() -> int:
            made.append(len(made))
            return len(made)

        shared = SharedView(make)
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        assert await shared.get() == 2
        assert len(made) == 2

    asyncio.run(scene())


def test_a_view_that_fails_raises_in_its_reader_and_not_in_later_ones() -> None:
    async def scene() -> None:
        answers = iter([ZeroDivisionError("once"), None])

        def make() -> str:
            if problem := next(answers):
                raise problem
            return "well"

        shared = SharedView(make)
        with pytest.raises(ZeroDivisionError):
            await shared.get()
        assert await shared.get() == "well"

    asyncio.run(scene())
