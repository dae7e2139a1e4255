"""The numbers of `psworker simulate`; tests/unit/pssim/timing has the scan itself."""

from typing import Any

import pytest

from pscore.errors import ConfigError
from psworker.commands.simulate import lines_of, numbers_of, workers_of


def test_numbers_are_read_from_a_list() -> None:
    assert numbers_of("1,0.5", "--gbit") == [1.0, 0.5]
    assert workers_of("64,1024") == [64, 1024]


@pytest.mark.parametrize("text", ["", "0", "inf", "nan", "1,x", "-1"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="numbers above 0"):
        numbers_of(text, "--gbit")


@pytest.mark.parametrize("text", ["2.5", "0.5", "2000000", "inf"])
def test_a_number_of_workers_is_whole_and_bounded(text: str) -> None:
    with pytest.raises(ConfigError, match="--workers is"):
        workers_of(text)


def point(workers: int, **changes: Any) -> dict[str, Any]:
    point = {
        "workers": workers, "gbit": 10.0, "mode": "local(steps=8)", "step_ms": 1042.28,
        "simulated_ms": None, "limit": "computing", "shards": 125, "all_reduce_ms": 9123.4,
        "all_reduce_wins": False, "distance": 250.0,
        "beyond_measured": [f"{workers // 4}x more workers than any run"],
    }  # fmt: skip
    return point | changes


def test_points_have_three_figures_and_say_each_how_far_they_lie_from_any_run() -> None:
    lines = lines_of([point(1000), point(4, distance=1.0, beyond_measured=[])])
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == [
        "1000", "10", "local(steps=8)", "1,040", "9,120", "125", "250x", "computing",
    ]  # fmt: skip
    assert "x" not in lines[2].replace("local(steps=8)", "")
    assert lines[-1].endswith("the farthest: 250x more workers than any run")
    assert len(lines_of([point(4, distance=1.0, beyond_measured=[])])) == 2


def test_a_simulation_with_few_slices_is_said_to_take_longer() -> None:
    """With one slice of a shard 1,024 workers took 69,800 ms, in closed form 48,600."""
    coarse = point(1024, simulated_ms=69_800.0, simulated_slices_per_shard=1)
    fine = point(64, simulated_ms=1100.0, simulated_slices_per_shard=8)
    assert any("longer than in a job" in line for line in lines_of([coarse, fine]))
    assert not any("longer than in a job" in line for line in lines_of([fine]))


def test_a_point_shows_whether_all_reduce_wins_and_the_loss_by_failures() -> None:
    lines = lines_of([point(8, all_reduce_wins=True, lost_share=0.01942), point(8, lost_share=0.0)])
    assert ["9,120*" in line for line in lines[1:3]] == [True, False]
    assert [line.split()[-1] for line in lines[:3]] == ["lost", "1.94%", "0.00%"]
    assert any(line.startswith("* all-reduce") for line in lines)
