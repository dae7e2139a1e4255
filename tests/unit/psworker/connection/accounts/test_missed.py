"""Reports of a worker about steps that did not count whole."""

import logging

import pytest

from pscore.rules import ASGD, SSGD, LocalSGD
from psworker.connection.accounts.missed import RECENT_MAX, Missed


def send_all(missed: Missed, step: int, num_slices: int = 3) -> None:
    for index in range(num_slices):
        missed.sent(index, step)


def test_a_step_that_is_late_in_several_slices_is_one(caplog: pytest.LogCaptureFixture) -> None:
    missed = Missed(3, of=" of the row tables")
    send_all(missed, 4)
    with caplog.at_level(logging.WARNING, "paceline"):
        missed.late(2, 1, SSGD())
        missed.late(2, 0, SSGD())
    assert (missed.num_steps, list(missed.recent)) == (1, [4])
    (text,) = caplog.messages
    assert text.startswith(
        "worker 2: step 4 of the row tables does not count in slice 1, and perhaps in others"
    )


def test_a_worker_that_is_always_late_reports_it_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missed = Missed(1)
    with caplog.at_level(logging.WARNING, "paceline"):
        for step in range(100):
            missed.sent(0, step)
            missed.late(0, 0, SSGD())
            missed.end_step()
    assert missed.num_steps == 100
    assert len(caplog.messages) == 7
    assert repr(missed).startswith("Missed(num_steps=100, recent=[36, ")
    assert list(missed.recent) == list(range(100 - RECENT_MAX, 100))


@pytest.mark.parametrize(
    ("pushed", "unanswered", "text"),
    [
        ([], [], "step 7 does not count"),
        ([0, 1, 2], [], "step 5 counts"),
        ([0, 1], [], "step 5 counts in 2 of 3 slices"),
        ([0, 1, 2], [1, 2], "step 5 counts in 1 of 3 slices, and perhaps in 2 more"),
        ([2], [0, 2], "step 5 counts in 0 of 3 slices, and perhaps in 1 more"),
    ],
)
def test_of_a_step_that_is_given_up_counts_what_was_acknowledged(
    pushed: list[int], unanswered: list[int], text: str
) -> None:
    missed = Missed(3)
    send_all(missed, 4)
    missed.end_step()
    for index in pushed:
        missed.sent(index, 5)
    assert missed.give_up(7, unanswered, SSGD()) == text
    assert missed.num_steps == (text != "step 5 counts")
    assert missed.give_up(8, [], SSGD()) == "step 8 does not count"


def test_the_push_of_a_round_is_not_called_a_step() -> None:
    missed = Missed(3)
    send_all(missed, 4)
    text = missed.give_up(4, [1, 2], LocalSGD(steps=5))
    assert text == "push 4 counts in 1 of 3 slices, and perhaps in 2 more"


def test_between_two_steps_nothing_is_given_up() -> None:
    missed = Missed(3)
    send_all(missed, 4)
    missed.end_step()
    assert missed.give_up(None, [], SSGD()) == "no step was under way"
    assert missed.num_steps == 0


def test_the_steps_that_a_shard_has_lost_are_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    """Step 100 was given up before, and slice 2 is on another shard, which has all."""
    missed = Missed(3)
    send_all(missed, 100)
    missed.give_up(None, [0, 1], SSGD())
    missed.doubt(0)
    with caplog.at_level(logging.WARNING, "paceline"):
        for index, counted in [(0, 0), (1, 20), (2, 101), (0, 20)]:
            missed.compare(index, counted)
        missed.report_lost(SSGD())
        missed.report_lost(SSGD())
    (text,) = caplog.messages
    assert text.startswith("worker 0: 100 steps up to 99 do not count in every slice")
    assert missed.num_steps == 101


@pytest.mark.parametrize("counted", [-1, 6, 9])
def test_a_step_that_the_shards_have_or_do_not_know_is_not_lost(counted: int) -> None:
    """-1: this shard does not say it."""
    missed = Missed(3)
    send_all(missed, 5)
    missed.doubt(0)
    missed.compare(0, counted)
    missed.doubt(3)
    missed.compare(1, 2)
    missed.report_lost(SSGD())
    assert missed.num_steps == 0


def test_steps_that_were_left_out_are_not_lost() -> None:
    """The worker has joined again behind step 5, and its clock was then that of the others."""
    missed = Missed(1)
    for step in (4, 5, 20, 21):
        missed.sent(0, step)
    for counted in (6, 6):
        missed.doubt(0)
        missed.compare(0, counted)
    missed.report_lost(ASGD())
    assert list(missed.recent) == [20, 21]


def test_slices_that_were_not_pushed_in_a_step_that_was_given_up_are_lost() -> None:
    missed = Missed(3)
    send_all(missed, 5)
    missed.end_step()
    missed.sent(1, 6)
    missed.give_up_rest([6, 7, 6])
    missed.doubt(0)
    for index in range(3):
        missed.compare(index, 7 if index == 1 else 6)
    missed.report_lost(ASGD())
    assert list(missed.recent) == [6]
