"""Expected workers, the owners of ranks, and leases."""

from dataclasses import replace

import pytest

from pscore.errors import ConfigError, NotOverError, RankTakenError, ReplacedError, UnknownJobError
from psserver.decisions.membership import (
    SPENT_MAX,
    TRANSITIONS,
    WORKERS_MAX,
    Member,
    MemberEvent,
    Membership,
    Presence,
    await_others,
    compare_left_out,
    rest_of,
)
from psserver.decisions.shard import Shard


def member(rank: int, incarnation: int = 1, *, restart: int = 0, heard_s: float = 0.0) -> Member:
    return Member(
        rank=rank,
        incarnation=incarnation,
        restart=restart,
        host="gpu7",
        pid=70 + rank,
        heard_s=heard_s,
    )


def joined(num_workers: int, *ranks: int) -> Membership:
    membership = Membership(num_workers, lease_s=10.0)
    for rank in ranks:
        membership.join(member(rank))
    return membership


@pytest.mark.parametrize("num_workers", [-1, 0, WORKERS_MAX + 1])
def test_a_job_has_between_one_and_4096_workers(num_workers: int) -> None:
    with pytest.raises(ConfigError, match=rf"number of workers is {num_workers}, must be in 1\.\."):
        Membership(num_workers, lease_s=10.0)
    assert Membership(WORKERS_MAX, lease_s=10.0).expected()[-1] == WORKERS_MAX - 1


# ----- expected


def test_workers_yet_to_come_are_expected() -> None:
    assert joined(3, 1).expected() == [0, 1, 2]


def test_a_worker_that_left_is_not_expected() -> None:
    membership = joined(3, 0, 1, 2)
    assert membership.leave(1, 1, "finished")
    assert membership.expected() == [0, 2]
    assert membership.members[1].reason == "finished"


def test_a_job_that_was_under_way_elsewhere_waits_for_a_lease_for_those_yet_to_come() -> None:
    membership = joined(3, 0)
    await_others(membership, 5.0)
    assert membership.expected() == [0, 1, 2]
    assert membership.describe(1) == "worker 1 (has not joined yet)"
    assert membership.join(replace(member(1, 7, heard_s=6.0), refills=True)) == 1
    membership.heard(0, 1, 14.0)
    membership.heard(1, 7, 14.0)
    assert [lost.rank for lost in membership.expire(15.5)] == [2]
    assert membership.expected() == [0, 1]
    with pytest.raises(ReplacedError, match="rank 2 came too late to fill an empty shard"):
        membership.join(replace(member(2, 8, heard_s=16.0), refills=True))


def test_a_worker_that_joins_again_does_not_rest() -> None:
    membership = joined(2, 0, 1)
    membership.resting[1] = rest_of(membership, 2.0)
    assert membership.expected() == [0, 1]
    membership.join(replace(member(1, 5), former=(membership.members[1].incarnation,)))
    assert not membership.resting


def test_leaving_twice_changes_nothing() -> None:
    membership = joined(2, 0)
    assert membership.leave(0, 1, "finished")
    assert not membership.leave(0, 1, "again")
    assert membership.members[0].reason == "finished"


def test_only_the_worker_itself_leaves() -> None:
    membership = joined(2, 0)
    assert not membership.leave(0, 2, "another incarnation")
    assert not membership.leave(1, 1, "never joined")
    assert membership.expected() == [0, 1]


# ----- ranks


def test_a_rank_is_given_to_one_process() -> None:
    membership = joined(2, 0)
    with pytest.raises(RankTakenError, match=r"rank 0 is held by process 70 on gpu7, last heard 3"):
        membership.join(member(0, 2, heard_s=3.0))


def test_a_process_that_waits_gets_the_rank_of_a_dead_one_and_learns_of_one_that_lives() -> None:
    membership = joined(2, 0)
    asks = replace(member(0, 2, heard_s=3.0), asked_s=3.0)
    with pytest.raises(NotOverError, match="rank 0 is held by process 70"):
        membership.join(asks)
    membership.heard(0, 1, 4.0)
    with pytest.raises(RankTakenError) as refused:
        membership.join(replace(asks, heard_s=5.0))
    assert refused.type is RankTakenError  # Waiting does not help.
    later = replace(member(0, 3, heard_s=6.0), asked_s=6.0)
    with pytest.raises(NotOverError):
        membership.join(replace(later, heard_s=13.9))
    membership.expire(14.1)
    assert membership.join(replace(later, heard_s=14.1)) == 0


