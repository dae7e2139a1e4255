"""A change of a table's mode on one shard: its conditions, repeated and late messages."""

from dataclasses import replace

import pytest

from pscore.errors import (
    ConfigError,
    JobMismatchError,
    LimitError,
    NotOverError,
    RemoteProtocolError,
)
from pscore.rules import ASGD, SSD, SSGD, LocalSGD
from pscore.table_names import LEFT_FOR_GOOD
from pscore.types import Push, Role
from psserver.decisions.limits import Limits
from psserver.decisions.orders import Update
from psserver.decisions.shard import Address, Job, Shard
from tests.unit.psserver.decisions.test_jobs_and_tables import member, push, ready

NEW = SSD(steps=4, warmup=0)


def aside(shard: Shard, job: Job, rank: int, number: int = 1) -> None:
    shard.step_aside(job, 0, rank, (1, number))


def test_the_first_worker_changes_and_the_others_find_it_done() -> None:
    shard, job, _ = ready(2)
    aside(shard, job, 0)
    aside(shard, job, 1)
    assert shard.change(job, 0, 1, NEW) == []
    assert shard.change(job, 0, 0, NEW) is None
    assert job.table(0).spec.rule == NEW
    assert job.table(0).clock(0).rule == NEW


def test_a_step_closes_without_a_worker_that_stepped_aside() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 0, 0)
    actions = shard.step_aside(job, 0, 1, (1, 1))
    assert [type(action) for _, action in actions] == [Update]
    assert job.counters.num_updates == 1


def test_after_the_change_everybody_is_waited_for_again() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        aside(shard, job, rank)
    shard.change(job, 0, 0, SSD(steps=2, warmup=0))
    push(shard, job, address, 0, 0)
    assert job.table(0).clock(0).version == 0
    push(shard, job, address, 1, 0)
    assert job.table(0).clock(0).version == 1


def test_parked_pushes_of_a_lost_worker_are_not_counted_under_the_new_mode() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 1, 1)  # A step too far, and not acknowledged.
    job.membership.leave(1, job.membership.members[1].incarnation, "lost", failed=True)
    aside(shard, job, 0)
    shard.change(job, 0, 0, NEW)
    push(shard, job, address, 0, 0)
    clock = job.table(0).clock(0)
    assert (clock.version, 1 in clock.counted[1]) == (1, False)


def test_nothing_changes_before_all_have_stepped_aside() -> None:
    shard, job, _ = ready(2)
    aside(shard, job, 0)
    with pytest.raises(RemoteProtocolError, match=r"worker 1 .*has not stepped aside"):
        shard.change(job, 0, 0, NEW)
    assert job.table(0).spec.rule == SSGD()


def test_a_message_of_a_change_that_is_over_is_not_heard() -> None:
    shard, job, _ = ready(2)
    for rank in (0, 1):
        aside(shard, job, rank)
    shard.change(job, 0, 0, NEW)
    aside(shard, job, 1)
    assert not job.table(0).participants.aside
    aside(shard, job, 1, number=2)
    assert set(job.table(0).participants.aside) == {1}


def test_a_worker_that_has_come_back_begins_its_changes_again() -> None:
    """Incarnations are random: the number of a later one may be smaller."""
    shard, job, _ = ready(1)
    shard.step_aside(job, 0, 0, (9, 2))
    shard.change(job, 0, 0, NEW)
    shard.step_aside(job, 0, 0, (9, 1))
    assert not job.table(0).participants.aside
    shard.step_aside(job, 0, 0, (5, 1))
    assert job.table(0).participants.aside == {0: (5, 1)}


def test_another_mode_is_refused() -> None:
    shard, job, _ = ready(2)
    for rank in (0, 1):
        aside(shard, job, rank)
    shard.change(job, 0, 0, NEW)
    with pytest.raises(
        JobMismatchError, match=r"changes the mode to asgd, another one to ssd\(steps=4"
    ):
        shard.change(job, 0, 1, ASGD())


