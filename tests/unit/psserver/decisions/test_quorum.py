"""Rounds with a quorum and a window: every decision of a slice, with the time as an argument."""

import numpy as np

from pscore.rules import DiLoCo, LocalSGD
from pscore.types import Pull, Push
from psserver.decisions.window import FIRST_S, Window
from tests.unit.psserver.bench import Bench, words

FIXED = LocalSGD(quorum=2, window=1.0)


class Timed(Bench):
    """A slice whose pushes come at a time."""

    def at(self, now_s: float, worker: int, step: int, samples: float = 1.0) -> list[str]:
        push = Push(
            worker=worker,
            step=step,
            base_version=min(step, self.clock.version),
            samples=samples,
            hyper=np.array([[0.5]]),
        )
        done = words(self.clock.push(push, f"{worker}@{step}", now_s))
        self.clock.check_invariants()
        return done

    def tick(self, now_s: float) -> list[str]:
        done = words(self.clock.tick(now_s))
        self.clock.check_invariants()
        return done


def test_a_round_closes_with_its_quorum_when_the_window_is_over() -> None:
    bench = Timed(FIXED, 3)
    assert bench.at(0.0, 2, 0) == ["set 2@0 x1 in 0", "ack 2@0 ACCEPTED v0"]
    assert bench.tick(50.0) == []  # One is not a quorum.
    assert bench.at(50.0, 0, 0) == ["add 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    assert bench.tick(50.9) == []
    assert bench.tick(51.0) == ["update 0 x0.5 -> v1"]


def test_a_round_with_everybody_in_does_not_wait_for_its_window() -> None:
    bench = Timed(FIXED, 3)
    bench.at(0.0, 0, 0)
    bench.at(0.0, 1, 0)
    assert bench.at(0.1, 2, 0)[-1] == "update 0 x0.333333 -> v1"


def test_a_late_move_enters_the_open_round_with_its_weight() -> None:
    """2 of 3 with weights 1 and 3; then the late one with weight 4 joins round 1."""
    bench = Timed(LocalSGD(quorum=2, window=0.0), 3)
    bench.at(0.0, 0, 0, samples=1.0)
    assert bench.at(0.0, 1, 0, samples=3.0) == [
        "add 1@0 x3 in 0",
        "ack 1@0 ACCEPTED v0",
        "update 0 x0.25 -> v1",
    ]
    assert bench.at(5.0, 2, 0, samples=4.0) == ["set 2@0 x4 in 1", "ack 2@0 ACCEPTED v1"]
    assert bench.at(5.0, 2, 0, samples=4.0) == ["ack 2@0 DUPLICATE v1"]
    assert bench.at(6.0, 0, 1, samples=1.0)[-1] == "update 1 x0.2 -> v2"
    assert bench.clock.window.num_late == 1


def test_a_worker_may_be_in_twice_and_counts_as_one() -> None:
    bench = Timed(LocalSGD(quorum=2, window=0.0), 3)
    bench.at(0.0, 0, 0)
    bench.at(0.0, 1, 0)
    bench.at(1.0, 2, 0)
    assert bench.at(2.0, 2, 1) == ["add 2@1 x1 in 1", "ack 2@1 ACCEPTED v1"]
    assert bench.at(3.0, 1, 1)[-1] == "update 1 x0.333333 -> v2"


def test_a_late_move_that_closes_a_round_takes_the_moves_that_waited_for_it() -> None:
    """Two workers are left, so that moves are added in the order of ranks: 2's waits for 1's."""
    bench = Timed(LocalSGD(quorum=2, window=0.0), 3)
    bench.at(0.0, 0, 0)
    bench.at(0.0, 1, 0)
    bench.at(1.0, 2, 0)
    assert bench.at(1.0, 0, 1)[-1] == "update 1 x0.5 -> v2"
    bench.expected.remove(0)
    bench.clock.recheck()
    bench.at(2.0, 2, 1)
    assert bench.at(2.0, 2, 2) == ["hold 2@2", "ack 2@2 ACCEPTED v2"]
    assert bench.at(3.0, 1, 1) == [
        "add 1@1 x1 in 2",
        "add 2@2 x1 in 2",
        "ack 1@1 ACCEPTED v2",
        "update 2 x0.333333 -> v3",
    ]


def test_the_newest_rounds_hyper_parameters_are_used() -> None:
    bench = Timed(LocalSGD(quorum=1, window=0.0), 2)
    bench.at(0.0, 1, 0)
    old = Push(worker=0, step=0, base_version=0, hyper=np.array([[9.0]]))
    clock = bench.clock
    clock.push(old, "old", 1.0)  # Alone in round 1 with K = 1: it closes with its own.
    bench.expected.append(2)
    assert clock.version == 2


def test_a_quorum_of_all_decides_as_without() -> None:
    plain, quorum = Timed(LocalSGD(), 3), Timed(LocalSGD(quorum=3, window=0.0), 3)
    for step, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)]):
        for worker in order:
            assert plain.at(float(step), worker, step) == quorum.at(float(step), worker, step)