def test_a_rank_beyond_the_job_is_refused() -> None:
    with pytest.raises(RankTakenError, match="rank 2 wanted in a job of 2 workers"):
        joined(2).join(member(2))


def test_the_lowest_free_rank_is_given_on_request() -> None:
    membership = joined(3, 0)
    assert membership.join(member(-1, 2)) == 1
    assert membership.join(member(-1, 3)) == 2
    with pytest.raises(RankTakenError, match="all 3 ranks of the job are taken"):
        membership.join(member(-1, 4))


def test_a_restarted_worker_takes_its_own_place() -> None:
    membership = joined(2, 0, 1)
    assert membership.join(member(0, 2, restart=1)) == 0
    with pytest.raises(ReplacedError, match="rank 0 is now process 70"):
        membership.heard(0, 1, 1.0)
    with pytest.raises(ReplacedError, match="request to join at rank 0 came late"):
        membership.join(member(0, 1))


# ----- who came later; incarnations are random, so none is larger because it is newer


def paused(restart: int, presence: Presence) -> Membership:
    """Returns a job of two in which process 8 has the place of process 9, which was paused."""
    membership = joined(2, 1)
    membership.join(member(0, 9))
    membership.expire(11.0)
    membership.join(member(0, 8, restart=restart, heard_s=12.0))
    if presence is Presence.LEFT:
        membership.leave(0, 8, "finished")
    elif presence is Presence.LOST:
        membership.expire(30.0)
    return membership


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.parametrize("presence", list(Presence))
def test_a_worker_that_was_replaced_stays_so_whatever_becomes_of_the_other(
    restart: int, presence: Presence
) -> None:
    membership = paused(restart, presence)
    back = replace(member(0, 10, heard_s=40.0), former=(9,), returns=True)
    with pytest.raises(ReplacedError, match="rank 0 was taken over by process 70 on gpu7"):
        membership.join(back)


@pytest.mark.parametrize("incarnation", [1, 10])
def test_a_worker_that_was_lost_comes_back_whatever_its_clock_says(incarnation: int) -> None:
    membership = joined(2, 1)
    membership.join(member(0, 5))
    membership.expire(11.0)
    back = replace(member(0, incarnation, heard_s=12.0), former=(5,), returns=True)
    assert membership.join(back) == 0
    assert membership.members[0].spent == (5,)


@pytest.mark.parametrize("incarnation", [1, 10])
def test_a_new_process_takes_the_place_of_a_lost_one_whatever_its_clock_says(
    incarnation: int,
) -> None:
    membership = joined(2, 1)
    membership.join(member(0, 5))
    membership.expire(11.0)
    assert membership.join(member(0, incarnation, heard_s=12.0)) == 0


def test_a_worker_that_was_lost_elsewhere_replaces_itself_here() -> None:
    membership = joined(2, 1)
    membership.join(member(0, 5))
    back = replace(member(0, 3, heard_s=2.0), former=(4, 5), returns=True)
    assert membership.join(back) == 0


def test_a_worker_comes_back_whose_last_join_was_answered_to_nobody() -> None:
    """It does not know that 6 was taken in."""
    membership = joined(2, 1)
    membership.join(member(0, 5))
    membership.join(replace(member(0, 6, heard_s=1.0), former=(5,)))
    assert membership.join(replace(member(0, 4, heard_s=60.0), former=(5, 6))) == 0
    assert membership.members[0].spent == (5, 6)


def test_a_shard_that_has_gone_back_in_time_takes_those_it_does_not_know() -> None:
    """It began from a snapshot of before process 7 took the place of the lost process 5."""
    membership = joined(2, 1)
    membership.join(member(0, 5))
    membership.expire(11.0)
    assert membership.join(replace(member(0, 2, heard_s=12.0), former=(7,))) == 0


@pytest.mark.parametrize("rank", [-1, 0])
def test_a_join_that_arrives_late_takes_no_place(rank: int) -> None:
    membership = joined(3, 1)
    membership.join(member(0, 5))
    membership.join(replace(member(0, 6), former=(5,)))
    membership.expire(11.0)
    with pytest.raises(ReplacedError, match=f"request to join at rank {rank} came late"):
        membership.join(member(rank, 5, heard_s=12.0))
    assert sorted(membership.members) == [0, 1]


