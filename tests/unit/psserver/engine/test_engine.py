"""A shard as its peers see it: pushes, pulls that wait, departures, barriers and refusals."""

import asyncio
import re

import numpy as np
import pytest
from structlog.testing import capture_logs

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.engine.barrier_waits import Arrival
from psserver.remote.status import combine
from psserver.service.barrier_wait import wait_at_barrier
from tests.unit.psserver.front import (
    HYPER,
    JOB,
    LEASE_S,
    NUMEL,
    Context,
    Front,
    Refused,
    grad,
    played,
    pull_header,
    push_header,
    sender,
    settle,
    stores_of,
    told,
)

OPEN = Arrival(waiting_for="", largest=0.0, newest=0)

# ----- a gradient's way


@played
async def test_gradients_go_in_and_weights_come_out(front: Front) -> None:
    await front.ready()
    assert told(await front.push(push_header(0, 0), grad(2.0))) == ("ACCEPTED", 0)
    assert told(await front.push(push_header(1, 0), grad(4.0))) == ("ACCEPTED", 0)
    reply, weights = await front.pull(pull_header(0, 1, 1))
    assert (reply.ready, reply.version, reply.clock) == (True, 1, 1)
    # Minus the mean, at learning rate 1, and nothing between the tensors.
    assert weights.tolist() == [-3.0] * 10 + [0.0] * 6 + [-3.0] * 16


@played
async def test_a_repeated_push_changes_nothing(front: Front) -> None:
    await front.ready(num_workers=1)
    await front.push(push_header(0, 0), grad(1.0))
    assert told(await front.push(push_header(0, 0), grad(1.0))) == ("DUPLICATE", 1)
    assert front.weights()[0] == -1.0


@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", "\u202e", "x" * 257, ""])
@played
async def test_a_name_that_cannot_be_shown_is_refused(front: Front, name: str) -> None:
    with pytest.raises(Refused, match=r"job name .* must have 1\.\.256 characters") as refused:
        await front.join(0, 1, job=name)
    assert refused.value.kind == "ConfigError"
    await front.join(0, 1)
    with pytest.raises(Refused, match="table name") as refused:
        await front.define(name=name)
    request = pb.BarrierRequest(job=JOB, worker=0, incarnation=100, name=name)
    with pytest.raises(Refused, match="barrier name"):
        await front.control.Barrier(request, Context())
    assert str(refused.value).isprintable()


@played
async def test_names_that_a_worker_sends_are_escaped_and_cut(front: Front) -> None:
    await front.join(0, 2, host="\x1b[2J" + "h" * 3000)
    await front.join(1, 2)
    for text in ("w\x1b" * 3000, ""):
        request = pb.HeartbeatRequest(job=JOB, worker=1, incarnation=101, waiting_for=text)
        await front.control.Heartbeat(request, Context())
        (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
        for shown in (job.workers[0].host, *job.waiting_for):
            assert shown.isprintable()
            assert len(shown) < 4096
    with capture_logs() as lines:
        leaving = pb.LeaveRequest(job=JOB, worker=1, incarnation=101, reason="\x07" * 3_000_000)
        await front.control.Leave(leaving, Context())
    (reason,) = [line["reason"] for line in lines if line["event"] == "worker left"]
    assert reason.isprintable()
    assert len(reason) < 4096


@played
async def test_state_travels_with_a_pull_on_request(front: Front) -> None:
    await front.ready(num_workers=1)
    await front.push(push_header(0, 0), grad(1.0))
    reply, arrays = await front.pull(pull_header(0, 1, 1, with_state=True))
    assert reply.counts == [1, 1]
    assert len(arrays) == 2 * NUMEL  # Weights and momentum.


@played
async def test_restored_state_is_taken(front: Front) -> None:
    await front.ready(num_workers=1)
    header = push_header(0, 0, role=data_pb2.ROLE_STATE, hyper=[], counts=[5, 6])
    await front.push(header, grad(7.0), grad(8.0))
    reply, arrays = await front.pull(pull_header(0, 0, 0, with_state=True))
    assert reply.counts == [5, 6]
    assert arrays.tolist() == [7.0] * NUMEL + [8.0] * NUMEL


@played
async def test_a_pull_waits_for_the_others(front: Front) -> None:
    await front.ready()
    await front.push(push_header(0, 0), grad(1.0))
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=10_000)))
    await settle()
    assert not pull.done()
    await front.push(push_header(1, 0), grad(1.0))
    reply, _ = await pull
    assert (reply.ready, reply.version) == (True, 1)
    assert not front.engine.requests.waiting


