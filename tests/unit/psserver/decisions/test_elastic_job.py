"""A job on one shard whose workers come and go: the workers that its steps wait for."""

import dataclasses

import pytest

from pscore.errors import ConfigError, JobMismatchError
from pscore.rules import ASGD, SSGD
from pscore.types import Pull, Push, Role
from psserver.decisions.orders import Answer, Update
from psserver.decisions.shard import Actions, Address, Job, Shard
from tests.unit.psserver.decisions.test_jobs_and_tables import LEASE_S, SPEC, member, push


def elastic(least: int, most: int, *ranks: int) -> tuple[Shard, Job, Address]:
    """A shard with one elastic job whose weights are there."""
    shard = Shard(0, 1, LEASE_S)
    for rank in ranks:
        shard.decide_join("run", most, member(rank), least)
    job = shard.jobs["run"]
    shard.define(job, SPEC)
    address = Address("run", 0, 0)
    shard.decide_push(
        job, address, Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS), "init"
    )
    return shard, job, address


def updates(actions: Actions) -> int:
    return sum(isinstance(action, Update) for _, action in actions)


def test_another_least_number_of_workers_is_refused() -> None:
    shard, _, _ = elastic(2, 3, 0)
    for least, what in ((1, "1 to 3"), (0, "3")):
        with pytest.raises(JobMismatchError, match=f"has 2 to 3 workers, .* started for {what};"):
            shard.decide_join("run", 3, member(1), least)


def test_an_elastic_job_does_not_wait_for_workers_that_have_not_joined() -> None:
    shard, job, address = elastic(1, 3, 0)
    assert updates(push(shard, job, address, 0, 0)) == 1


def test_before_the_first_update_every_joined_worker_is_waited_for() -> None:
    shard, job, address = elastic(2, 3, 0)
    push(shard, job, address, 0, 0)
    shard.decide_join("run", 3, member(1), 2)
    assert updates(shard.recheck(job)) == 0
    assert updates(push(shard, job, address, 1, 0)) == 1


def test_a_worker_that_joins_later_is_waited_for_after_its_first_pull() -> None:
    shard, job, address = elastic(1, 3, 0)
    push(shard, job, address, 0, 0)
    shard.decide_join("run", 3, member(1), 1)
    assert updates(push(shard, job, address, 0, 1)) == 1
    shard.decide_pull(job, address, Pull(worker=1, clock=0, min_version=0), "first")
    assert updates(push(shard, job, address, 0, 2)) == 0
    assert updates(push(shard, job, address, 1, 2)) == 1


def test_an_asynchronous_worker_that_joins_later_begins_where_the_others_are() -> None:
    shard, job, address = elastic(1, 3, 0)
    job.table(0).clock(0).change(ASGD())
    for step in range(3):
        push(shard, job, address, 0, step)
    shard.decide_join("run", 3, member(1), 1)
    (found,) = shard.decide_pull(job, address, Pull(worker=1, clock=0, min_version=0), "first")
    assert isinstance(found[1], Answer)
    assert found[1].clock == 3


def test_a_job_with_too_few_workers_says_how_many_it_waits_for() -> None:
    shard, job, address = elastic(2, 3, 0)
    assert push(shard, job, address, 0, 0) == []
    text = "1 more worker (1 of at least 2), at slice 0 of 'model' on shard 0"
    assert shard.waiting_for(job, address) == text


def test_a_barrier_waits_for_as_many_as_a_job_needs() -> None:
    shard, job, _ = elastic(2, 3, 0)
    text = "1 more worker (1 of at least 2) at barrier 'begin'"
    assert shard.barrier(job, "begin", 0, 0) == text
    shard.decide_join("run", 3, member(1), 2)
    missing = "worker 1 (process 1 on a) at barrier 'begin'"
    assert shard.barrier(job, "begin", 0, 0) == missing
    assert shard.barrier(job, "begin", 0, 1) == ""


def test_a_job_with_too_few_workers_can_change_its_mode() -> None:
    """Workers that have stepped aside wait for no other; their pushes are counted."""
    shard, job, address = elastic(2, 3, 0)
    push(shard, job, address, 0, 0)
    assert updates(shard.step_aside(job, 0, 0, (1, 1))) == 1
    shard.change(job, 0, 0, ASGD())
    assert push(shard, job, address, 0, 1) == []


def test_a_mode_that_does_not_fit_the_least_number_of_workers_is_refused() -> None:
    shard, job, _ = elastic(1, 3, 0)
    spec = dataclasses.replace(SPEC, name="other", rule=SSGD(backup=1))
    with pytest.raises(ConfigError, match=r"less than the 1 workers: the job may have 1 to 3"):
        shard.define(job, spec)


def test_an_elastic_job_that_is_over_starts_again_with_any_worker() -> None:
    shard, job, _ = elastic(1, 3, 0)
    shard.decide_leave("run", 0, 1, "finished")
    assert shard.decide_join("run", 3, member(1), 1)[0] is not job


def test_a_worker_belongs_to_an_elastic_job_that_has_not_begun() -> None:
    shard, job, _ = elastic(2, 3, 0)
    shard.decide_leave("run", 0, 1, "finished")
    assert shard.decide_join("run", 3, member(1), 2)[0] is job
