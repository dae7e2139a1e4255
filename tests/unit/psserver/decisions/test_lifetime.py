"""The life of a job: when it ends, continues or starts over, and the news that workers get."""

import dataclasses

import pytest

from pscore.errors import ConfigError, JobMismatchError, LimitError, NotOverError, RankTakenError
from pscore.rules import DPSGD, SSGD
from pscore.rules.base import Rule
from pscore.types import Pull, Push, Role, Verdict
from psserver.decisions.job_state import State
from psserver.decisions.limits import KEEP_ENDED_S, KEEP_INTERRUPTED_S, Limits
from psserver.decisions.membership import Member, Presence
from psserver.decisions.orders import Acknowledge, Answer, Update
from psserver.decisions.shard import JOBS_MAX, Actions, Address, Job, Shard
from tests.unit.psserver.decisions.test_jobs_and_tables import (
    HYPER,
    LEASE_S,
    SPEC,
    member,
    push,
    ready,
    tensor,
)


def updates(actions: Actions) -> int:
    return sum(isinstance(action, Update) for _, action in actions)


def interrupted(num_workers: int, steps: int = 3) -> tuple[Shard, Job, Address]:
    """Returns a job whose workers have made some steps and were lost then."""
    shard, job, address = ready(num_workers)
    for step in range(steps):
        for rank in range(num_workers):
            push(shard, job, address, rank, step)
    shard.tick(LEASE_S + 1.0)
    return shard, job, address


def test_a_job_whose_workers_were_all_lost_continues_with_new_ones() -> None:
    shard, job, _ = interrupted(2)
    assert job.state is State.INTERRUPTED
    first = member(0, 2)
    assert shard.decide_join("run", 2, first)[0] is job
    assert "job 'run' continues at step 3" in first.news
    assert "psserver forget run" in first.news
    assert shard.jobs["run"].state is State.LIVE
    assert job.membership.expected() == [0, 1]  # It waits for all of them, as at its start.


@pytest.mark.parametrize("noticed", ["lost", "suspect", "nothing"])
def test_a_shard_without_an_update_follows_the_first_one_which_has_some(noticed: str) -> None:
    """It began anew, without the weights: the workers ended with an error."""
    shard, job, address = ready(2)
    push(shard, job, address, 1, 0)
    if noticed == "lost":
        shard.tick(LEASE_S + 1.0)
    elif noticed == "suspect":
        for rank in (0, 1):
            job.membership.suspect(rank, 1, 1.0)
    for rank in (0, 1):
        comes = member(rank, 2, restart=1)
        comes.continues = True
        assert shard.decide_join("run", 2, comes, life=2)[0] is job
        assert job.membership.expected() == [0, 1]
    assert job.life.number == 2
    actions: Actions = []
    for rank in (0, 1):
        begins = Pull(worker=rank, clock=1, min_version=1, begins=True)
        actions += shard.decide_pull(job, address, begins, f"begin {rank}")
    assert updates(actions) == 1
    assert sum(isinstance(action, Answer) for _, action in actions) == 2


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_shard_follows_the_first_one_which_begins_anew_if_it_has_the_first_step_alone(
    num_steps: int,
) -> None:
    """The workers ended with an error: this shard had a step, and the first one no weights."""
    first, _, _ = ready(2)
    shard, job, address = ready(2)
    for step in range(num_steps):
        for rank in (0, 1):
            push(shard, job, address, rank, step)
    for one in (first, shard):
        one.tick(LEASE_S + 1.0)
    for rank in (0, 1):
        life = first.decide_join("run", 2, member(rank, 2, restart=1))[0].life.number
        comes = member(rank, 2, restart=1)
        assert (shard.decide_join("run", 2, comes, life=life)[0] is job) == (num_steps > 1)
        assert not first.jobs["run"].has_progress


def test_a_shard_that_is_killed_before_the_first_update_keeps_the_weights() -> None:
    """One worker is started again before the others have spoken to the shard's new process."""
    shard, job, _ = ready(3)
    job.membership.restore(list(job.membership.members.values()))
    comes = member(2, 2, restart=1, heard_s=0.4 * LEASE_S)
    assert shard.decide_join("run", 3, comes)[0] is job
    assert job.table(0).has_weights
    for rank in (0, 1):
        back = member(rank, 3)
        back.returns, back.former = True, (1,)
        assert shard.decide_join("run", 3, back)[0] is job
    assert job.membership.live() == [0, 1, 2]


