"""Parked pushes, whose gradients stay in the worker's memory: when they are added and counted."""

import itertools

import pytest

from pscore.rules import SSGD
from tests.unit.psserver.bench import Bench

SYNC = SSGD()


def test_a_parked_push_is_answered_when_it_is_added() -> None:
    bench = Bench(SYNC, 3)
    assert bench.push(2, 0, may_wait=True) == []
    assert bench.push(1, 0, may_wait=True) == []
    assert bench.clock.missing() == (0, [0])
    assert bench.clock.is_awaited
    assert bench.push(0, 0, may_wait=True) == [
        "set 0@0 x1 in 0",
        "ack 0@0 ACCEPTED v0",
        "add 1@0 x1 in 0",
        "ack 1@0 ACCEPTED v0",
        "add 2@0 x1 in 0",
        "ack 2@0 ACCEPTED v0",
        "update 0 x0.333333 -> v1",
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_parked_pushes_are_added_in_the_order_of_ranks_whichever_arrives_last(
    order: list[int],
) -> None:
    """All gradients of the step are then added up at once, from where they lie."""
    bench = Bench(SYNC, 3)
    for worker in order[:2]:
        assert bench.push(worker, 0, may_wait=True) == []
    assert bench.clock.missing() == (0, [order[2]])
    done = [f"ack {rank}@0 ACCEPTED v0" for rank in range(3)]
    assert bench.push(order[2], 0, may_wait=True) == [
        "set 0@0 x1 in 0",
        done[0],
        "add 1@0 x1 in 0",
        done[1],
        "add 2@0 x1 in 0",
        done[2],
        "update 0 x0.333333 -> v1",
    ]


def test_a_push_is_not_parked_while_another_is_held_for_it() -> None:
    """Worker 1 is on another host: its gradient takes memory of the shard meanwhile."""
    bench = Bench(SYNC, 3)
    assert bench.push(0, 0, may_wait=True) == []
    assert bench.push(1, 0) == [
        "hold 1@0",
        "ack 1@0 ACCEPTED v0",
        "set 0@0 x1 in 0",
        "add 1@0 x1 in 0",
        "ack 0@0 ACCEPTED v0",
    ]
    assert bench.push(2, 0, may_wait=True) == [
        "add 2@0 x1 in 0",
        "ack 2@0 ACCEPTED v0",
        "update 0 x0.333333 -> v1",
    ]


def test_parked_pushes_continue_without_a_lost_worker() -> None:
    bench = Bench(SYNC, 3)
    assert bench.push(0, 0, may_wait=True) == bench.push(2, 0, may_wait=True) == []
    assert bench.leave(1) == [
        "set 0@0 x1 in 0",
        "ack 0@0 ACCEPTED v0",
        "add 2@0 x1 in 0",
        "ack 2@0 ACCEPTED v0",
        "update 0 x0.5 -> v1",
    ]


def test_a_parked_push_is_added_when_the_lower_rank_is_lost() -> None:
    bench = Bench(SYNC, 2)
    assert bench.push(1, 0, may_wait=True) == []
    bench.push(1, 0, may_wait=True, mark="again")  # Sent once more: the second is answered.
    assert bench.leave(0) == [
        "set 1@0again x1 in 0",
        "ack 1@0again ACCEPTED v0",
        "update 0 x1 -> v1",
    ]


def test_nobody_waits_for_a_turn_where_the_order_is_that_of_arrival() -> None:
    bench = Bench(SSGD(backup=1), 3)
    assert bench.push(2, 0, may_wait=True) == ["set 2@0 x1 in 0", "ack 2@0 ACCEPTED v0"]


def test_a_push_sent_again_is_counted_once_whatever_has_changed_meanwhile() -> None:
    """A parked one has room now, and nobody has decided again since: the second takes its place."""
    bench = Bench(SYNC, 2)
    assert bench.push(1, 0, may_wait=True) == []
    bench.expected.remove(0)
    assert bench.push(1, 0, may_wait=True, mark="again") == [
        "set 1@0again x1 in 0",
        "ack 1@0again ACCEPTED v0",
        "update 0 x1 -> v1",
    ]
    assert not bench.clock.is_awaited
