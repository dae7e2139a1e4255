"""The first step of a worker that joins a running job counts in every slice, and so do all others.

The shards are a step apart when it comes: one has closed a step that the other waits for.
"""

from typing import Any

import grpc
import pytest
import torch

import psworker
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.shard_link import Link
from tests.integration.cluster import Shards, Station, WorkerError, new_job, wait_until

NUMEL = 10_000  # A slice on each of two shards.
ALONE, TOGETHER = 3, 2  # Steps.


def hold_the_second_pull(me: Station) -> None:
    """Asks one shard for weights at once, and the other when the test says so."""
    original, asked = Exchange.pull, list[int]()

    def pull(self: Exchange, index: int, *args: Any, **options: Any) -> None:
        if len(asked) == 1:
            self._pulls[asked[0]][0].done.result()
            me.tell(self.layout.slices[index].shard)
            me.hear()
        asked.append(index)
        original(self, index, *args, **options)

    Exchange.pull = pull  # type: ignore[method-assign]


def train(me: Station, mode: str, *, holds: bool) -> tuple[list[float], int, int]:
    """Makes as many steps as it is told, with a gradient of 1 in worker 0 and of 2 in worker 1."""
    if holds:
        hold_the_second_pull(me)
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], mode=mode
    )
    me.tell(optimizer.clock)
    while steps := me.hear():
        for _ in range(steps):
            optimizer.zero_grad()
            weight.grad = torch.full((NUMEL,), 1.0 + psworker.rank())
            optimizer.step()
    optimizer.close()
    traffic = optimizer.traffic
    psworker.shutdown()
    return sorted(set(weight.tolist())), traffic.num_too_late, optimizer.missed.num_steps


def version(address: str, job: str) -> int:
    """Returns how many steps of a job a shard has closed."""
    with grpc.insecure_channel(address) as channel:
        reply = control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest())
    (found,) = [entry for entry in reply.jobs if entry.job == job]
    return int(found.tables[0].version_max)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ahead"), [("ssgd", 1), ("ssd(steps=3, warmup=0)", 2)])
def test_the_first_step_of_a_worker_that_joins_counts_whole(
    shards: Shards, mode: str, ahead: int
) -> None:
    job = new_job()
    env = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    options: dict[str, Any] = {"num_workers": 1, "job": job, "env": env}
    with shards.workers(_stays, mode, **options) as (first,):
        assert first.hear() == 0
        first.tell(ALONE)
        wait_until(lambda: all(version(address, job) == ALONE for address in shards.addresses))
        with shards.workers(_joins, mode, **options) as (second,):
            later = shards.addresses[second.hear()]
            first.tell(ahead)  # One shard waits for the second worker, the other does not yet.
            wait_until(lambda: version(later, job) == ALONE + ahead)
            second.tell()
            assert second.hear() == ALONE + ahead
            for worker in (first, second):
                worker.tell(TOGETHER)
            for worker in (first, second):
                worker.tell(0)
            results = [worker.result() for worker in (first, second)]
    assert results == [([-1.0 * (ALONE + ahead) - 1.5 * TOGETHER], 0, 0)] * 2


def _stays(me: Station, mode: str) -> tuple[list[float], int, int]:
    return train(me, mode, holds=False)


def _joins(me: Station, mode: str) -> tuple[list[float], int, int]:
    return train(me, mode, holds=True)


def run(me: Station) -> tuple[list[float], int]:
    """Makes two steps in ssgd; returns the weights, and the steps of the job."""
    psworker.init()
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)]
    )
    for _ in range(2):
        weight.grad = torch.full((NUMEL,), 1.0 + me.rank)
        optimizer.step()
    optimizer.close()
    return sorted(set(weight.tolist())), optimizer.clock


def hold_the_second_leave(me: Station) -> None:
    """Leaves one shard at once, and the other when the test says so."""
    original, left = Link.call, list[str]()

    def call(self: Link, method: Any, request: Any, *given: Any, **options: Any) -> Any:
        if isinstance(request, pb.LeaveRequest):
            if len(left) == 1:
                me.tell()
                me.hear()
            left.append(self.address)
        return original(self, method, request, *given, **options)

    Link.call = call  # type: ignore[method-assign]