def test_a_job_whose_first_shard_was_killed_begins_no_other_life_before_its_workers_may_speak() -> (
    None
):
    """Those that lived were none of the job any more: one that waited at a barrier failed."""
    shard, job, _ = ready(3)
    job.membership.restore(list(job.membership.members.values()))
    with pytest.raises(NotOverError, match=r"waits for worker 0 .*, worker 1 "):
        shard.decide_join("run", 3, member(2, 2, restart=1, heard_s=0.39 * LEASE_S))
    shard.heard("run", 0, 1, 0.39 * LEASE_S)
    shard.decide_join("run", 3, member(2, 2, restart=1, heard_s=0.39 * LEASE_S))
    assert job.life.number == 1
    assert job.membership.live() == [0, 1, 2]


def test_workers_that_are_all_started_again_before_the_first_update_begin_together() -> None:
    """Nobody has noticed the death of one that had pulled nothing yet: it is no other life."""
    shard, job, address = ready(2)
    job.membership.suspect(0, 1, 1.0)
    for rank in (0, 1):
        assert shard.decide_join("run", 2, member(rank, 2, restart=1))[0] is job
    assert updates(push(shard, job, address, 0, 0)) == 0
    assert updates(push(shard, job, address, 1, 0)) == 1
    shard.decide_join("run", 2, member(1, 3, restart=2))
    assert updates(push(shard, job, address, 0, 1)) == 1  # Now the others go on meanwhile.


def test_peers_do_not_wait_for_one_that_begins_behind_the_step_that_is_open() -> None:
    """It waited for the push of another, which had been started again and waited to meet it."""
    spec = dataclasses.replace(SPEC, rule=DPSGD(average_every=4), optimizer="assign")
    shard, job, address = ready(2, spec)

    def model(rank: int) -> Push:
        return Push(worker=rank, step=0, base_version=0, role=Role.MODEL, hyper=HYPER)

    shard.decide_push(job, address, model(0), "in")
    shard.decide_join("run", 2, member(0, 2, restart=1))
    assert job.expected_peers(0) == [0, 1]
    shard.decide_pull(job, address, Pull(worker=0, clock=1, min_version=1, begins=True), "begin")
    assert job.expected_peers(0) == [1]
    shard.decide_push(job, address, model(1), "in too")
    assert job.expected_peers(0) == [0, 1]


def test_the_news_of_a_job_that_trains_in_rounds_counts_their_steps() -> None:
    spec = dataclasses.replace(SPEC, rule=DPSGD(average_every=4), optimizer="assign")
    shard, job, address = ready(1, spec)
    for number in range(3):
        shard.decide_push(
            job,
            address,
            Push(worker=0, step=number, base_version=0, role=Role.MODEL, hyper=HYPER),
            f"{number}",
        )
    shard.tick(LEASE_S + 1.0)
    first = member(0, 2)
    shard.decide_join("run", 1, first)
    assert "job 'run' continues at step 12" in first.news


@pytest.mark.parametrize("returns", [False, True])
def test_all_begin_another_life_at_the_open_step_and_a_push_that_is_in_counts_once(
    returns: bool,
) -> None:
    """A worker would else wait, as it begins, for the first step of another that waits for it."""
    shard, job, address = ready(2)
    for step, ranks in enumerate(((0, 1), (1,))):
        for rank in ranks:
            push(shard, job, address, rank, step)
    for rank in (0, 1):
        job.membership.suspect(rank, 1, 1.0)
    for rank in (0, 1):
        new = member(rank, 2, restart=1)
        shard.decide_join("run", 2, dataclasses.replace(new, returns=returns and rank == 1))
    for rank in (0, 1):
        (answer,) = shard.decide_pull(job, address, Pull(worker=rank, clock=0, min_version=0), rank)
        assert isinstance(answer[1], Answer)
        assert answer[1].clock == (2 if returns and rank == 1 else 1)
    ((_, answered),) = push(shard, job, address, 1, 1)
    assert isinstance(answered, Acknowledge)
    assert answered.verdict is Verdict.DUPLICATE
    assert updates(push(shard, job, address, 0, 1)) == 1
    assert job.table(0).clock(0).version == 2


