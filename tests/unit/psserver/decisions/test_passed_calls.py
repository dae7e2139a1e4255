"""Workers that wait for each other at different places, as one that asks is told."""

from pscore.types import Pull
from psserver.decisions.passed_calls import NOTHING, have_ended, others_of
from psserver.decisions.shard import Shard
from psserver.decisions.worker_reports import ReportedPace
from tests.unit.psserver.decisions.test_directory import peer
from tests.unit.psserver.decisions.test_jobs_and_tables import LEASE_S, SPEC, member, push, ready


def test_a_worker_that_came_late_is_told_where_the_others_wait_for_it() -> None:
    """Only by those that were heard since it rests."""
    shard, job, address = ready(2)
    members = job.membership.members
    members[0].came_late, members[0].joined_s = True, 5.0
    push(shard, job, address, 1, 0)
    shard.decide_pull(job, address, Pull(worker=1, clock=1, min_version=1), "weights")
    assert others_of(job, 0, []) == NOTHING
    shard.rest(job, 0, 6.0, rests=True)
    assert others_of(job, 0, []) == NOTHING
    members[1].heard_s = 7.0
    assert others_of(job, 0, []).awaited_at == ["model"]
    members[1].awaits = (0,)
    shard.barrier(job, "epoch", 0, 1)
    places = ["model", "an exchange of models", "barrier 'epoch'"]
    assert others_of(job, 0, ["epoch"]).awaited_at == places
    assert others_of(job, 0, []).awaited_at == places[:2]  # Nobody waits there any more.
    shard.barrier(job, "epoch", 0, 0)  # It is where the other one waits.
    assert others_of(job, 0, ["epoch"]).awaited_at == places[:2]


def test_a_worker_is_told_of_those_that_came_later_and_wait_for_it() -> None:
    shard, job, address = ready(2)
    members = job.membership.members
    push(shard, job, address, 1, 0)
    shard.decide_pull(job, address, Pull(worker=1, clock=1, min_version=1), "weights")
    shard.rest(job, 0, 6.0, rests=True)
    members[1].heard_s, members[1].joined_s = 7.0, 5.0
    assert others_of(job, 0, []).awaited_by == []  # They began together.
    members[1].came_late = True
    found = others_of(job, 0, [])
    assert (found.awaited_by, found.awaited_at) == ([1], [])
    members[1].returns = True  # Its script is under way.
    found = others_of(job, 0, [])
    assert (found.awaited_by, found.awaited_at) == ([1], ["model"])


def test_a_worker_is_told_whether_the_others_make_steps() -> None:
    shard, job, _ = ready(2)
    members = job.membership.members
    members[1].pace = ReportedPace(num_steps=7)
    shard.rest(job, 0, 6.0, rests=True)
    members[1].heard_s = 7.0
    assert not others_of(job, 0, []).others_step
    members[1].pace = ReportedPace(num_steps=8)
    assert others_of(job, 0, []).others_step


def test_workers_that_end_by_themselves_are_at_the_jobs_end_unless_they_come_and_go() -> None:
    _, job, _ = ready(3)
    members = job.membership
    members.leave(1, members.members[1].incarnation, "its script failed", failed=True)
    assert not have_ended(members)
    members.leave(2, members.members[2].incarnation, "its script is over")
    assert have_ended(members)
    members.is_elastic = True
    assert not have_ended(members)


def test_a_worker_that_joins_when_the_others_have_met_comes_late() -> None:
    """In a mode without a server the shards may have no update by then."""
    shard = Shard(0, 1, LEASE_S)
    job, _ = shard.decide_join("run", 4, member(0), 1)
    shard.define(job, SPEC)
    found = job.directory(0)
    found.arrive(peer(0, -1), 0, [0])
    for rank in (1, 2):
        shard.decide_join("run", 4, member(rank), 1)
        found.arrive(peer(0), found.epoch, [0])
        assert job.membership.members[rank].came_late == (rank == 2)


def test_a_worker_whose_push_is_parked_waits_too() -> None:
    shard, job, address = ready(2)
    job.membership.members[0].came_late = True
    push(shard, job, address, 1, 0)
    push(shard, job, address, 1, 1)
    shard.rest(job, 0, 6.0, rests=True)
    job.membership.members[1].heard_s = 7.0
    assert others_of(job, 0, []).awaited_at == ["model"]


def test_a_late_worker_that_waits_at_another_barrier_is_not_excused() -> None:
    """It withdraws from that; without it the others would end before it has what they got."""
    shard, job, _ = ready(2)
    members = job.membership.members
    shard.rest(job, 0, 6.0, rests=True)
    members[1].heard_s, members[1].joined_s, members[1].came_late = 7.0, 5.0, True
    shard.barrier(job, "start", 0, 1)
    assert others_of(job, 0, ["start"]).awaited_by == []
