"""Stalls are reported after some seconds, and then less and less often."""

from psserver.decisions.stalls import Stalls


def test_a_wait_is_told_after_five_seconds_and_each_time_it_has_doubled() -> None:
    stalls = Stalls()
    told = [now_s for now_s in range(45) if stalls.look({("table", 0, 0, 7): "x"}, float(now_s))]
    assert told == [5, 10, 20, 40]


def test_a_step_forward_starts_over() -> None:
    stalls = Stalls()
    for now_s in range(60):
        assert stalls.look({("table", 0, 0, now_s // 4): "x"}, float(now_s)) == []


def test_workers_are_told_what_has_waited_longest_but_not_at_once() -> None:
    stalls = Stalls()
    stalls.look({("table", 0, 0, 7): "first"}, 0.0)
    assert stalls.told == ""
    stalls.look({("table", 0, 0, 7): "first", ("table", 1, 0, 7): "second"}, 3.0)
    assert stalls.told == "first"
    stalls.look({}, 4.0)
    assert stalls.told == ""