@pytest.mark.parametrize(
    ("rule", "optimizer"), [(DPSGD(average_every=4), "assign"), (SSGD(), "assign_sum")]
)
def test_a_mean_that_a_kill_has_interrupted_closes_in_the_next_life(
    rule: Rule, optimizer: str
) -> None:
    """Workers whose push was in would be a round ahead, and the others get a value of before."""
    shard, job, address = ready(3, dataclasses.replace(SPEC, rule=rule, optimizer=optimizer))
    for step, ranks in enumerate(((0, 1, 2), (1, 2))):
        for rank in ranks:
            model = Push(worker=rank, step=step, base_version=step, role=Role.MODEL, hyper=HYPER)
            shard.decide_push(job, address, model, f"{rank}@{step}")
    clock = job.table(0).clock(0)
    assert clock.version == 1
    for rank in (0, 1, 2):
        job.membership.suspect(rank, 1, 1.0)
    _, actions = shard.decide_join("run", 3, member(0, 2, restart=1))
    assert updates(actions) == 1
    for rank in (1, 2):
        shard.decide_join("run", 3, member(rank, 2, restart=1))
    for rank in (0, 1, 2):
        (answer,) = shard.decide_pull(
            job, address, Pull(worker=rank, clock=0, min_version=0), f"pull {rank}"
        )
        assert isinstance(answer[1], Answer)
        assert (answer[1].version, answer[1].clock) == (2, 2)


def test_an_interrupted_job_is_freed_after_days_and_its_next_workers_are_told() -> None:
    shard, job, _ = interrupted(1)
    shard.tick(LEASE_S + KEEP_INTERRUPTED_S)
    assert shard.jobs["run"] is job
    shard.tick(LEASE_S + 1.0 + KEEP_INTERRUPTED_S)
    assert not shard.jobs
    ((freed, reason),) = shard.lifetimes.expired
    assert (freed, reason) == (job, "it had no workers for 7 days (keep_interrupted_s)")
    first = member(0, 2)
    shard.decide_join("run", 1, first)
    assert "the former one was freed at step 3, and had not ended" in first.news


def test_the_age_of_an_interrupted_job_begins_again_when_it_has_continued() -> None:
    shard, job, _ = interrupted(1)
    shard.decide_join("run", 1, dataclasses.replace(member(0, 2), heard_s=1000.0))
    shard.tick(1000.0)
    shard.tick(1000.0 + 2 * LEASE_S)
    shard.tick(1000.0 + KEEP_INTERRUPTED_S)
    assert shard.jobs["run"] is job


def test_with_all_places_taken_the_job_that_has_waited_longest_makes_room() -> None:
    shard, job, _ = interrupted(1)
    for index in range(JOBS_MAX - 1):
        shard.decide_join(f"live{index}", 1, dataclasses.replace(member(0), heard_s=LEASE_S))
    shard.decide_join("more", 1, member(0, 5))
    assert "run" not in shard.jobs
    assert shard.lifetimes.expired == [(job, "job 'more' needs its place, one of 64")]
    with pytest.raises(LimitError, match="64 jobs have not ended"):
        shard.decide_join("one too many", 1, member(0, 6))


def test_jobs_come_and_are_lost_for_ever_and_the_places_suffice() -> None:
    shard = Shard(0, 1, LEASE_S)
    for number in range(3 * JOBS_MAX):
        now_s = 3 * LEASE_S * number
        name = f"run{number}"
        job, _ = shard.decide_join(name, 1, dataclasses.replace(member(0), heard_s=now_s))
        shard.define(job, SPEC)
        address = Address(name, 0, 0)
        load = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
        shard.decide_push(job, address, load, "init")
        push(shard, job, address, 0, 0)
        shard.tick(now_s + 2 * LEASE_S)
        assert job.state is State.INTERRUPTED
    assert list(shard.jobs) == [f"run{n}" for n in range(2 * JOBS_MAX, 3 * JOBS_MAX)]
    assert len(shard.lifetimes.expired) == 2 * JOBS_MAX


