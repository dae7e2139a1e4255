"""Steps that a script begins and does not end, by its own calls alone."""

import pytest

from psworker.connection.accounts.left_out import LeftOut


def play(calls: str) -> LeftOut:
    """Returns the count after `z` for zero_grad(), `s` for step(), `g` for a step given up."""
    count = LeftOut()
    methods = {"z": count.zeroed, "s": count.ended, "g": count.given_up}
    for call in calls:
        methods[call]()
    return count


@pytest.mark.parametrize("calls", ["", "zszszs", "szszszsz", "zzszzszzs", "ssss", "zzzszszs"])
def test_a_script_that_does_the_same_at_each_step_leaves_out_none(calls: str) -> None:
    assert play(calls).report == (calls.count("s"), 0, 0)


@pytest.mark.parametrize(
    ("calls", "report"),
    [
        ("zszszzszs", (4, 1, 2)),
        ("zszszzszzzs", (4, 3, 3)),
        ("zszzszszs", (4, 1, 2)),  # Known when the next step takes one call only.
        ("szszzs", (3, 1, 2)),
    ],
)
def test_a_step_that_is_begun_twice_is_counted(calls: str, report: tuple[int, int, int]) -> None:
    assert play(calls).report == report


@pytest.mark.parametrize("calls", ["zgzszs", "zszgzgzszs", "zszszggzs", "zzszzgzgzzs", "ggzszs"])
def test_a_step_that_is_given_up_is_not_one_that_was_left_out(calls: str) -> None:
    assert play(calls).report == (len(calls.replace("z", "")), 0, 0)
