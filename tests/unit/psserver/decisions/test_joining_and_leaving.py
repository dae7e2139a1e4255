"""The workers that a slice waits for: those that leave, are lost, return, or are the slowest."""

from pscore.rules import ASGD, SSD, SSGD
from pscore.types import Pull
from psserver.decisions.orders import Answer
from tests.unit.psserver.bench import Bench, Bounded

SYNC = SSGD()
OPEN = SSD(steps=3, warmup=0, local="sgd")  # A worker may be 3 steps beyond the newest update.


def test_a_worker_that_leaves_releases_the_step() -> None:
    bench = Bench(SYNC, 3)
    bench.push(0, 0)
    bench.push(2, 0)
    assert bench.leave(1) == ["add 2@0 x1 in 0", "update 0 x0.5 -> v1"]


def test_a_push_of_a_worker_that_left_still_counts() -> None:
    bench = Bench(SYNC, 2)
    bench.push(1, 0)
    assert bench.leave(1) == []
    assert bench.push(0, 0)[-1] == "update 0 x0.5 -> v1"
    assert bench.push(0, 1, base=1)[-1] == "update 1 x1 -> v2"


def test_a_departure_closes_every_step_that_waited_for_it() -> None:
    bench = Bench(OPEN, 2)
    for step in range(3):
        bench.push(0, step)
    bench.push(0, 3)
    bench.pull(0, 3, 3)
    assert bench.leave(1) == [
        "update 0 x1 -> v1",
        "update 1 x1 -> v2",
        "update 2 x1 -> v3",
        "set 0@3 x1 in 3",
        "ack 0@3 ACCEPTED v3",
        "update 3 x1 -> v4",
        "answer pull0 v4",
    ]


def test_the_slowest_worker_leaving_lets_others_read() -> None:
    bench = Bench(Bounded(), 2)
    bench.push(0, 0)
    bench.push(0, 1)
    bench.pull(0, 2, 0)
    assert bench.leave(1) == ["answer pull0 v2"]


def test_nobody_waits_for_a_worker_that_comes_back_until_it_has_pulled() -> None:
    bench = Bench(SYNC, 2)
    bench.leave(1)
    assert bench.push(0, 0)[-1] == "update 0 x1 -> v1"
    assert bench.come_back(1) == []
    assert bench.push(0, 1, base=1)[-1] == "update 1 x1 -> v2"
    assert bench.pull(1, 0, 0) == ["answer pull1 v2"]
    assert bench.push(0, 2, base=2) == ["set 0@2 x1 in 2", "ack 0@2 ACCEPTED v2"]
    assert bench.push(1, 2, base=2)[-1] == "update 2 x0.5 -> v3"


def test_a_worker_that_comes_back_continues_counting_where_the_slowest_is() -> None:
    bench = Bench(Bounded(), 3)
    bench.push(1, 0)
    bench.leave(1)
    for step in range(2):
        bench.push(0, step)
    for step in range(4):
        bench.push(2, step)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    assert bench.clock.clock(1) == 2
    assert "update" in bench.push(1, 2)[1]


def test_parked_pushes_of_a_worker_are_gone_when_it_returns() -> None:
    """Else it would be counted for the step that the worker pushes again."""
    bench = Bench(SYNC, 2)
    assert bench.push(0, 1) == []
    bench.clock.welcome(0)
    assert bench.push(1, 0) == ["set 1@0 x1 in 0", "ack 1@0 ACCEPTED v0", "update 0 x1 -> v1"]
    assert bench.clock.clock(0) == 0
    assert bench.pull(0, 0, 0) == ["answer pull0 v1"]
    assert bench.push(0, 1, base=1, mark="new") == [
        "set 0@1new x1 in 1",
        "ack 0@1new ACCEPTED v1",
    ]


def test_a_worker_that_came_back_is_waited_for_from_its_first_pull_on() -> None:
    bench = Bench(SYNC, 2)
    bench.clock.welcome(1)
    assert bench.push(0, 0)[-1] == "update 0 x1 -> v1"
    assert bench.pull(1, 0, 0) == ["answer pull1 v1"]
    assert bench.push(0, 1, base=1) == ["set 0@1 x1 in 1", "ack 0@1 ACCEPTED v1"]
    assert bench.push(1, 1, base=1)[-1] == "update 1 x0.5 -> v2"


def test_an_asynchronous_worker_that_came_back_continues_where_the_slowest_is() -> None:
    bench = Bench(Bounded(), 2)
    bench.clock.welcome(1)
    for step in range(3):
        bench.push(0, step)
    assert bench.clock.clock_min() == 3
    bench.pull(1, 0, 0)
    assert bench.clock.clock(1) == 3
    assert bench.push(1, 3)[-1] == "ack 1@3 ACCEPTED v4"


def test_an_asynchronous_worker_begins_with_the_step_of_another_slice() -> None:
    """It would be ahead there for ever, and wait for others that have come to the same end."""
    bench = Bench(Bounded(), 2)
    bench.push(1, 0)
    bench.clock.welcome(1)
    bench.pull(1, 0, 0)
    assert bench.begin(1, 3, 0) == ["answer begin1 v1"]
    assert [bench.clock.clock(rank) for rank in (0, 1)] == [0, 3]
    assert bench.push(1, 3)[-1] == "ack 1@3 ACCEPTED v2"
    assert bench.pull(1, 4, 0) == []