def test_a_place_remembers_a_bounded_number_of_former_holders() -> None:
    membership = joined(1)
    for number in range(2 * SPENT_MAX):
        membership.join(member(0, 1000 - number, restart=number))
    assert len(membership.members[0].spent) == SPENT_MAX
    assert membership.members[0].spent[-1] == 1000 - 2 * SPENT_MAX + 2


# ----- repeated joins: the second time changes nothing


def test_a_repeated_join_is_the_same_worker() -> None:
    membership = joined(2)
    assert membership.join(member(0, 5)) == 0
    assert membership.join(member(0, 5, heard_s=4.0)) == 0
    assert membership.members[0].heard_s == 4.0
    assert len(membership.members) == 1


def test_a_repeated_request_for_any_rank_gets_the_same_rank() -> None:
    membership = joined(3)
    assert membership.join(member(-1, 5)) == 0
    assert membership.join(member(-1, 5)) == 0
    assert membership.expected() == [0, 1, 2]
    assert list(membership.members) == [0]


def test_a_join_that_arrives_again_after_the_worker_left_does_not_bring_it_back() -> None:
    """Else everybody would wait for a lease of a process that is gone."""
    membership = joined(2, 0, 1)
    membership.leave(0, 1, "finished")
    assert membership.join(member(0)) == 0
    assert membership.expected() == [1]
    assert membership.members[0].presence is Presence.LEFT


def test_a_join_that_arrives_again_after_the_lease_does_not_bring_the_worker_back() -> None:
    membership = joined(2, 0)
    membership.expire(11.0)
    with pytest.raises(ReplacedError, match="declared lost"):
        membership.join(member(0, heard_s=12.0))
    assert membership.expected() == [1]


def test_a_rank_that_was_left_is_not_handed_out_while_others_continue() -> None:
    """A shard refuses it by number as well: the others have counted its steps."""
    membership = joined(2, 0, 1)
    membership.leave(0, 1, "finished")
    with pytest.raises(RankTakenError, match="all 2 ranks"):
        membership.join(member(-1, 2))


def test_a_worker_that_another_shard_has_lost_starts_over_where_it_is_still_live() -> None:
    membership = joined(2, 0, 1)
    again = member(0, 2)
    again.returns, again.former = True, (1,)
    assert membership.join(again) == 0
    with pytest.raises(ReplacedError):
        membership.heard(0, 1, 1.0)


def test_another_process_does_not_take_the_place_of_a_live_one_by_claiming_to_return() -> None:
    membership = joined(2, 0, 1)
    other = member(0, 2)
    other.returns, other.pid = True, 99
    with pytest.raises(RankTakenError):
        membership.join(other)


# ----- leases


def test_silence_is_allowed_for_exactly_the_lease() -> None:
    membership = joined(2, 0)
    assert membership.expire(10.0) == []
    (lost,) = membership.expire(10.001)
    assert (lost.rank, lost.presence) == (0, Presence.LOST)
    assert membership.expected() == [1]
    assert membership.expire(99.0) == []


def test_time_in_which_the_shard_was_away_counts_for_no_lease() -> None:
    shard = Shard(0, 1, lease_s=10.0)
    shard.decide_join("run", 1, member(0))
    assert shard.tick(500.0, away_s=490.0) == ([], [])
    (lost,), _ = shard.tick(500.001)
    assert lost[1].rank == 0


def test_any_message_renews_a_lease() -> None:
    membership = joined(2, 0)
    membership.heard(0, 1, 8.0)
    assert membership.expire(18.0) == []
    assert [lost.rank for lost in membership.expire(18.5)] == [0]


def test_a_worker_that_left_is_not_lost() -> None:
    membership = joined(1, 0)
    membership.leave(0, 1, "finished")
    assert membership.expire(99.0) == []
    assert membership.members[0].presence is Presence.LEFT


def test_a_worker_that_was_declared_lost_gets_that_reason() -> None:
    membership = joined(2, 0)
    membership.expire(11.0)
    with pytest.raises(
        ReplacedError,
        match="rank 0 was declared lost: it was silent for more than its lease of 10 s",
    ):
        membership.heard(0, 1, 12.0)


def test_an_unknown_worker_gets_that_reason() -> None:
    with pytest.raises(UnknownJobError, match="no worker has joined at rank 1"):
        joined(2, 0).heard(1, 1, 0.0)


