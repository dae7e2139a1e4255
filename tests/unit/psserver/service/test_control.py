"""The control service while the machine compiles, and while a shard is awaited."""

import asyncio
import threading

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules import SSD
from pscore.table_spec import plugin_to_proto
from psserver.service import control
from psserver.stores import kind_of
from tests.unit.psserver.front import JOB, Context, Front, Refused


def test_a_table_is_declared_when_its_loops_are_compiled_and_other_calls_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def compile_slowly(optimizer: object) -> None:
        threads.append(threading.current_thread())
        began.set()
        assert may_end.wait(200.0)

    async def scene() -> None:
        front = Front()
        for rank in range(2):
            await front.join(rank)
        slices = front.executor.submit(threading.current_thread)
        monkeypatch.setattr(kind_of("flat"), "warm_up", compile_slowly)
        ended = asyncio.create_task(front.define(0))
        both = [asyncio.create_task(front.define(rank)) for rank in range(2)]
        assert await asyncio.to_thread(began.wait, 200.0)
        ended.cancel()  # Its worker repeats it, and the work goes on.
        request = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100)
        assert (await front.control.Heartbeat(request, Context())).instance == 7
        assert not front.job.tables
        may_end.set()
        assert sorted([(await each).created for each in both]) == [False, True]
        assert len(threads) == 1
        assert threads[0] not in (threading.main_thread(), slices.result())

    asyncio.run(scene())


def test_a_shard_is_described_to_one_that_awaits_it_once_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "WAIT_S_MAX", 1e6)

    async def scene() -> None:
        front = Front()
        request = pb.DescribeRequest(awaited=9, wait_ms=1_000_000)
        awaited = asyncio.create_task(front.control.Describe(request, Context()))
        other = await front.control.Describe(pb.DescribeRequest(), Context())
        late = await front.control.Describe(pb.DescribeRequest(awaited=9, wait_ms=1), Context())
        assert (other.instance, late.instance, awaited.done()) == (7, 7, False)
        front.servicer.serve_as(9, None)
        assert (await awaited).instance == 9
        assert (await front.control.Describe(request, Context())).instance == 9

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_was_lost_on_the_first_shard_is_lost_where_the_others_change_a_mode(
    index: int,
) -> None:
    """Its lease is over there, where the others have met without it."""
    change = pb.ChangeRequest(job=JOB, worker=0, incarnation=100, table=0, number=1)

    async def scene() -> None:
        front = Front()
        await front.ready()
        front.engine.shard.index = index
        await front.control.Change(change, Context())
        change.rule.CopyFrom(plugin_to_proto(SSD(steps=2, warmup=0)))
        if index == 0:
            with pytest.raises(Refused, match=r"worker 1 .*has not stepped aside for it"):
                await front.control.Change(change, Context())
            return
        await front.control.Change(change, Context())
        assert front.job.membership.live() == [0]
        assert front.job.table(0).spec.rule == SSD(steps=2, warmup=0)
        again = await front.control.Change(change, Context())  # It was made.
        assert again == pb.ChangeReply()

    asyncio.run(asyncio.wait_for(scene(), 60))