def test_each_new_worker_is_told_once_that_the_job_continues() -> None:
    shard, _, _ = interrupted(2)
    for incarnation in (2, 2, 2):  # Sent three times.
        again = member(0, incarnation)
        shard.decide_join("run", 2, again)
        assert "continues" in again.news
    other, back = member(1, 2), dataclasses.replace(member(0, 3), returns=True, former=(2,))
    shard.decide_join("run", 2, other)
    shard.decide_join("run", 2, back)
    assert "continues" in other.news
    assert not back.news


def test_later_workers_of_an_elastic_job_get_no_news_of_an_old_interruption() -> None:
    shard = Shard(0, 1, LEASE_S)
    job, _ = shard.decide_join("run", 3, member(0), 1)
    shard.define(job, SPEC)
    address = Address("run", 0, 0)
    shard.decide_push(
        job, address, Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS), "init"
    )
    push(shard, job, address, 0, 0)
    shard.tick(LEASE_S + 1.0)
    first, second = member(-1, 2), member(-1, 3)
    shard.decide_join("run", 3, first, 1)
    assert "continues at step 1" in first.news
    push(shard, job, address, 0, 1)
    shard.decide_join("run", 3, second, 1)
    assert not second.news


def test_steps_of_a_job_that_continues_wait_for_all_its_workers() -> None:
    shard, job, address = interrupted(2)
    shard.decide_join("run", 2, member(0, 2))
    assert updates(push(shard, job, address, 0, 3)) == 0
    shard.decide_join("run", 2, member(1, 2))
    assert updates(push(shard, job, address, 1, 3)) == 1


def test_a_worker_that_ended_before_the_others_were_lost_is_not_waited_for() -> None:
    shard, job, _ = ready(2)
    address = Address("run", 0, 0)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    shard.decide_leave("run", 0, 1, "finished")
    shard.tick(LEASE_S + 1.0)
    assert job.state is State.INTERRUPTED
    shard.decide_join("run", 2, member(1, 2))
    assert job.membership.expected() == [1]
    shard.decide_join("run", 2, member(0, 2))  # Its command may be given again too.
    assert job.membership.expected() == [0, 1]


def test_a_job_has_ended_when_the_last_one_there_says_so() -> None:
    """Though another was lost before: the others continued without it, to their end."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    shard.decide_leave("run", 1, 1, "its process failed", failed=True)
    shard.decide_leave("run", 0, 1, "finished")
    assert job.state is State.ENDED


def test_a_job_without_an_update_is_no_loss() -> None:
    shard, job, _ = ready(1)
    shard.tick(LEASE_S + 1.0)
    assert job.state is State.ENDED
    assert shard.decide_join("run", 1, member(0, 2))[0] is not job


def test_a_new_process_takes_the_rank_of_one_whose_connection_broke() -> None:
    """Its lease is not over yet, but the same command is there again: all were killed at once."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
        job.membership.suspect(rank, 1, 1.0)
    again = member(1, 2)
    assert shard.decide_join("run", 2, again)[0] is job
    assert "continues at step 1" in again.news
    assert job.membership.expected() == [0, 1]


def test_another_process_does_not_take_the_rank_of_one_that_is_heard() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    job.membership.suspect(0, 1, 1.0)
    shard.heard("run", 0, 1, 1.1)
    with pytest.raises(RankTakenError, match="held by process"):
        shard.decide_join("run", 2, member(0, 2))


def test_another_model_under_the_name_of_an_interrupted_job_is_refused_by_name() -> None:
    shard, _, _ = interrupted(1)
    job, _ = shard.decide_join("run", 1, member(0, 2))
    other = dataclasses.replace(SPEC, tensors=(tensor("v", 2),))
    with pytest.raises(JobMismatchError, match=r"interrupted at step 3: .*psserver forget run"):
        shard.define(job, other)
    with pytest.raises(JobMismatchError, match=r"1 workers, .* 2; .*psserver forget run"):
        shard.decide_join("run", 2, member(0, 3))