# ----- the whole


def test_a_job_is_over_when_all_of_its_workers_have_left() -> None:
    membership = joined(2)
    assert not membership.is_idle
    membership.join(member(0))
    assert not membership.is_idle
    membership.leave(0, 1, "finished")
    assert membership.is_idle


def test_workers_are_described_for_people() -> None:
    membership = joined(2, 0)
    assert membership.describe(0) == "worker 0 (process 70 on gpu7)"
    assert membership.describe(1) == "worker 1 (has not joined yet)"


# ----- elastic jobs


def elastic(least: int, most: int, *ranks: int) -> Membership:
    membership = Membership(most, lease_s=10.0, min_workers=least)
    for rank in ranks:
        membership.join(member(rank))
    return membership


@pytest.mark.parametrize("least", [-1, 4])
def test_the_least_number_of_workers_is_in_its_range(least: int) -> None:
    with pytest.raises(ConfigError, match=rf"is {least}, must be in 1\.\.3, the largest number"):
        Membership(3, lease_s=10.0, min_workers=least)
    assert Membership(3, lease_s=10.0, min_workers=3).size == "3 to 3"


def test_every_live_worker_is_expected_in_an_elastic_job() -> None:
    membership = elastic(2, 4, 3, 1)
    assert membership.expected() == [1, 3]
    membership.leave(3, 1, "finished")
    membership.join(member(0))
    assert membership.expected() == [0, 1]


def test_a_step_wants_the_minimum_of_workers_less_finished_ones() -> None:
    membership = elastic(2, 4, 0, 1, 2)
    assert membership.wanted() == 2
    membership.leave(2, 1, "finished")
    assert membership.wanted() == 1
    membership.leave(1, 1, "finished")
    assert membership.wanted() == 0


def test_a_worker_whose_script_failed_counts_as_lost() -> None:
    membership = elastic(2, 4, 0, 1)
    membership.leave(1, 1, "its script failed", failed=True)
    assert membership.members[1].presence is Presence.LOST
    assert membership.wanted() == 2
    assert membership.shortage() == "1 more worker (1 of at least 2)"


def test_an_elastic_job_whose_workers_were_all_lost_waits_for_the_least_number() -> None:
    membership = elastic(2, 4, 0, 1)
    assert len(membership.expire(11.0)) == 2
    assert membership.wanted() == 2
    assert membership.shortage() == "2 more workers (0 of at least 2)"


def test_a_job_whose_workers_were_all_lost_waits_for_one() -> None:
    membership = joined(2, 0, 1)
    assert len(membership.expire(11.0)) == 2
    assert membership.wanted() == 1
    assert membership.shortage() == "1 more worker (0 of at least 1)"


def test_a_job_wants_nobody_once_a_worker_has_finished_and_the_others_are_lost() -> None:
    for membership in (elastic(2, 4, 0, 1), joined(2, 0, 1)):
        membership.leave(0, 1, "finished")
        assert len(membership.expire(11.0)) == 1
        assert membership.wanted() == 0


def test_a_job_that_is_not_elastic_wants_nobody() -> None:
    assert joined(3, 0).wanted() == 0


def test_ranks_of_lost_workers_are_given_first_and_of_departed_ones_last() -> None:
    membership = elastic(1, 4, 0, 1, 2)
    membership.leave(0, 1, "finished")
    membership.leave(2, 1, "failed", failed=True)
    given = [membership.join(member(-1, incarnation)) for incarnation in (5, 6, 7)]
    assert given == [2, 3, 0]
    with pytest.raises(RankTakenError, match="all 4 ranks of the job are taken"):
        membership.join(member(-1, 8))


def test_another_worker_takes_the_rank_of_one_that_had_been_restarted() -> None:
    membership = elastic(1, 2)
    membership.join(member(0, 5, restart=3))
    membership.expire(11.0)
    assert membership.join(member(-1, 6, heard_s=12.0)) == 0
    with pytest.raises(ReplacedError, match="came late"):
        membership.join(member(0, 5, restart=2, heard_s=13.0))


def test_a_paused_worker_does_not_take_its_rank_back_from_its_replacement() -> None:
    membership = elastic(1, 2)
    membership.join(member(0, 5))
    membership.expire(11.0)
    assert membership.join(member(-1, 6, restart=1, heard_s=12.0)) == 0
    with pytest.raises(RankTakenError, match="rank 0 is held by process"):
        membership.join(member(0, 7, heard_s=13.0))


