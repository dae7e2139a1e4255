"""A slice of an elastic job: nothing moves while workers are too few, and new ones take part."""

import pytest

from pscore.rules import ASGD, SSD, SSGD, Staleness
from tests.unit.psserver.bench import Bench, Bounded

SYNC = SSGD()
OPEN = SSD(steps=3, warmup=0, local="sgd")  # A worker may be 3 steps beyond the newest update.


def test_a_push_waits_while_there_are_too_few() -> None:
    bench = Bench(SYNC, 2, wanted=2)
    assert bench.leave(1) == []
    assert bench.clock.is_short
    assert bench.push(0, 0) == []
    assert bench.clock.is_awaited
    assert bench.clock.clock(0) == 0


def test_a_step_left_open_by_too_few_workers_waits_for_new_ones() -> None:
    bench = Bench(SYNC, 2, wanted=2)
    assert bench.push(0, 0)[-1] == "ack 0@0 ACCEPTED v0"
    assert bench.leave(1) == []
    assert bench.come_back(2) == ["update 0 x1 -> v1"]
    assert bench.pull(2, 0, 0) == ["answer pull2 v1"]
    bench.push(0, 1, base=1)
    assert bench.push(2, 1, base=1)[-1] == "update 1 x0.5 -> v2"


def test_waiting_pushes_are_counted_when_there_are_enough_workers_again() -> None:
    bench = Bench(OPEN, 2, wanted=2)
    bench.leave(1)
    for step in range(4):
        assert bench.push(0, step, samples=8.0) == []
    assert bench.come_back(1) == [
        "set 0@0 x8 in 0",
        "ack 0@0 ACCEPTED v0",
        "set 0@1 x8 in 1",
        "ack 0@1 ACCEPTED v0",
        "set 0@2 x8 in 2",
        "ack 0@2 ACCEPTED v0",
        "update 0 x0.125 -> v1",
        "update 1 x0.125 -> v2",
        "update 2 x0.125 -> v3",
        "set 0@3 x8 in 3",
        "ack 0@3 ACCEPTED v3",
        "update 3 x0.125 -> v4",
    ]


def test_an_asynchronous_push_waits_too() -> None:
    bench = Bench(ASGD(), 2, wanted=2)
    bench.leave(1)
    assert bench.push(0, 0) == []
    assert bench.pull(0, 1, 0) == []  # It waits for its own push.
    assert bench.come_back(1) == [
        "set 0@0 x1 in 0",
        "update 0 x1 -> v1",
        "ack 0@0 ACCEPTED v1",
        "answer pull0 v1",
    ]


def test_a_first_pull_is_answered_while_there_are_too_few() -> None:
    bench = Bench(SYNC, 2, wanted=3)
    assert bench.clock.is_short
    assert bench.pull(1, 0, 0) == ["answer pull1 v0"]


def test_when_all_have_gone_what_is_in_enters_the_weights() -> None:
    bench = Bench(SYNC, 2, wanted=2)
    bench.push(0, 0)
    assert bench.leave(1) == []
    bench.wanted = 0  # As `Membership.wanted` says of a job that is over.
    assert bench.leave(0) == ["update 0 x1 -> v1"]


def test_a_joining_worker_counts_from_the_slowest_ones_step() -> None:
    bench = Bench(Bounded(), 2, wanted=1)
    for step in range(3):
        bench.push(0, step)
        bench.push(1, step)
    bench.come_back(2)
    assert bench.clock.clock_min() == 3
    bench.pull(2, 0, 0)
    assert bench.clock.clock(2) == 3


def test_backup_workers_are_some_of_the_live_ones() -> None:
    """Of 3 workers the first 2 make an update, of 4 the first 3."""
    bench = Bench(SSGD(backup=1), 3, wanted=2)
    bench.push(0, 0)
    assert bench.push(2, 0)[-1] == "update 0 x0.5 -> v1"
    bench.expected = [0, 1, 2, 3]
    bench.push(0, 1, base=1)
    assert not bench.push(1, 1, base=1)[-1].startswith("update")
    assert bench.push(3, 1, base=1)[-1] == "update 1 x0.333333 -> v2"


def test_splits_are_counted_over_live_workers() -> None:
    """Of 2 workers each makes an update, of 4 two make one."""
    bench = Bench(Staleness(splits=2), 2, wanted=2)
    assert bench.push(0, 0)[1] == "update 0 x1 -> v1"
    bench.expected = [0, 1, 2, 3]
    assert "update" not in " ".join(bench.push(0, 1))
    assert "update 0 x0.5 -> v2" in bench.push(3, 0)


@pytest.mark.parametrize("steps", [(0, 1), (1, 0)])
def test_a_worker_alone_counts_by_its_samples_for_others_may_join(steps: tuple[int, int]) -> None:
    bench = Bench(OPEN, 1, wanted=1)
    actions = [action for step in steps for action in bench.push(0, step, samples=4.0)]
    assert "set 0@1 x4 in 1" in actions
    assert "update 1 x0.25 -> v2" in actions