def test_a_job_that_starts_over_under_a_name_says_how_the_former_one_ended() -> None:
    shard, job, address = ready(1)
    push(shard, job, address, 0, 0)
    shard.decide_leave("run", 0, 1, "finished")
    first = member(0, 2)
    assert shard.decide_join("run", 1, first)[0] is not job
    assert first.news == (
        "job 'run' starts over at step 0: the former one ended at step 1 (table 'model' of "
        f"{len(SPEC.tensors)} tensors in {SPEC.rule})"
    )


def test_an_ended_job_is_forgotten_after_a_while_but_not_how_it_ended() -> None:
    shard, job, address = ready(1)
    push(shard, job, address, 0, 0)
    shard.decide_leave("run", 0, 1, "finished")
    shard.tick(5.0)
    shard.tick(5.0 + KEEP_ENDED_S - 1.0)
    assert shard.jobs == {"run": job}
    shard.tick(5.0 + KEEP_ENDED_S)
    assert not shard.jobs
    first = member(0, 2)
    shard.decide_join("run", 1, first)
    assert "starts over at step 0: the former one ended at step 1" in first.news


def test_an_interrupted_job_is_kept() -> None:
    shard, job, _ = interrupted(1)
    shard.tick(5.0 + 100 * KEEP_ENDED_S)
    assert shard.jobs == {"run": job}


def test_a_job_is_forgotten_on_demand_unless_workers_take_part() -> None:
    shard, job, _ = ready(1)
    with pytest.raises(ConfigError, match=r"'run' has live workers on shard 0: worker 0 .*--force"):
        shard.lifetimes.forget("run", is_forced=False)
    assert shard.lifetimes.forget("run", is_forced=True) == (True, job.memory_nbytes)
    assert shard.lifetimes.forget("run", is_forced=False) == (False, 0)


def test_ended_jobs_make_room_for_others_the_first_to_end_first() -> None:
    one = ready(1)[1].memory_nbytes
    shard = Shard(0, 1, LEASE_S, Limits(memory_nbytes=2 * one))
    for number, name in enumerate(("a", "b")):
        shard.define(shard.decide_join(name, 1, member(0))[0], SPEC)
        shard.decide_leave(name, 0, 1, "finished")
        shard.tick(float(number))
    third, _ = shard.decide_join("c", 1, member(0))
    shard.define(third, SPEC)
    assert list(shard.jobs) == ["b", "c"]
    shard.define(third, dataclasses.replace(SPEC, name="more"))
    assert list(shard.jobs) == ["c"]
    with pytest.raises(LimitError, match=r"memory_mb\); `psserver jobs` shows"):
        shard.define(third, dataclasses.replace(SPEC, name="too much"))


def test_the_other_shards_follow_the_first_into_another_life_of_a_job() -> None:
    """One may not have noticed yet that the former workers are dead."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    first = dataclasses.replace(member(0, 2), continues=True)
    assert shard.decide_join("run", 2, first, life=2)[0] is job
    assert "continues at step 1" in first.news
    assert job.membership.expected() == [0, 1]
    assert job.life.number == 2
    shard.decide_join("run", 2, dataclasses.replace(member(1, 2), continues=True), life=2)
    assert job.membership.live() == [0, 1]


def test_a_returning_worker_starts_no_new_life_of_the_job() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    shard.decide_join(
        "run", 2, dataclasses.replace(member(0, 2), returns=True, former=(1,)), life=3
    )
    assert job.membership.live() == [0, 1]
    assert job.life.number == 3


def finished(shard: Shard, rank: int) -> Member:
    """Ends a worker; returns its process, which begins the next run of the job."""
    shard.decide_leave("run", rank, 1, "finished")
    return dataclasses.replace(member(rank, 2), after=1)


def test_a_process_that_has_finished_waits_for_the_others_before_the_next_run() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    again = finished(shard, 0)
    with pytest.raises(
        NotOverError, match=r"'run' and begins .* continues with worker 1 \(process"
    ):
        shard.decide_join("run", 2, again)
    assert job.membership.members[0].presence is Presence.LEFT
    shard.decide_leave("run", 1, 1, "finished")
    following, _ = shard.decide_join("run", 2, again)
    assert following is not job
    assert "starts over at step 0: the former one ended at step 1" in again.news
    assert shard.decide_join("run", 2, again)[0] is following  # Sent twice.


def test_a_worker_that_was_started_again_finishes_as_well_and_begins_the_next_run() -> None:
    """Its launcher's count of restarts, which makes it continue, is still in its environment."""
    shard, job, _ = interrupted(1)
    again = member(0, 2, restart=1)
    assert shard.decide_join("run", 1, again)[0] is job
    shard.decide_leave("run", 0, 2, "finished")
    again = dataclasses.replace(member(0, 3, restart=1), after=2)
    assert shard.decide_join("run", 1, again)[0] is not job