def test_a_mode_that_needs_another_optimizer_is_refused() -> None:
    shard, job, _ = ready(1)
    aside(shard, job, 0)
    with pytest.raises(ConfigError, match="the shards run another optimizer"):
        shard.change(job, 0, 0, LocalSGD())
    assert not job.table(0).participants.aside, "all continue as they were"
    aside(shard, job, 0, number=2)
    with pytest.raises(ConfigError, match="must be less than the 1 workers"):
        shard.change(job, 0, 0, SSGD(backup=1))
    assert job.table(0).clock(0).rule == SSGD()


def test_a_mode_that_needs_more_memory_than_there_is_is_refused() -> None:
    shard, job, _ = ready(1)
    table = job.table(0)
    shard.limits = Limits(memory_nbytes=table.memory_nbytes + table.nbytes - 1)
    aside(shard, job, 0)
    with pytest.raises(LimitError, match="table 'model' of job 'run' on shard 0 needs"):
        shard.change(job, 0, 0, NEW)
    with pytest.raises(LimitError, match="on shard 0 needs"):
        shard.step_aside(job, 0, 0, (1, 2), NEW)
    assert not table.participants.aside, "a refusal before all have met changes nothing"
    shard.limits = Limits(memory_nbytes=table.memory_nbytes + table.nbytes)
    shard.step_aside(job, 0, 0, (1, 2), NEW)
    assert shard.change(job, 0, 0, NEW) == []


# ----- workers that come in the middle of a change


def lost(shard: Shard, job: Job, rank: int) -> None:
    shard.decide_leave(job.name, rank, 1, "its host is gone", failed=True)


def test_nobody_joins_between_two_meetings_of_workers_that_change_their_job() -> None:
    shard, job, _ = ready(2)
    lost(shard, job, 1)
    shard.barrier(job, "mode", 0, 0, holds=True)
    with pytest.raises(NotOverError, match=r"worker 0 .*change the mode or the parameters of job"):
        shard.decide_join(job.name, 2, member(1, 78))
    assert job.membership.live() == [0]
    assert shard.barrier(job, "mode", 1, 0) == ""
    shard.decide_join(job.name, 2, member(1, 78))
    assert job.membership.live() == [0, 1]


def test_a_worker_that_came_before_the_others_have_met_is_waited_for() -> None:
    shard, job, _ = ready(3)
    lost(shard, job, 2)
    shard.barrier(job, "mode", 0, 0, holds=True)
    shard.decide_join(job.name, 3, member(2, 78))
    assert "worker 2 " in shard.barrier(job, "mode", 0, 1, holds=True)


def test_workers_join_where_all_that_changed_a_job_are_gone() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
        shard.barrier(job, "mode", 0, rank, holds=True)
    for rank in (0, 1):
        lost(shard, job, rank)
    for rank in (1, 0):
        shard.decide_join(job.name, 2, member(rank, 78))
    assert job.membership.live() == [0, 1]