def test_one_worker_decides_as_without() -> None:
    plain, quorum = Timed(DiLoCo(), 1), Timed(DiLoCo(quorum=1), 1)
    for step in range(3):
        assert plain.at(0.0, 0, step, 3.0) == quorum.at(0.0, 0, step, 3.0)


def test_workers_that_leave_make_the_quorum_smaller() -> None:
    bench = Timed(LocalSGD(quorum=3, window=100.0), 4)
    bench.at(0.0, 0, 0)
    bench.leave(2)
    assert bench.leave(3) == []
    assert bench.at(1.0, 1, 0)[-1] == "update 0 x0.5 -> v1"


def test_the_last_late_move_of_a_job_closes_its_round() -> None:
    bench = Timed(LocalSGD(quorum=1, window=0.0), 2)
    bench.at(0.0, 0, 0)
    bench.leave(0)
    assert bench.at(9.0, 1, 0) == ["set 1@0 x1 in 1", "ack 1@0 ACCEPTED v1", "update 1 x1 -> v2"]


def test_after_a_restart_the_window_begins_with_the_first_tick() -> None:
    bench, new = Timed(FIXED, 3), Timed(FIXED, 3, loaded=False)
    bench.at(1000.0, 0, 0)
    bench.at(1000.0, 1, 0)
    resumed = new.clock.resume(0, bench.clock.counted, bench.clock.open_steps)
    assert resumed == []
    assert new.tick(5.0) == []
    assert new.tick(5.9) == []
    assert new.tick(6.0) == ["update 0 x0.5 -> v1"]


# ----- the window's length, by hand


def closed(window: Window, step: int, at_s: float, *lates: float) -> None:
    """Makes one round: its quorum at `at_s`, then others; the last one closes it."""
    window.tick(at_s)
    window.is_over(step)
    for late_s in lates:
        window.tick(at_s + late_s)
        window.arrived(0, step, step)
    window.close(step)


def test_an_adaptive_window_follows_the_spread_of_arrivals() -> None:
    """Closes at 0, 40 and 80: rounds of 40 s. Spreads 2 (rises at once), 2 - 2 / 4 = 1.5."""
    window = Window(-1.0)
    assert window.length_s == FIRST_S
    closed(window, 0, 0.0)
    assert window.length_s == FIRST_S
    closed(window, 1, 38.0, 1.0, 2.0)
    assert window.length_s == 3.0
    closed(window, 2, 80.0)
    assert window.length_s == 1.5 * 1.5


def test_a_window_is_at_most_a_quarter_of_a_round() -> None:
    window = Window(-1.0)
    closed(window, 0, 0.0)
    closed(window, 1, 32.0, 8.0)  # 1.5 * 8 = 12 would be more than 40 / 4.
    assert window.length_s == 10.0


def test_a_worker_that_is_very_late_is_not_waited_for() -> None:
    window = Window(-1.0)
    closed(window, 0, 0.0)
    closed(window, 1, 40.0)
    window.tick(60.0)
    window.arrived(0, 1, 2)  # 20 s behind the quorum of its round: half a round.
    closed(window, 2, 80.0)
    assert window.length_s == 0.0
    assert window.num_late == 1
    window.tick(84.0)
    window.arrived(0, 2, 3)  # 4 s: late, and soon enough for the next window.
    closed(window, 3, 120.0)
    assert window.length_s == 6.0


def test_a_fixed_window_does_not_change() -> None:
    window = Window(7.0)
    closed(window, 0, 0.0, 1.0)
    closed(window, 1, 40.0, 6.0)
    assert window.length_s == 7.0
    window.tick(80.0)
    assert not window.is_over(2)
    window.tick(85.0)
    assert window.left_s(2) == 2.0


# ----- rounds that have closed in other slices


def test_a_round_that_others_have_closed_waits_a_window_for_moves_and_is_skipped() -> None:
    """A worker that joins has seen round 2 elsewhere; worker 0 may have left, or be idle."""
    bench = Timed(FIXED, 3)
    bench.tick(10.0)
    bench.clock.welcome(2)
    bench.pull(2, 0, 0)
    assert bench.begin(2, 2) == []  # Its pull waits for version 2.
    assert bench.tick(10.9) == []
    assert bench.tick(11.0) == ["skip v0 -> v2", "answer begin2 v2"]
    assert bench.at(11.5, 0, 0) == ["set 0@0 x1 in 2", "ack 0@0 ACCEPTED v2"]  # It is late.