def test_a_shard_that_lost_the_last_worker_follows_the_first_one_where_it_ended() -> None:
    """One had noticed the loss before the end: no later run under the name began any more."""
    first, shard = (ready(2)[0] for _ in range(2))
    for one, comes_first in ((first, "loss"), (shard, "end")):
        job, address = one.jobs["run"], Address("run", 0, 0)
        for step in range(2):
            for rank in (0, 1):
                push(one, job, address, rank, step)
        if comes_first == "loss":
            one.decide_leave("run", 1, 1, "its process failed", failed=True)
        one.decide_leave("run", 0, 1, "finished")
        if comes_first == "end":
            one.tick(LEASE_S + 1.0)
    assert [one.jobs["run"].is_over for one in (first, shard)] == [True, False]
    former = shard.jobs["run"]
    for rank in (1, 0):
        life = first.decide_join("run", 2, member(rank, 2))[0].life
        comes = dataclasses.replace(member(rank, 2), anew=life.is_anew)
        assert shard.decide_join("run", 2, comes, life=life.number)[0] is not former
        assert shard.jobs["run"].membership.live() == first.jobs["run"].membership.live()


def test_another_shard_waits_too_for_the_end_of_the_run_before() -> None:
    """It began another life with the worker that came, and the next run had no weights there."""
    shard, job, address = ready(2)
    for step in range(2):
        for rank in (0, 1):
            push(shard, job, address, rank, step)
    shard.decide_leave("run", 0, 1, "finished")
    follower = dataclasses.replace(member(0, 2), after=1)
    with pytest.raises(NotOverError, match="has finished a run of job 'run'"):
        shard.decide_join("run", 2, follower, life=1)
    shard.decide_leave("run", 1, 1, "finished")
    assert shard.decide_join("run", 2, follower, life=1)[0] is not job


def test_a_process_that_has_finished_is_needed_again_if_all_others_were_lost() -> None:
    shard, job, address = ready(2)
    push(shard, job, address, 0, 0)
    push(shard, job, address, 1, 0)
    again = finished(shard, 0)
    shard.tick(LEASE_S + 1.0)
    assert shard.decide_join("run", 2, member(1, 2))[0] is job
    assert shard.decide_join("run", 2, again)[0] is job


@pytest.mark.parametrize("are_lost", [False, True])
def test_a_job_whose_workers_are_all_started_again_waits_for_all_of_them(are_lost: bool) -> None:
    """As by torchrun, when one has died; the shard knows at least that their connections broke."""
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    push(shard, job, address, 0, 1)
    for rank in (0, 1):
        job.membership.suspect(rank, 1, 1.0)
    if are_lost:
        shard.tick(1.0 + 0.41 * LEASE_S)
        assert job.state is State.INTERRUPTED
    now_s = 1.0 + 0.42 * LEASE_S
    first = member(0, 2, restart=1, heard_s=now_s)
    assert shard.decide_join("run", 2, first)[0] is job
    assert "continues at step 1" in first.news
    lost, _ = shard.tick(now_s + 0.1)  # The former lease of worker 1 is over in any case.
    assert lost == []
    assert job.membership.expected() == [0, 1]
    assert job.step == 1  # Step 1 does not close with the gradient of worker 0 alone.


def test_a_worker_that_is_started_again_beside_live_ones_begins_no_other_life() -> None:
    shard, job, address = ready(2)
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    job.membership.suspect(0, 1, 1.0)
    again = member(0, 2, restart=1, heard_s=2.0)
    assert shard.decide_join("run", 2, again)[0] is job
    assert (again.news, job.life.number) == ("", 1)