def test_the_next_table_is_known_before_its_first_update() -> None:
    """Else a worker that comes would train the former table, alone."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    table, _ = shard.define(job, replace(job.table(0).spec, name="model+1"))
    push_of = Push(worker=0, step=0, base_version=0, role=Role.STATE)
    shard.decide_push(job, Address(job.name, table.index, 0), push_of, "state")
    assert job.progress == {"model": 1}
    aside(shard, job, 0, number=LEFT_FOR_GOOD)
    assert job.progress == {"model": 1, "model+1": 0}
    job.table(0).begin_again(is_changing=True)
    assert job.progress == {"model": 1}, "all were lost: new ones begin as the first did"


@pytest.mark.parametrize(("is_over", "is_first"), [(True, True), (False, True), (False, False)])
def test_workers_of_the_next_life_begin_with_the_next_table_if_the_change_was_over(
    is_over: bool, is_first: bool
) -> None:
    """Its pushes would else be in the way of those who make the change again.

    Only the first shard knows that the change was over, as workers meet there.
    """
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    for rank in (0, 1) if is_first else ():
        shard.barrier(job, "growth", 0, rank, holds=True)
    table, _ = shard.define(job, replace(job.table(0).spec, name="model+1"))
    for rank in (0, 1):
        aside(shard, job, rank, number=LEFT_FOR_GOOD)
    push_of = Push(worker=0, step=0, base_version=0, role=Role.STATE)
    shard.decide_push(job, Address(job.name, table.index, 0), push_of, "state")
    for rank in (0, 1) if is_over else ():
        shard.barrier(job, "growth", 1, rank)
    for rank in (0, 1):
        lost(shard, job, rank)
    life = 0 if is_first else 2
    first = replace(member(0, 77), continues=not is_first)
    shard.decide_join(job.name, 2, first, life=life)
    is_known = is_first and is_over
    assert job.progress == ({"model": 1, "model+1": 0} if is_known else {"model": 1})


def test_a_shard_whose_first_slices_are_of_the_next_table_keeps_them() -> None:
    """The first shard, which had slices before, told the workers that they are there."""
    shard, job, _ = ready(2)
    assert not job.has_progress
    table, _ = shard.define(job, replace(job.table(0).spec, name="model+1"))
    push_of = Push(worker=0, step=0, base_version=0, role=Role.STATE)
    shard.decide_push(job, Address(job.name, table.index, 0), push_of, "state")
    for rank in (0, 1):
        aside(shard, job, rank, number=LEFT_FOR_GOOD)
        lost(shard, job, rank)
    assert job.has_progress
    comes = replace(member(0, 77), continues=True)
    assert shard.decide_join(job.name, 2, comes, life=2)[0] is job


def test_a_new_process_of_the_shard_knows_the_next_table_by_a_push() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    table, _ = shard.define(job, replace(job.table(0).spec, name="model+1"))
    place = Address(job.name, table.index, 0)
    shard.decide_push(job, place, Push(worker=0, step=0, base_version=0, role=Role.STATE), "state")
    assert job.progress == {"model": 1}
    push(shard, job, place, 0, 0)
    assert job.progress == {"model": 1, "model+1": 0}


def test_a_number_that_a_dead_worker_has_brought_to_a_round_does_not_count() -> None:
    """Those of the next life took it for their step, and had finished."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    shard.barrier(job, "growth", 0, 1, value=7.0, holds=True)
    for rank in (0, 1):
        lost(shard, job, rank)
    shard.decide_join(job.name, 2, member(0, 77))
    shard.decide_join(job.name, 2, member(1, 78))
    for rank in (0, 1):
        shard.barrier(job, "growth", 0, rank, value=1.0)
    assert job.barriers.agreed("growth", 0) == 1.0
    shard.barrier(job, "growth", 1, 1, value=7.0)
    shard.decide_leave(job.name, 1, 78, "its host is gone", failed=True)
    shard.decide_join(job.name, 2, member(1, 79))
    for rank in (0, 1):
        shard.barrier(job, "growth", 1, rank, value=2.0)
    assert job.barriers.agreed("growth", 1) == 2.0
    assert not job.barriers.holds


def test_a_worker_in_the_place_of_one_that_waited_has_not_arrived_nor_stepped_aside() -> None:
    shard, job, _ = ready(2)
    aside(shard, job, 1)
    shard.barrier(job, "mode", 0, 1, holds=True)
    lost(shard, job, 1)
    shard.decide_join(job.name, 2, member(1, 78))
    aside(shard, job, 0)
    assert "worker 1 " in shard.barrier(job, "mode", 0, 0, holds=True)
    assert set(job.table(0).participants.aside) == {0}


def test_a_worker_in_the_place_of_one_that_has_left_a_table_is_not_awaited_there() -> None:
    shard, job, _ = ready(2)
    for rank in (0, 1):
        aside(shard, job, rank, number=LEFT_FOR_GOOD)
    lost(shard, job, 1)
    shard.decide_join(job.name, 2, member(1, 78))
    assert job.table(0).was_left
    assert set(job.table(0).participants.aside) == {0, 1}