@played
async def test_a_pull_that_waits_too_long_is_told_what_is_missing(front: Front) -> None:
    await front.ready()
    await front.push(push_header(0, 0), grad(1.0))
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=2_000)))
    await settle()
    front.now_s = 1.9
    front.engine.tick()
    await settle()
    assert not pull.done()
    front.now_s = 2.0
    front.engine.tick()
    reply, weights = await pull
    assert not reply.ready
    assert len(weights) == 0
    assert reply.waiting_for == (
        "step 0 of worker 1 (process 0 on a), at slice 0 of 'model' on shard 0"
    )
    assert front.job.table(0).clock(0).num_waiting == 0
    assert front.engine.counters.num_pulls_put_off == 1


@played
async def test_the_time_of_a_wait_is_charged_to_the_worker_that_others_wait_for(
    front: Front,
) -> None:
    await front.ready()
    front.engine.tick()
    front.now_s = 1.0
    front.engine.tick()
    await front.push(push_header(0, 0), grad(1.0))
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=10_000)))
    await settle()
    for front.now_s in (2.0, 3.5):
        front.engine.tick()
    await front.push(push_header(1, 0), grad(1.0))
    await pull
    front.now_s = 5.0
    front.engine.tick()
    reply = await front.control.Status(pb.StatusRequest(), Context())
    (job,) = reply.jobs
    assert [worker.waited_for_s for worker in job.workers] == [0.0, 2.5]
    assert (job.has_checkpoint, job.checkpoint_age_s, job.open_steps) == (False, 5.0, 0)
    front.engine.note_saved(JOB)
    front.now_s = 7.0
    (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
    assert (job.has_checkpoint, job.checkpoint_age_s) == (True, 2.0)


@played
async def test_a_wait_of_few_workers_is_charged_by_their_share(front: Front) -> None:
    """Whichever of many workers is ready first waits for all others, and they are not slow."""
    await front.ready(num_workers=5)
    front.engine.tick()
    pulls = []
    for rank in range(3):
        await front.push(push_header(rank, 0), grad(1.0))
        pulls.append(asyncio.ensure_future(front.pull(pull_header(rank, 1, 1, wait_ms=10_000))))
        await settle()
        front.now_s += 1.0
        front.engine.tick()
    (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
    # A quarter of the others waits for a second, then a half, then three quarters.
    assert [worker.waited_for_s for worker in job.workers] == [0.0, 0.25, 0.75, 1.5, 1.5]
    for rank in (3, 4):
        await front.push(push_header(rank, 0), grad(1.0))
    await asyncio.gather(*pulls)


@played
async def test_a_barrier_charges_its_wait_too(front: Front) -> None:
    await front.ready()
    front.running.barriers.arrive("b", 0, 0, 0.0, lambda: None)
    front.engine.tick()
    front.now_s = 3.0
    front.engine.tick()
    (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
    assert [worker.waited_for_s for worker in job.workers] == [0.0, 3.0]


@played
async def test_a_barrier_charges_the_wait_of_few_workers_by_their_share(front: Front) -> None:
    await front.ready(num_workers=5)
    front.running.barriers.arrive("b", 0, 0, 0.0, lambda: None)
    front.engine.tick()
    front.now_s = 4.0
    front.engine.tick()
    (job,) = (await front.control.Status(pb.StatusRequest(), Context())).jobs
    assert [worker.waited_for_s for worker in job.workers] == [0.0, 1.0, 1.0, 1.0, 1.0]


@played
async def test_a_pull_waits_at_most_ten_seconds_whatever_it_asks_for(front: Front) -> None:
    await front.ready()
    header = pull_header(0, 0, 5, wait_ms=(1 << 32) - 1)
    pull = asyncio.ensure_future(front.pull(header))
    await settle()
    front.now_s = 10.0
    front.engine.tick()
    assert not (await pull)[0].ready


@played
async def test_a_pull_whose_caller_has_gone_is_forgotten(front: Front) -> None:
    await front.ready()
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=10_000)))
    await settle()
    assert front.job.table(0).clock(0).num_waiting == 1
    pull.cancel()
    await settle()
    assert front.job.table(0).clock(0).num_waiting == 0
    assert not front.engine.requests.waiting