def test_workers_that_are_started_again_before_any_update_begin_the_job_anew() -> None:
    shard, job, _ = ready(2)
    shard.tick(LEASE_S + 1.0)
    following, _ = shard.decide_join("run", 2, member(0, 2, restart=1, heard_s=LEASE_S + 2.0))
    assert following is not job
    assert following.membership.expected() == [0, 1]


# ----- the same launch, or the next


def of_run(run_id: str, rank: int, incarnation: int = 1, restart: int = 0) -> Member:
    return dataclasses.replace(member(rank, incarnation, restart=restart), run_id=run_id)


def trained(run_id: str, *, least: int = 0) -> tuple[Shard, Job]:
    """Returns a job of two workers of a run, with one update."""
    shard = Shard(0, 1, LEASE_S)
    shard.decide_join("run", 2, of_run(run_id, 0), least)
    job, _ = shard.decide_join("run", 2, of_run(run_id, 1), least)
    address = Address("run", shard.define(job, SPEC)[0].index, 0)
    weights = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
    shard.decide_push(job, address, weights, "init")
    for rank in (0, 1):
        push(shard, job, address, rank, 0)
    return shard, job


def over(run_id: str, *, least: int = 0) -> tuple[Shard, Job]:
    """Returns a job that has ended: worker 1 was lost, and worker 0 continued to its end."""
    shard, job = trained(run_id, least=least)
    shard.decide_leave("run", 1, 1, "its process failed", failed=True)
    shard.decide_leave("run", 0, 1, "finished")
    assert job.state is State.ENDED
    return shard, job


@pytest.mark.parametrize(
    ("former", "now", "restart", "belongs"),
    [
        ("a", "a", 0, True),  # A pod that its Job has replaced.
        ("a", "b", 0, False),
        ("a", "b", 1, False),  # The next launch, whose first attempt did not reach the shards.
        ("a", "", 0, False),
        ("", "a", 0, False),
        ("", "", 0, False),
        ("", "a", 1, True),
    ],
)
def test_a_worker_of_the_same_run_takes_part_in_the_end_and_one_of_another_starts_over(
    former: str, now: str, restart: int, belongs: bool
) -> None:
    shard, job = over(former)
    back = of_run(now, 1, 2, restart)
    joined, _ = shard.decide_join("run", 2, back)
    assert (joined is job) == belongs
    assert ("'run' has ended at step 1, and this worker is of the same run" in back.news) == (
        former == now == "a"
    )
    assert ("starts over at step 0" in back.news) == (not belongs)
    if belongs:
        shard.decide_leave("run", 1, 2, "finished")
        assert job.state is State.ENDED


def test_all_workers_of_a_run_may_come_back_after_its_end_and_the_next_run_after_them() -> None:
    """As pods do whose scripts fail when the training is over."""
    shard, job = over("a")
    news = []
    for rank in (0, 1):
        back = of_run("a", rank, 2)
        assert shard.decide_join("run", 2, back)[0] is job
        news.append(back.news)
    assert ["has ended" in text for text in news] == [True, False]  # The job trains again.
    for rank in (0, 1):
        shard.decide_leave("run", rank, 2, "finished")
    following, _ = shard.decide_join("run", 2, of_run("b", 0, 3))
    assert following is not job


def test_a_worker_of_an_elastic_job_takes_part_in_the_end_of_its_run_at_any_rank() -> None:
    shard, job = over("a", least=1)
    back = of_run("a", -1, 2)
    assert shard.decide_join("run", 2, back, 1)[0] is job
    assert (back.rank, job.membership.live()) == (1, [1])
    assert "has ended at step 1" in back.news
    shard.decide_leave("run", 1, 2, "finished")
    assert shard.decide_join("run", 2, of_run("b", -1, 3), 1)[0] is not job