def test_an_elastic_job_has_begun_when_the_least_number_have_come() -> None:
    membership = elastic(2, 4, 3)
    assert not membership.has_begun
    membership.join(member(0))
    assert membership.has_begun


# ----- steps that a script leaves out


def test_a_worker_that_leaves_out_a_step_is_named_once_the_others_have_made_it() -> None:
    members = joined(2, 0, 1)
    assert compare_left_out(members, 0, {3: (5, 0, 0)}) == ""
    assert (
        compare_left_out(members, 1, {3: (6, 1, 5)}) == ""
    )  # The other may still leave out step 5.
    assert compare_left_out(members, 0, {3: (5, 0, 0)}) == ""
    text = compare_left_out(members, 0, {3: (6, 0, 0)})
    assert text.startswith("worker 1 (process ")
    assert "has left out 1 step that worker 0 (process " in text
    assert "before the end of step 5" in text
    assert compare_left_out(members, 1, {3: (8, 3, 7)}) == ""
    assert "3 steps" in compare_left_out(members, 0, {3: (8, 0, 0)})
    assert compare_left_out(members, 0, {3: (9, 3, 8)}) == ""
    members.leave(1, 1, "finished")
    assert compare_left_out(members, 0, {3: (9, 0, 8)}) == ""


def test_the_report_of_a_worker_that_is_lost_is_compared_with_nobody() -> None:
    members = joined(2, 0, 1)
    members.leave(1, 1, "its process failed", failed=True)
    assert compare_left_out(members, 1, {3: (5, 0, 0)}) == ""


# ----- the states of a worker


def in_state(presence: Presence) -> Membership:
    """Returns a membership whose rank 0 is in a state; rank 1 is live."""
    membership = joined(2, 1)
    if presence is not Presence.ABSENT:
        membership.join(member(0))
    if presence is Presence.LEFT:
        membership.leave(0, 1, "finished")
    if presence is Presence.LOST:
        membership.leave(0, 1, "its process failed", failed=True)
    return membership


def happens(membership: Membership, event: MemberEvent) -> None:
    match event:
        case MemberEvent.JOIN:
            membership.join(member(0, 2, restart=1))
        case MemberEvent.MESSAGE:
            membership.heard(0, 1, 1.0)
        case MemberEvent.LEAVE | MemberEvent.FAIL:
            membership.leave(0, 1, "over", failed=event is MemberEvent.FAIL)
        case MemberEvent.SILENCE:
            membership.expire(11.0)
        case MemberEvent.NEW_LIFE:
            membership.begin_again()


@pytest.mark.parametrize("event", MemberEvent)
@pytest.mark.parametrize("presence", Presence)
def test_an_event_has_the_effect_that_the_table_of_transitions_says(
    presence: Presence, event: MemberEvent
) -> None:
    membership = in_state(presence)
    try:
        happens(membership, event)
    except (ReplacedError, UnknownJobError):
        assert (presence, event) not in TRANSITIONS
    found = membership.members.get(0)
    after = Presence.ABSENT if found is None else found.presence
    assert after is TRANSITIONS.get((presence, event), presence)


# ----- away


def test_a_lost_worker_is_away_until_it_is_back() -> None:
    membership = joined(3, 0, 1, 2)
    assert membership.num_away == 0
    membership.members[2].lease_ends_s = -1.0
    membership.leave(1, 1, "its script failed", failed=True)
    membership.expire(0.0)
    assert membership.num_away == 2
    membership.join(member(1, 2))
    assert membership.num_away == 1


def test_a_worker_that_ends_and_a_job_that_is_stopped_have_nobody_away() -> None:
    membership = joined(2, 0, 1)
    membership.leave(0, 1, "finished")
    assert membership.num_away == 0
    membership = joined(2, 0, 1)
    for rank in range(2):
        membership.leave(rank, 1, "its process failed", failed=True)
    assert membership.num_away == 0


def test_an_elastic_job_misses_only_those_below_its_least_number() -> None:
    membership = Membership(4, lease_s=10.0, min_workers=2)
    for rank in range(3):
        membership.join(member(rank))
    membership.leave(2, 1, "its process failed", failed=True)
    assert membership.num_away == 0
    membership.leave(1, 1, "its process failed", failed=True)
    assert membership.num_away == 1