@played
async def test_a_push_too_far_ahead_is_answered_when_there_is_room(front: Front) -> None:
    await front.ready()
    ahead = asyncio.ensure_future(front.push(push_header(0, 1), grad(1.0)))
    await settle()
    assert not ahead.done()
    await front.push(push_header(0, 0), grad(1.0))
    await front.push(push_header(1, 0), grad(1.0))
    assert told(await ahead) == ("ACCEPTED", 1)


# ----- who comes and goes


@played
async def test_a_departure_wakes_waiting_workers(front: Front) -> None:
    await front.ready()
    await front.push(push_header(0, 0), grad(1.0))
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=10_000)))
    await settle()
    front.engine.leave(JOB, 1, 101, "finished")
    reply, weights = await pull
    assert (reply.version, weights[0]) == (1, -1.0)


@played
async def test_an_expired_lease_wakes_waiting_workers(front: Front) -> None:
    await front.ready()
    front.now_s = LEASE_S / 2
    await front.push(push_header(0, 0), grad(1.0))
    pull = asyncio.ensure_future(front.pull(pull_header(0, 1, 1, wait_ms=10_000)))
    await settle()
    front.now_s = LEASE_S + 0.1
    front.engine.tick()
    assert (await pull)[0].version == 1
    with pytest.raises(
        Refused, match="ReplacedError: rank 1 was declared lost: it was silent for more than"
    ):
        await front.push(push_header(1, 0), grad(1.0))


@played
async def test_a_heartbeat_keeps_a_lease(front: Front) -> None:
    await front.ready(num_workers=1)
    for _ in range(5):
        front.now_s += LEASE_S
        request = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100)
        assert (await front.control.Heartbeat(request, Context())).instance == 7
        front.engine.tick()
    await front.push(push_header(0, 0), grad(1.0))


@played
async def test_the_status_has_the_data_plane_of_the_newest_heartbeat_that_names_one(
    front: Front,
) -> None:
    await front.ready(num_workers=1)
    for sent, shown in (("", ""), ("tcp", "tcp"), ("", "tcp"), ("p\x1b" * 99, "p\\x1b")):
        request = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100, data_plane=sent)
        await front.control.Heartbeat(request, Context())
        reply = await front.control.Status(pb.StatusRequest(), Context())
        plane = reply.jobs[0].workers[0].data_plane
        assert plane.startswith(shown)
        assert len(plane) < 99
        (worker,) = combine(["a:1"], [reply])["jobs"][0]["workers"]
        assert worker["data_planes"] == ([plane] if plane else [])


@played
async def test_a_worker_gets_the_live_ranks_on_request(front: Front) -> None:
    await front.ready(num_workers=3)
    front.engine.leave(JOB, 1, 101, "done")
    for wants, live in ((True, [0, 2]), (False, [])):
        request = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100, wants_live=wants)
        assert (await front.control.Heartbeat(request, Context())).live == live