def test_nobody_is_welcomed_before_there_are_weights() -> None:
    """At the start every worker is expected, though one has joined twice."""
    bench = Bench(SYNC, 2, loaded=False)
    bench.clock.welcome(1)
    bench.load()
    assert bench.push(0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]


def test_a_step_without_any_push_is_not_closed() -> None:
    bench = Bench(SYNC, 2)
    assert bench.leave(0) == []
    assert bench.leave(1) == []
    assert bench.clock.version == 0


def test_the_missing_workers_of_a_step() -> None:
    bench = Bench(SYNC, 3)
    assert bench.clock.missing() == (0, [0, 1, 2])
    bench.push(1, 0)
    assert bench.clock.missing() == (0, [0, 2])
    bench.leave(0)
    assert bench.clock.missing() == (0, [2])


def test_the_slowest_worker_of_an_asynchronous_mode() -> None:
    bench = Bench(ASGD(), 3)
    bench.push(0, 0)
    bench.push(2, 0)
    assert bench.clock.missing() == (0, [1])
    assert bench.clock.clock_min() == 0
    bench.push(1, 0)
    assert bench.clock.missing() == (1, [0, 1, 2])
    bench.push(2, 1)
    for rank in range(3):
        bench.leave(rank)
    assert bench.clock.clock_min() == 2, "nobody is behind another one"


def test_clocks_count_without_a_gap() -> None:
    bench = Bench(ASGD(), 1)
    bench.push(0, 1)
    assert bench.clock.clock(0) == 0
    bench.push(0, 0)
    assert bench.clock.clock(0) == 2
    assert bench.clock.clock(9) == 0


def test_a_worker_that_had_missed_steps_and_comes_back_does_not_push_what_is_in() -> None:
    """It had come back before, at step 2; its push of that step is still open."""
    bench = Bench(SYNC, 2)
    bench.leave(1)
    for step in range(2):
        bench.push(0, step, base=step)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    bench.push(1, 2, base=2)
    bench.leave(1)
    bench.come_back(1)
    (answer,) = bench.clock.pull(Pull(worker=1, clock=0, min_version=0), "again")
    assert isinstance(answer, Answer)
    assert (answer.version, answer.clock) == (2, 3)


def test_no_step_waits_for_a_worker_before_the_one_that_it_begins_with() -> None:
    """Step 0 has closed in another slice, so the worker that came anew pushes step 1 in all."""
    bench = Bench(SYNC, 2)
    bench.come_back(1)
    assert bench.pull(1, 0, 0) == ["answer pull1 v0"]
    assert bench.push(0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    assert bench.clock.missing() == (0, [1])
    assert bench.begin(1, 1) == ["update 0 x1 -> v1", "answer begin1 v1"]
    assert bench.push(0, 1, base=1) == ["set 0@1 x1 in 1", "ack 0@1 ACCEPTED v1"]
    assert bench.push(1, 1, base=1)[-1] == "update 1 x0.5 -> v2"


def test_a_worker_that_begins_later_leaves_the_steps_in_between_to_the_others() -> None:
    bench = Bench(OPEN, 2)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    assert bench.begin(1, 2) == []
    assert [bench.push(0, step)[-1] for step in (0, 1)] == [
        "update 0 x1 -> v1",
        "answer begin1 v2",
    ]
    assert bench.push(0, 2) == ["set 0@2 x1 in 2", "ack 0@2 ACCEPTED v2"]
    assert bench.clock.missing() == (2, [1])


def test_steps_that_nobody_pushes_any_more_are_left_out() -> None:
    """Two workers begin, at other steps; the other slices are at the earlier of the two."""
    bench = Bench(SYNC, 2)
    for worker in (0, 1):
        bench.come_back(worker)
        bench.pull(worker, 0, 0)
    assert bench.begin(0, 5) == []
    assert bench.begin(1, 3) == ["skip v0 -> v3", "answer begin1 v3"]
    assert bench.push(1, 3, base=3) == [
        "set 1@3 x1 in 3",
        "ack 1@3 ACCEPTED v3",
        "update 3 x1 -> v4",
    ]
    assert bench.clock.missing() == (4, [1])
    assert bench.push(1, 4, base=4)[-1] == "answer begin0 v5"
    assert bench.clock.missing() == (5, [0, 1])


def test_a_worker_that_begins_and_dies_is_asked_again_where_to_begin() -> None:
    bench = Bench(SYNC, 2)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    bench.begin(1, 4)
    bench.leave(1)
    bench.push(0, 0)
    bench.come_back(1)
    (answer,) = bench.clock.pull(Pull(worker=1, clock=0, min_version=0), "again")
    assert isinstance(answer, Answer)
    assert (answer.version, answer.clock) == (1, 1)
    assert bench.clock.missing() == (1, [0, 1])


def test_a_repeated_first_step_of_a_worker_changes_nothing() -> None:
    bench = Bench(SYNC, 2)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    bench.push(0, 0)
    bench.begin(1, 1)
    bench.push(0, 1, base=1)
    bench.push(1, 1, base=1)
    assert bench.begin(1, 1) == ["answer begin1 v2"]
    assert bench.clock.missing() == (2, [0, 1])


def test_an_elastic_job_leaves_out_no_step_while_it_has_too_few_workers() -> None:
    bench = Bench(SYNC, 2, wanted=2)
    bench.come_back(1)
    bench.pull(1, 0, 0)
    bench.leave(0)
    assert bench.begin(1, 2) == []
    assert bench.come_back(0) == ["skip v0 -> v2", "answer begin1 v2"]
