"""Every decision of one slice, as a table of events: messages in, actions out, as text."""

import numpy as np
import pytest

from pscore.errors import ConfigError, RemoteProtocolError
from pscore.rules import ADPSGD, ASGD, SSD, SSGD, LocalSGD
from pscore.rules.base import Rule
from pscore.types import Push, Role
from psserver.decisions.orders import Update
from psserver.decisions.parking import PARKED_MAX
from psserver.decisions.progress import LATE_KEPT
from tests.unit.psserver.bench import Bench, Bounded, FirstOfOpen, Pairs, words

SYNC = SSGD()
OPEN = SSD(steps=3, warmup=0, local="sgd")  # A worker may be 3 steps beyond the newest update.


# ----- loading


def test_a_push_before_the_weights_is_refused() -> None:
    bench = Bench(SYNC, 1, loaded=False)
    with pytest.raises(
        RemoteProtocolError, match="worker 0 pushed step 0 before the weights were initialised"
    ):
        bench.push(0, 0)
    assert bench.clock.counted == {}


def test_a_pull_waits_for_the_initial_weights() -> None:
    bench = Bench(SYNC, 2, loaded=False)
    assert bench.pull(1, 0, 0) == []
    assert bench.clock.num_waiting == 1
    assert bench.load() == ["load WEIGHTS v0", "ack init ACCEPTED v0", "answer pull1 v0"]
    assert bench.clock.num_waiting == 0


def test_initial_weights_are_taken_once() -> None:
    bench = Bench(SYNC, 1)
    bench.push(0, 0)
    assert bench.load(token="again") == ["ack again DUPLICATE v1"]


def test_restored_state_is_taken_at_any_time_and_keeps_the_version() -> None:
    bench = Bench(SYNC, 1)
    bench.push(0, 0)
    assert bench.load(Role.STATE, "restored") == ["load STATE v1", "ack restored ACCEPTED v1"]


def test_restored_state_may_be_the_first_weights() -> None:
    bench = Bench(SYNC, 1, loaded=False)
    assert bench.load(Role.STATE) == ["load STATE v0", "ack init ACCEPTED v0"]


# ----- filled again by workers, after it was lost


def test_an_empty_slice_takes_the_newest_version_that_a_worker_has() -> None:
    bench = Bench(SYNC, 2, loaded=False)
    assert bench.pull(1, 6, 6) == []
    assert bench.refill(1, 5) == ["load REFILL v5", "ack fill1 ACCEPTED v5"]
    assert bench.refill(0, 6) == ["load REFILL v6", "ack fill0 ACCEPTED v6", "answer pull1 v6"]
    assert bench.refill(1, 5) == ["ack fill1 DUPLICATE v6"]
    assert bench.push(1, 5, base=5) == ["ack 1@5 DUPLICATE v6"]
    assert bench.push(1, 6, base=6) == ["hold 1@6", "ack 1@6 ACCEPTED v6"]
    assert bench.push(0, 6, base=6)[-1] == "update 6 x0.5 -> v7"


def test_workers_that_had_not_ended_the_step_make_it_again() -> None:
    bench = Bench(SYNC, 2, loaded=False)
    for rank in (1, 0):
        bench.refill(rank, 5)
    assert bench.push(1, 5, base=5) == ["hold 1@5", "ack 1@5 ACCEPTED v5"]
    assert bench.push(0, 5, base=5)[-1] == "update 5 x0.5 -> v6"


def test_a_slice_in_use_is_not_filled() -> None:
    bench = Bench(SYNC, 2)
    bench.push(0, 0)
    with pytest.raises(RemoteProtocolError, match="would fill a slice with version 7"):
        bench.refill(1, 7)
    asynchronous = Bench(ASGD(), 2, loaded=False)
    with pytest.raises(RemoteProtocolError, match="it is in use at version -1"):
        asynchronous.refill(1, 7)


# ----- by step