async def arrive(front: Front, rank: int, wait_s: float = 10.0) -> Arrival:
    return await wait_at_barrier(front.running, lambda: front.now_s, "b", 0, rank, wait_s)


@played
async def test_a_barrier_opens_for_all_at_once(front: Front) -> None:
    await front.ready(num_workers=3)
    first = asyncio.ensure_future(arrive(front, 0))
    second = asyncio.ensure_future(arrive(front, 1))
    await settle()
    assert not first.done()
    assert await arrive(front, 2) == OPEN
    assert await first == await second == OPEN


@played
async def test_a_cancelled_barrier_wait_leaves_nothing_behind(front: Front) -> None:
    await front.ready()
    gone = asyncio.ensure_future(arrive(front, 0))
    await settle()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert not front.running.barriers.missing()


@played
async def test_a_departure_opens_a_barrier(front: Front) -> None:
    await front.ready()
    wait = asyncio.ensure_future(arrive(front, 0))
    await settle()
    front.engine.leave(JOB, 1, 101, "finished")
    assert await wait == OPEN


@played
async def test_a_barrier_names_the_missing_workers(front: Front) -> None:
    await front.ready()
    assert await arrive(front, 0, 0.0) == Arrival(
        waiting_for="worker 1 (process 0 on a) at barrier 'b'", largest=0.0, newest=0
    )


# ----- jobs


@played
async def test_a_job_that_starts_over_frees_the_former_ones_numbers(front: Front) -> None:
    await front.ready(num_workers=1)
    former = front.running
    front.engine.leave(JOB, 0, 100, "finished")
    await front.join(0, 1, incarnation=200)
    assert front.running is not former
    assert stores_of(former) == []


@played
async def test_a_worker_of_the_former_job_cannot_push_into_the_new_one(front: Front) -> None:
    await front.ready(num_workers=1)
    front.engine.leave(JOB, 0, 100, "finished")
    await front.join(0, 1, incarnation=200)
    with pytest.raises(Refused, match="ReplacedError: rank 0 is now process"):
        await front.push(push_header(0, 0), grad(1.0))


@played
async def test_status_tells_what_there_is(front: Front) -> None:
    await front.ready()
    await front.push(push_header(0, 0), grad(1.0))
    status = await front.control.Status(pb.StatusRequest(), Context())
    (job,) = status.jobs
    (model,) = job.tables
    assert (job.job, job.num_workers, model.mode) == (JOB, 2, "ssgd(backup=0)")
    assert (model.version_min, model.version_max, model.num_slices) == (0, 0, 1)
    assert [(worker.rank, worker.step, worker.state) for worker in job.workers] == [
        (0, 1, "live"),
        (1, 0, "live"),
    ]