def test_a_worker_of_a_former_run_is_kept_out_of_a_job_that_trains() -> None:
    """Its rank is free: the worker that had it was lost, or has not come yet."""
    shard, job = trained("b")
    shard.decide_leave("run", 1, 1, "its process failed", failed=True)
    with pytest.raises(NotOverError, match=r"trains with worker 0 .*of run 'a' .*another job name"):
        shard.decide_join("run", 2, of_run("a", 1, 2))
    assert shard.decide_join("run", 2, of_run("b", 1, 3))[0] is job
    other = Shard(0, 1, LEASE_S)
    other.decide_join("run", 2, of_run("b", 0))
    with pytest.raises(NotOverError, match="which another launch has started"):
        other.decide_join("run", 2, of_run("a", 1, 2))


def test_a_worker_whose_run_is_not_known_joins_a_job_that_trains() -> None:
    """As when it is started by hand, in place of a lost one."""
    for former, now in (("b", ""), ("", "a")):
        shard, job = trained(former)
        shard.decide_leave("run", 1, 1, "its process failed", failed=True)
        assert shard.decide_join("run", 2, of_run(now, 1, 2))[0] is job


def test_an_elastic_job_has_workers_of_several_launches() -> None:
    shard, job = trained("a", least=1)
    shard.decide_leave("run", 1, 1, "its process failed", failed=True)
    assert shard.decide_join("run", 2, of_run("b", -1, 2), 1)[0] is job
    for rank, incarnation in ((0, 1), (1, 2)):
        shard.decide_leave("run", rank, incarnation, "finished")
    for run_id in ("a", "b"):
        back = of_run(run_id, -1, 3)
        assert shard.decide_join("run", 2, back, 1)[0] is job
        shard.decide_leave("run", back.rank, 3, "finished")


def test_the_next_launch_continues_a_job_whose_workers_were_all_lost() -> None:
    shard, job = trained("a")
    shard.decide_leave("run", 0, 1, "its process failed", failed=True)
    with pytest.raises(NotOverError):  # One of the former ones is still there, for now.
        shard.decide_join("run", 2, of_run("b", 0, 2))
    shard.tick(LEASE_S + 1.0)
    for rank in (0, 1):
        late = dataclasses.replace(of_run("b", rank, 2), heard_s=LEASE_S + 1.0)
        assert shard.decide_join("run", 2, late)[0] is job
    assert job.life.number == 2


def test_an_asynchronous_job_awaits_the_workers_of_its_own_run_alone() -> None:
    """The others may have finished before it began."""
    for run_id, is_awaited in (("a", True), ("", True), ("b", False)):
        shard = Shard(0, 1, LEASE_S)
        job, _ = shard.decide_join("run", 2, of_run("a", 0))
        shard.decide_leave("run", 0, 1, "finished")
        late = of_run(run_id, 1, 2)
        assert (shard.decide_join("run", 2, late)[0] is job) == is_awaited
        assert not late.news


def test_a_process_that_has_finished_begins_the_next_run_though_its_launch_is_the_same() -> None:
    shard, job = trained("a")
    for rank in (0, 1):
        shard.decide_leave("run", rank, 1, "finished")
    again = dataclasses.replace(of_run("a", 0, 2), after=1)
    assert shard.decide_join("run", 2, again)[0] is not job


def test_shards_of_which_one_has_not_heard_of_the_end_agree_on_the_life() -> None:
    """Else the next worker would begin another life there, without the first one."""
    shard, job = over("a")
    for rank in (0, 1):
        shard.decide_join("run", 2, of_run("a", rank, 2), life=2)
    assert (job.membership.live(), job.life.number) == ([0, 1], 2)


@pytest.mark.parametrize(("rank", "least"), [(0, 0), (1, 0), (-1, 1)])
def test_a_worker_that_has_joined_the_first_shard_before_the_end_keeps_this_shards_part(
    rank: int, least: int
) -> None:
    """The others ended between its two joins: here it would have started the job over."""
    shard, job = over("", least=least)
    back = dataclasses.replace(member(rank, 2), continues=True)
    assert shard.decide_join("run", 2, back, least, 1)[0] is job
    assert job.table(0).clock(0).version == 1
    shard.decide_leave("run", back.rank, 2, "finished")
    following, _ = shard.decide_join("run", 2, member(0, 3), least, 1)
    assert following is not job
