"""Workers that others do not wait for in a change of the job."""

from typing import Any

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from tests.unit.psserver.front import JOB, Context, Front, Refused, grad, played, push_header


def request(rank: int, **fields: Any) -> pb.BarrierRequest:
    """Returns the request of a worker at the barrier of a change."""
    return pb.BarrierRequest(
        job=JOB, worker=rank, incarnation=100 + rank, name="change", holds=True, **fields
    )


@played
async def test_workers_that_wait_behind_a_change_lose_their_place_unless_they_come_to_it(
    front: Front,
) -> None:
    await front.ready(num_workers=3)
    members = front.job.membership.members
    members[2].came_late, members[2].joined_s = True, members[0].joined_s + 1
    beats = [pb.HeartbeatRequest(job=JOB, worker=rank, incarnation=100 + rank) for rank in (1, 2)]

    async def ask(rank: int, **fields: Any) -> pb.BarrierReply:
        reply: pb.BarrierReply = await front.control.Barrier(request(rank, **fields), Context())
        return reply

    await ask(2)
    await ask(0, excuses=[1, 2])  # One began with the others, one is at the barrier itself.
    for beat in beats:
        await front.control.Heartbeat(beat, Context())
    await ask(2, withdraws=True)
    assert not (await ask(0, excuses=[1, 2])).done
    await front.control.Heartbeat(beats[0], Context())
    with pytest.raises(Refused, match="rank 2 was declared lost: it began behind change"):
        await front.control.Heartbeat(beats[1], Context())
    assert (await ask(1)).done


@played
async def test_a_step_of_a_tensor_waits_for_no_late_worker_that_has_never_pushed_to_it(
    front: Front,
) -> None:
    await front.ready(num_workers=3)
    members = front.job.membership.members
    for rank in (1, 2):
        members[rank].came_late, members[rank].joined_s = True, members[0].joined_s + 1
    await front.push(push_header(1, 0), grad(1.0))
    await front.push(push_header(0, 0), grad(1.0))
    assert front.version() == 0
    asks = pb.BarrierRequest(
        job=JOB, worker=0, incarnation=100, name="model", table="model", excuses=[1, 2]
    )
    await front.control.Barrier(asks, Context())
    assert front.version() == 1
    await front.push(push_header(0, 1), grad(1.0))
    assert front.version() == 1, "worker 1 has pushed before, and is waited for"