def test_a_step_closes_when_all_are_in() -> None:
    bench = Bench(SYNC, 2)
    assert bench.push(0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    assert bench.push(1, 0) == ["add 1@0 x1 in 0", "ack 1@0 ACCEPTED v0", "update 0 x0.5 -> v1"]


def test_gradients_enter_in_the_order_of_the_ranks() -> None:
    bench = Bench(SYNC, 3)
    assert bench.push(2, 0) == ["hold 2@0", "ack 2@0 ACCEPTED v0"]
    assert bench.push(1, 0) == ["hold 1@0", "ack 1@0 ACCEPTED v0"]
    assert bench.push(0, 0) == [
        "set 0@0 x1 in 0",
        "add 1@0 x1 in 0",
        "add 2@0 x1 in 0",
        "ack 0@0 ACCEPTED v0",
        "update 0 x0.333333 -> v1",
    ]


def test_the_prefix_of_ranks_that_is_in_is_added_at_once() -> None:
    bench = Bench(SYNC, 4)
    bench.push(2, 0)
    assert bench.push(0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    assert bench.push(1, 0)[:2] == ["add 1@0 x1 in 0", "add 2@0 x1 in 0"]


def test_collecting_is_by_step_and_not_by_arrival() -> None:
    """STYLE.md 2.9 (c): two pushes of worker 0 are in before worker 1's first."""
    bench = Bench(OPEN, 2)
    assert bench.push(0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    assert bench.push(0, 1) == ["set 0@1 x1 in 1", "ack 0@1 ACCEPTED v0"]
    assert bench.push(1, 0)[-1] == "update 0 x0.5 -> v1"
    assert bench.push(1, 1, base=1)[-1] == "update 1 x0.5 -> v2"


def test_steps_close_in_order_even_if_a_later_one_is_complete_first() -> None:
    bench = Bench(OPEN, 2)
    bench.push(0, 0)
    bench.push(0, 1)
    assert bench.push(1, 1) == ["add 1@1 x1 in 1", "ack 1@1 ACCEPTED v0"]
    assert bench.push(1, 0) == [
        "add 1@0 x1 in 0",
        "ack 1@0 ACCEPTED v0",
        "update 0 x0.5 -> v1",
        "update 1 x0.5 -> v2",
    ]


def test_a_repeated_push_is_a_duplicate_before_and_after_its_step_has_closed() -> None:
    bench = Bench(SYNC, 2)
    bench.push(0, 0)
    assert bench.push(0, 0, mark="again") == ["ack 0@0again DUPLICATE v0"]
    bench.push(1, 0)
    assert bench.push(0, 0, mark="late") == ["ack 0@0late DUPLICATE v1"]
    assert bench.clock.version == 1


def test_a_held_push_is_a_duplicate_too() -> None:
    bench = Bench(SYNC, 2)
    bench.push(1, 0)
    assert bench.push(1, 0, mark="again") == ["ack 1@0again DUPLICATE v0"]
    assert bench.push(0, 0)[-1] == "update 0 x0.5 -> v1"


def test_the_mean_weighs_by_samples() -> None:
    bench = Bench(SYNC, 2)
    assert bench.push(0, 0, samples=32)[0] == "set 0@0 x32 in 0"
    assert bench.push(1, 0, samples=96)[-1] == "update 0 x0.0078125 -> v1"


def test_one_worker_alone_needs_no_weight() -> None:
    assert Bench(SYNC, 1).push(0, 0, samples=32) == [
        "set 0@0 x1 in 0",
        "ack 0@0 ACCEPTED v0",
        "update 0 x1 -> v1",
    ]


def test_a_step_without_samples_changes_nothing() -> None:
    bench = Bench(SYNC, 2)
    bench.push(0, 0, samples=0)
    assert bench.push(1, 0, samples=0)[-1] == "update 0 x0 -> v1"


def test_an_update_has_the_segments_of_all_that_weigh_something() -> None:
    bench = Bench(SYNC, 3)
    bench.push(0, 0, present=0b001)
    bench.push(1, 0, present=0b110, samples=0)
    push = Push(worker=2, step=0, base_version=0, present=0b100, hyper=np.array([[0.5]]))
    update = bench.clock.push(push, "last")[-1]
    assert isinstance(update, Update)
    assert update.present == 0b101


def test_an_update_has_the_hyper_parameters_of_the_lowest_rank() -> None:
    bench = Bench(SYNC, 2)
    bench.push(1, 0, lr=0.25)
    push = Push(worker=0, step=0, base_version=0, hyper=np.array([[0.75]]))
    update = bench.clock.push(push, "last")[-1]
    assert isinstance(update, Update)
    assert update.hyper[0, 0] == 0.75


def test_a_push_on_a_version_to_come_is_refused() -> None:
    bench = Bench(SYNC, 1)
    with pytest.raises(RemoteProtocolError, match=r"step 0 on version 1, the newest is 0$"):
        bench.push(0, 0, base=1)
    assert bench.push(0, 0)[-1] == "update 0 x1 -> v1"


# ----- too late


def test_a_push_behind_its_step_is_too_late_each_time() -> None:
    bench = Bench(SSGD(backup=1), 2)
    assert bench.push(0, 0)[-1] == "update 0 x1 -> v1"
    assert bench.push(1, 0) == ["ack 1@0 TOO_LATE v1"]
    assert bench.push(1, 0, mark="again") == ["ack 1@0again TOO_LATE v1"]
    assert bench.clock.clock(1) == 1


def test_backup_workers_are_added_as_they_come() -> None:
    bench = Bench(SSGD(backup=1), 3)
    assert bench.push(2, 0)[0] == "set 2@0 x1 in 0"
    assert bench.push(0, 0)[0] == "add 0@0 x1 in 0"
    assert bench.push(1, 0) == ["ack 1@0 TOO_LATE v1"]


@pytest.mark.parametrize(
    "rule", [SSGD(backup=1), LocalSGD(backup=1), LocalSGD(quorum=2, window=0.5)]
)
def test_a_step_that_passes_slow_workers_by_passes_those_that_wait_for_others(rule: Rule) -> None:
    """They wait at a barrier for worker 2, which is in the step."""
    bench = Bench(rule, 3)
    assert bench.push(2, 0)[-1] != "update 0 x1 -> v1"
    bench.participants.at_barrier = {0, 1}
    assert words(bench.clock.recheck() + bench.clock.tick(1.0))[-1] == "update 0 x1 -> v1"
    bench.participants.at_barrier = {0}
    assert bench.push(2, 1, base=1)[-1] != "update 1 x1 -> v2"
    bench.push(1, 1, base=1)
    bench.clock.tick(2.0)
    assert bench.clock.version == 2


def test_a_step_of_all_waits_for_those_that_wait_for_others_too() -> None:
    bench = Bench(SSGD(), 2)
    bench.participants.at_barrier = {0}
    bench.push(1, 0)
    assert bench.clock.recheck() == []
    assert bench.clock.missing() == (0, [0])


def test_late_steps_are_remembered_up_to_a_limit() -> None:
    bench = Bench(SSGD(backup=1), 2)
    for step in range(LATE_KEPT + 10):
        bench.push(0, step, base=step)
        bench.push(1, step)
    assert len(bench.clock.counted[1].late) == LATE_KEPT + 1
    assert bench.push(1, 0) == [f"ack 1@0 DUPLICATE v{LATE_KEPT + 10}"]


def test_a_step_that_is_full_while_an_earlier_one_is_open_takes_no_more() -> None:
    bench = Bench(FirstOfOpen(), 2)
    assert bench.push(0, 1) == ["set 0@1 x1 in 1", "ack 0@1 ACCEPTED v0"]
    assert bench.push(1, 1) == ["ack 1@1 TOO_LATE v0"]
    assert bench.push(1, 1, mark="again") == ["ack 1@1again TOO_LATE v0"]
    assert bench.push(0, 0)[-2:] == ["update 0 x1 -> v1", "update 1 x1 -> v2"]


def test_parked_pushes_beyond_what_a_step_takes_are_too_late() -> None:
    bench = Bench(SSGD(backup=2), 3)
    assert bench.push(0, 1) == []
    assert bench.push(1, 1) == []
    assert bench.push(2, 0)[2:] == [
        "update 0 x1 -> v1",
        "set 0@1 x1 in 1",
        "ack 0@1 ACCEPTED v1",
        "ack 1@1 TOO_LATE v1",
        "update 1 x1 -> v2",
    ]


# ----- back-pressure


def test_a_push_too_far_ahead_is_parked_until_there_is_room() -> None:
    bench = Bench(OPEN, 2)
    for step in range(3):
        assert bench.push(0, step)[-1] == f"ack 0@{step} ACCEPTED v0"
    assert bench.push(0, 3) == []
    assert bench.push(1, 0) == [
        "add 1@0 x1 in 0",
        "ack 1@0 ACCEPTED v0",
        "update 0 x0.5 -> v1",
        "set 0@3 x1 in 3",
        "ack 0@3 ACCEPTED v1",
    ]


def test_a_parked_push_is_not_counted() -> None:
    bench = Bench(SYNC, 2)
    bench.push(0, 1)
    assert bench.clock.clock(0) == 0
    assert bench.clock.counted[0].ahead == set()


def test_a_repeated_parked_push_is_not_acknowledged_before_it_is_counted() -> None:
    """An answer now would let the worker reuse a buffer that the parked push still points to."""
    bench = Bench(SYNC, 1)
    assert bench.push(0, 1) == []
    assert bench.push(0, 1, mark="again") == []
    actions = bench.push(0, 0)
    assert "ack 0@1again ACCEPTED v1" in actions
    assert [text for text in actions if "0@1 " in text] == []
    assert bench.clock.version == 2


def test_parked_pushes_have_a_limit_that_is_reached_and_not_passed() -> None:
    bench = Bench(SYNC, 2)
    for step in range(1, PARKED_MAX + 1):
        assert bench.push(0, step) == []
    with pytest.raises(RemoteProtocolError, match=f"{PARKED_MAX} of its pushes already wait"):
        bench.push(0, PARKED_MAX + 1)
    assert bench.push(0, 1, mark="again") == []
    assert bench.push(1, 1) == []


def test_parked_pushes_come_in_by_rank_and_step() -> None:
    bench = Bench(SYNC, 2)
    bench.push(1, 1)
    bench.push(0, 1)
    bench.push(0, 0)
    assert bench.push(1, 0)[2:] == [
        "update 0 x0.5 -> v1",
        "set 0@1 x1 in 1",
        "ack 0@1 ACCEPTED v1",
        "add 1@1 x1 in 1",
        "ack 1@1 ACCEPTED v1",
        "update 1 x0.5 -> v2",
    ]


# ----- asynchronous


def test_an_asynchronous_push_is_an_update_of_its_own() -> None:
    bench = Bench(ASGD(), 2)
    assert bench.push(1, 0, samples=7) == [
        "set 1@0 x1 in 0",
        "update 0 x1 -> v1",
        "ack 1@0 ACCEPTED v1",
    ]
    assert bench.push(1, 0, mark="again") == ["ack 1@0again DUPLICATE v1"]
    assert bench.push(0, 5)[1] == "update 0 x1 -> v2"


def test_staleness_is_counted_in_updates_and_scales_one_gradient() -> None:
    """STYLE.md 2.9 (b): a rule whose scaling is deleted must fail here."""
    bench = Bench(Pairs(), 2)
    bench.push(0, 0)
    assert bench.push(1, 0) == ["add 1@0 x1 in 0", "update 0 x0.5 -> v1", "ack 1@0 ACCEPTED v1"]
    assert bench.push(0, 1, base=0, samples=8)[0] == "set 0@1 x2 in 0"
    assert bench.clock.staleness == {0: 1, 1: 0}
    assert bench.push(1, 1, base=1, samples=8)[:2] == [
        "add 1@1 x8 in 0",
        "update 0 x0.0625 -> v2",  # Over the sum of the samples, not of the scaled weights.
    ]


def test_the_same_worker_may_be_twice_in_one_asynchronous_update() -> None:
    bench = Bench(Pairs(), 2)
    bench.push(0, 0)
    assert bench.push(0, 1)[:2] == ["add 0@1 x1 in 0", "update 0 x0.5 -> v1"]


def test_a_gradient_that_waits_for_company_is_not_left_behind_by_leavers() -> None:
    """It was acknowledged, so it has to enter the weights although nobody comes any more."""
    bench = Bench(Pairs(), 2)
    bench.push(0, 0, samples=8)
    assert bench.leave(1) == ["update 0 x0.125 -> v1"]
    assert bench.leave(0) == []


def test_a_gradient_of_a_worker_that_left_is_not_left_behind_either() -> None:
    bench = Bench(Pairs(), 2)
    bench.push(0, 0)
    assert bench.leave(0) == ["update 0 x1 -> v1"]


def test_asynchronous_pushes_are_never_parked() -> None:
    bench = Bench(ASGD(), 2)
    assert bench.push(0, 1 << 40)[-1] == "ack 0@1099511627776 ACCEPTED v1"


# ----- pulls


def test_a_pull_is_answered_when_its_version_is_there() -> None:
    bench = Bench(SYNC, 2)
    bench.push(0, 0)
    assert bench.pull(0, 1, 1) == []
    assert bench.push(1, 0)[-2:] == ["update 0 x0.5 -> v1", "answer pull0 v1"]


def test_an_answer_stands_behind_all_updates_that_happened() -> None:
    bench = Bench(OPEN, 2)
    bench.push(0, 0)
    bench.push(0, 1)
    bench.push(1, 1)
    bench.pull(0, 1, 1)
    assert bench.push(1, 0)[2:] == ["update 0 x0.5 -> v1", "update 1 x0.5 -> v2", "answer pull0 v2"]


def test_an_asynchronous_pull_waits_for_its_own_pushes() -> None:
    bench = Bench(ASGD(), 2)
    assert bench.pull(0, 1, 0) == []
    assert bench.push(1, 0)[-1] == "ack 1@0 ACCEPTED v1"
    assert bench.push(0, 0)[-1] == "answer pull0 v2"


def test_pulls_are_answered_in_the_order_of_their_arrival() -> None:
    bench = Bench(SYNC, 3, loaded=False)
    for worker in (2, 0, 1):
        bench.pull(worker, 0, 0)
    assert bench.load()[2:] == ["answer pull2 v0", "answer pull0 v0", "answer pull1 v0"]


def test_state_travels_if_asked_for() -> None:
    assert Bench(SYNC, 1).pull(0, 0, 0, mark="state") == ["answer pull0state v0 with state"]


def test_a_forgotten_pull_is_not_answered() -> None:
    bench = Bench(SYNC, 1)
    bench.pull(0, 1, 1)
    assert bench.clock.forget("pull0")
    assert not bench.clock.forget("pull0")
    assert bench.push(0, 0)[-1] == "update 0 x1 -> v1"


def test_a_rule_may_hold_a_pull_until_the_slowest_has_come() -> None:
    bench = Bench(Bounded(), 2)
    bench.push(0, 0)
    bench.push(0, 1)
    assert bench.pull(0, 2, 0) == []
    assert bench.push(1, 0)[-1] == "answer pull0 v3"


# ----- a change of the rule


def test_a_change_closes_what_is_open_and_versions_continue() -> None:
    bench = Bench(OPEN, 2)
    bench.push(0, 0)
    bench.push(0, 1)
    bench.expected = []
    assert words(bench.clock.change(SYNC)) == ["update 0 x1 -> v1", "update 1 x1 -> v2"]
    bench.expected = [0, 1]
    assert bench.push(0, 2, base=2) == ["set 0@2 x1 in 2", "ack 0@2 ACCEPTED v2"]
    assert bench.push(1, 2, base=2)[-1] == "update 2 x0.5 -> v3"


def test_a_change_leaves_out_a_step_that_nobody_can_push_any_more() -> None:
    """Worker 0 came back and left out step 0; then all stepped aside."""
    bench = Bench(OPEN, 2)
    bench.push(0, 1)
    bench.expected = []
    assert words(bench.clock.change(SYNC)) == ["update 1 x1 -> v2"]


def test_after_a_change_every_worker_continues_from_the_newest_version() -> None:
    """Asynchronous: 3 updates, of which worker 1 made one; then step 3 is the next for both."""
    bench = Bench(ASGD(), 2)
    for worker, step in ((0, 0), (0, 1), (1, 0)):
        bench.push(worker, step)
    bench.expected = []
    assert bench.clock.change(SYNC) == []
    bench.expected = [0, 1]
    assert [bench.clock.clock(rank) for rank in (0, 1)] == [3, 3]
    assert bench.push(0, 2, base=3) == ["ack 0@2 DUPLICATE v3"]
    bench.push(0, 3, base=3)
    assert bench.push(1, 3, base=3)[-1] == "update 3 x0.5 -> v4"


def test_a_change_updates_with_a_collection_that_is_not_full() -> None:
    bench = Bench(Pairs(), 2)
    bench.push(0, 0)
    bench.expected = []
    assert words(bench.clock.change(ASGD())) == ["update 0 x1 -> v1"]


def test_a_change_to_what_the_job_is_too_small_for_changes_nothing() -> None:
    bench = Bench(SYNC, 2)
    with pytest.raises(ConfigError, match="must be less than the 2 workers"):
        bench.clock.change(SSGD(backup=2))
    assert bench.clock.rule == SYNC


# ----- last models of workers that have ended


def last(bench: Bench, worker: int, step: int) -> list[str]:
    return bench.push(worker, step, role=Role.LAST_MODEL)


def test_the_last_models_make_one_average_without_those_before() -> None:
    bench = Bench(ADPSGD(), 3)
    bench.push(0, 0)
    bench.push(0, 1)
    assert last(bench, 0, 2)[:2] == ["update 0 x0.5 -> v1", "set 0@2 x1 in 0"]
    bench.leave(0)
    assert bench.push(1, 0) == ["ack 1@0 ACCEPTED v1"]  # It is left out.
    assert bench.push(1, 0) == ["ack 1@0 DUPLICATE v1"]
    assert last(bench, 2, 0) == ["add 2@0 x1 in 0", "ack 2@0 ACCEPTED v1"]
    assert last(bench, 1, 1)[:2] == ["add 1@1 x1 in 0", "update 0 x0.333333 -> v2"]
    assert bench.leave(1) == []
    assert bench.leave(2) == []


def test_a_worker_that_continues_does_not_wait_for_those_that_have_ended() -> None:
    bench = Bench(ADPSGD(), 2)
    last(bench, 0, 0)
    bench.leave(0)
    bench.push(1, 0)
    assert bench.push(1, 1) == [
        "update 0 x1 -> v1",
        "set 1@1 x1 in 0",
        "update 0 x1 -> v2",
        "ack 1@1 ACCEPTED v2",
    ]
    assert last(bench, 1, 2)[1] == "update 0 x1 -> v3"


def test_last_models_do_not_wait_for_a_worker_that_is_lost() -> None:
    bench = Bench(ADPSGD(), 3)
    last(bench, 0, 0)
    last(bench, 1, 0)
    assert bench.leave(2) == ["update 0 x0.5 -> v1"]