# ----- refusals: the message names what came, and nothing has changed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sender": sender(0, job="other")}, "UnknownJobError: no job 'other' on shard 0"),
        ({"sender": sender(7)}, "UnknownJobError: no worker has joined at rank 7"),
        ({"sender": sender(0, incarnation=1)}, "ReplacedError: rank 0 is now process 0 on a"),
        ({"sender": sender(0, table=3)}, "UnknownJobError: job 'run' has no table 3"),
        ({"slice": 5}, r"RemoteProtocolError: slice 5 of 'model' is not on this shard"),
        ({"role": 9}, r"DecodeError: role of a push is 9, must be 0\.\.6"),
        ({"role": 6, "base_version": 1 << 60}, "worker 0 cannot fill this slice with its version"),
        ({"samples": -1.0}, r"DecodeError: weight of a push is -1\.0, must be 0\.\."),
        ({"hyper": [1.0]}, "DecodeError: 1 hyper-parameters, 1 groups of 6 wanted"),
        ({"present": b"\xff"}, "DecodeError: 1 bytes of segment bits for 2 segments"),
        ({"counts": [1]}, "DecodeError: 1 counts of steps for 2 segments"),
        ({"compressor": "fp16"}, "RemoteProtocolError: worker 0 pushed step 0 compressed by"),
        ({"base_version": 1}, "RemoteProtocolError: worker 0 pushed step 0 on version 1, the"),
        ({"shared": True}, "RemoteProtocolError: worker 0 has not attached a segment"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@played
async def test_a_push_that_is_refused_is_told_why(
    front: Front, fields: dict[str, object], message: str
) -> None:
    await front.ready()
    with pytest.raises(Refused, match=message):
        await front.push(push_header(0, 0, **fields), grad(1.0))
    assert front.job.table(0).clock(0).clock(0) == 0
    assert front.engine.counters.num_pushes_refused == 1
    assert told(await front.push(push_header(0, 0), grad(1.0))) == ("ACCEPTED", 0)


@pytest.mark.parametrize("numel", [1, NUMEL - 1, NUMEL + 1])
@played
async def test_a_gradient_of_another_length_is_refused(front: Front, numel: int) -> None:
    await front.ready()
    message = (
        f"DecodeError: payload of {4 * numel} bytes, 128 wanted for 32 elements "
        r"\(push of worker 1, slice 0, step 0\)"
    )
    with pytest.raises(Refused, match=message):
        await front.push(push_header(1, 0), np.zeros(numel, np.float32))
    assert front.job.table(0).clock(0).clock(0) == 0


@played
async def test_a_worker_of_another_protocol_is_refused(front: Front) -> None:
    with pytest.raises(Refused, match="ProtocolVersionError: worker speaks protocol 99, shard"):
        await front.join(0, protocol=99)
    assert not front.engine.shard.jobs


@played
async def test_a_job_of_another_model_is_refused(front: Front) -> None:
    await front.ready()
    with pytest.raises(Refused, match="JobMismatchError: job 'run': mode is asgd here and"):
        await front.define(1, rule=pb.Plugin(name="asgd"))


@pytest.mark.parametrize(("begins_at", "is_said"), [(3, False), (4, True), (50, True)])
@played
async def test_a_shard_with_an_old_state_says_so_when_a_worker_continues_beyond_it(
    front: Front, begins_at: int, is_said: bool
) -> None:
    """One step may be missing: the last worker ended when others had its push already."""
    await front.ready(num_workers=1)
    for step in range(2):
        await front.push(push_header(0, step), grad(1.0))
    with capture_logs() as lines:
        await front.pull(pull_header(0, begins_at, begins_at, begins=True))
    said = [line for line in lines if "its state is an old one" in line["event"]]
    assert [(line["at"], line["continues_at"]) for line in said] == [(2, begins_at)] * is_said


@played
async def test_all_workers_learn_that_their_hyper_parameters_differ(front: Front) -> None:
    """A step without samples says nothing, nor does another step."""
    await front.ready(num_workers=3)
    unlike = [*HYPER[:1], 0.25, *HYPER[2:]]

    async def step(number: int, *last: float, samples: float = 1.0) -> str:
        for rank, hyper in enumerate((HYPER, HYPER, last)):
            fields = {"samples": samples if rank == 2 else 1.0, "hyper": hyper}
            await front.push(push_header(rank, number, **fields), grad(1.0))
        told: list[str] = []
        for pace in (pb.Pace(), None):  # The second: as to another shard.
            request = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100, pace=pace)
            told.append((await front.control.Heartbeat(request, Context())).uneven)
        assert not told[1]
        return told[0]

    assert await step(0, *HYPER) == ""
    assert await step(1, *unlike, samples=0.0) == ""
    found = await step(2, *unlike)
    assert re.match(
        r"worker 2 \(.*\) made step 2 with momentum=0.25 in parameter group 0, and worker 0 \(.*\) "
        r"with momentum=0: give all workers the same arguments and schedule",
        found,
    )
    assert await step(3, *HYPER) == found
