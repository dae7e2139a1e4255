"""Steps that a script begins and does not end, by its own calls alone."""

import pytest

from psworker.leftout import LeftOut


def play(calls: str) -> LeftOut:
    """Returns the count after `z` for zero_grad() and `s` for step()."""
    count = LeftOut()
    for call in calls:
        count.zeroed() if call == "z" else count.ended()
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