def _ends_slowly(me: Station) -> tuple[list[float], int]:
    """Makes a run that one of its workers ends slowly, and the next one under the same name."""
    if me.rank == 1:
        hold_the_second_leave(me)
    run(me)
    psworker.shutdown()
    return run(me)


def test_the_next_run_under_a_name_waits_for_the_end_of_the_one_before(shards: Shards) -> None:
    """Otherwise one shard begins the run while another still has the former one's weights."""
    job = new_job()

    def has_begun() -> bool:
        with grpc.insecure_channel(shards.addresses[0]) as channel:
            reply = control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest())
        return [len(entry.tables) for entry in reply.jobs if entry.job == job] == [0]

    with shards.workers(_ends_slowly, job=job) as (first, second):
        second.hear()
        wait_until(has_begun)
        second.tell()
        assert [worker.result() for worker in (first, second)] == [([-3.0], 2)] * 2


def _stands(me: Station) -> int:
    """Joins, and sends neither a push nor a pull."""
    psworker.init()
    me.tell()
    me.hear()
    return psworker.rank()


def test_the_process_that_follows_a_killed_worker_gets_its_rank() -> None:
    """As a pod that is created again at once; no connection of gradients tells of its death."""
    job = new_job()
    with Shards(2, lease_s=2.0) as shards, shards.workers(_stands, job=job) as workers:
        for worker in workers:
            worker.hear()
        workers[1].kill()
        with shards.workers(_stands, job=job, ranks=[1]) as (follower,):
            follower.hear()
            for worker in (workers[0], follower):
                worker.tell()
            assert [worker.result() for worker in (workers[0], follower)] == [0, 1]


def test_a_process_learns_soon_that_its_rank_is_a_live_workers() -> None:
    job = new_job()
    with Shards(1, lease_s=30.0) as shards, shards.workers(_stands, job=job) as workers:
        for worker in workers:
            worker.hear()
        refused = pytest.raises(WorkerError, match="RankTakenError: rank 1 is held by process")
        with shards.workers(_stands, job=job, ranks=[1]) as (other,), refused:
            other.hear()
        for worker in workers:
            worker.tell()
            worker.result()


def hold_the_second_join(me: Station) -> None:
    """Joins one shard at once, and the other when the test says so."""
    original, joined = Link.call, list[str]()

    def call(self: Link, method: Any, request: Any, *given: Any, **options: Any) -> Any:
        if isinstance(request, pb.JoinRequest):
            if len(joined) == 1:
                me.tell()
                me.hear()
            joined.append(self.address)
        return original(self, method, request, *given, **options)

    Link.call = call  # type: ignore[method-assign]


def _follows(me: Station) -> tuple[list[float], int]:
    hold_the_second_join(me)
    return _makes_steps(me)


def _makes_steps(me: Station) -> tuple[list[float], int]:
    """Trains to step 4; returns the weights, and the steps of the job."""
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)]
    )
    while optimizer.steps < 4:
        if optimizer.steps == 2:
            me.tell()
            me.hear()
        weight.grad = torch.ones(NUMEL)
        optimizer.step()
    optimizer.close()
    return sorted(set(weight.tolist())), optimizer.clock


def test_a_job_that_ends_between_two_joins_of_a_worker_keeps_its_weights_on_both_shards() -> None:
    """The second shard started the job over, and the first one had its weights still."""
    job = new_job()
    with Shards(2, lease_s=2.0) as shards, shards.workers(_makes_steps, job=job) as workers:
        for worker in workers:
            worker.hear()
        workers[1].kill()
        with shards.workers(_follows, job=job, ranks=[1]) as (follower,):
            follower.hear()
            workers[0].tell()
            assert workers[0].result() == ([-4.0], 4)
            follower.tell()
            assert follower.result() == ([-4.0], 4)