def test_a_round_that_others_have_closed_closes_with_the_moves_that_are_in() -> None:
    bench = Timed(FIXED, 3)
    bench.at(10.0, 0, 0)
    bench.clock.welcome(2)
    bench.pull(2, 0, 0)
    bench.begin(2, 1)
    assert bench.tick(10.9) == []
    assert bench.tick(11.0) == ["update 0 x1 -> v1", "answer begin2 v1"]


def test_without_a_window_a_round_waits_for_those_who_have_not_pushed() -> None:
    bench = Timed(LocalSGD(), 3)
    bench.at(10.0, 0, 0)
    bench.clock.welcome(2)
    bench.pull(2, 0, 0)
    bench.begin(2, 1)
    assert bench.tick(1000.0) == []
    assert bench.at(1000.0, 1, 0)[-2:] == ["update 0 x0.5 -> v1", "answer begin2 v1"]


# ----- the answer to a late move


def late_of_two_rounds(fragments: int = 1) -> Timed:
    """Rounds of 10 s with a quorum of 2; worker 2's move of round 0 comes 4 s into round 2."""
    bench = Timed(LocalSGD(quorum=2, window=0.0, fragments=fragments), 3)
    for step, now_s in ((0, 10.0), (1, 20.0)):
        for worker in (0, 1):
            bench.at(now_s, worker, step)
    assert bench.at(24.0, 2, 0)[-1] == "ack 2@0 ACCEPTED v2"
    return bench


def test_a_late_worker_gets_the_weights_that_have_its_move() -> None:
    bench = late_of_two_rounds()
    assert bench.pull(2, 1, 1) == []  # Version 2 is there, and does not have it.
    assert bench.pull(0, 2, 2) == ["answer pull0 v2"]
    assert bench.at(29.0, 0, 2)[-1] == "answer pull2 v3"


def test_a_pull_that_overtakes_its_workers_late_move_waits_for_it() -> None:
    """They come over different connections. Version 1 is there, and cannot have the move."""
    bench = Timed(LocalSGD(quorum=2, window=0.0), 3)
    for step, now_s in ((0, 10.0), (1, 20.0)):
        for worker in (0, 1):
            bench.at(now_s, worker, step)
    assert bench.pull(2, 1, 1) == []
    assert bench.tick(25.0) == []
    assert bench.at(26.0, 2, 0) == ["set 2@0 x1 in 2", "ack 2@0 ACCEPTED v2"]
    assert bench.at(29.0, 0, 2)[-2:] == ["update 2 x0.5 -> v3", "answer pull2 v3"]


def test_a_pull_that_overtakes_a_move_in_time_waits_for_it() -> None:
    """With fragments too, where a late worker waits for no round."""
    for fragments in (1, 2):
        bench = Timed(LocalSGD(quorum=1, window=0.0, fragments=fragments), 2)
        bench.at(10.0, 0, 0)
        assert bench.pull(1, 1, 1) == []
        late = bench.at(10.5, 1, 0)
        assert late[0] == "set 1@0 x1 in 1"
        assert bench.clock.version == 2  # Its move is a quorum.
        assert late[-1] == "answer pull1 v2"


def test_a_worker_that_has_left_rounds_out_waits_for_no_move_of_theirs() -> None:
    bench = late_of_two_rounds()
    bench.at(29.0, 0, 2)
    assert bench.at(29.5, 2, 3)[-1] == "ack 2@3 ACCEPTED v3"  # It has pushed neither 1 nor 2.
    assert bench.pull(2, 4, 3) == ["answer pull2 v3"]


def test_a_move_that_is_late_for_the_first_round_is_in_its_workers_next_weights() -> None:
    """No round has been measured: the pull waits for a second."""
    bench = Timed(LocalSGD(quorum=2, window=0.0), 3)
    for worker in (0, 1, 2):
        bench.at(10.0 + worker / 4, worker, 0)
    assert bench.pull(2, 1, 1) == []
    assert bench.tick(11.4) == []
    assert bench.tick(11.5) == ["answer pull2 v1"]


def test_a_late_worker_waits_no_longer_than_a_round_takes() -> None:
    """The others have ended, and stay for an evaluation: nobody closes the round."""
    bench = late_of_two_rounds()
    assert bench.pull(2, 1, 1) == []
    assert bench.tick(33.9) == []
    assert bench.tick(34.0) == ["answer pull2 v2"]


def test_a_late_worker_waits_for_no_round_of_a_fragment() -> None:
    """Meanwhile the others might wait for its move of another fragment."""
    bench = late_of_two_rounds(fragments=2)
    assert bench.pull(2, 1, 1) == ["answer pull2 v2"]


def test_a_look_does_not_wait_for_the_open_round() -> None:
    bench = late_of_two_rounds()
    look = Pull(worker=2, clock=1, min_version=1, is_look=True)
    assert words(bench.clock.pull(look, "look")) == ["answer look v2"]
    assert bench.begin(2, 2) == ["answer begin2 v2"]
