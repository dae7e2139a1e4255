"""The line about waits, in constructed jobs."""

import pytest

from pscore.timing.waiting import STEPS_MIN, PaceSums, advice_line


def pace(
    step_s: float, wait_s: float, requests_s: float, *, rank: int = 0, num: int = 100
) -> PaceSums:
    """Returns the sums of a worker that computes, waits and exchanges for so long in each step."""
    return PaceSums(
        rank=rank,
        num_steps=num,
        steps_s=num * (step_s + wait_s),
        waits_s=num * wait_s,
        requests_s=num * requests_s,
        step_s=step_s,
    )


def test_a_delay_hides_transfers_that_are_as_long_as_computing() -> None:
    line = advice_line("ssgd(backup=0)", [pace(0.36, 0.44, 0.65), pace(0.36, 0.44, 0.6, rank=1)])
    assert line.startswith("workers waited 55% of the time for pulls; `od` would take about 650 ms")
    assert "not 800 ms" in line


def test_rounds_are_named_where_a_delay_gains_nothing() -> None:
    line = advice_line("ssgd", [pace(0.1, 0.9, 0.95)])
    assert "`od`" not in line
    assert "`local(steps=8)` would take about 219 ms, not 1,000 ms" in line


def test_a_slow_worker_is_named_and_not_the_network() -> None:
    paces = [pace(0.1, 0.2, 0.2), pace(0.1, 0.2, 0.2, rank=1), pace(0.3, 0.0, 0.1, rank=2)]
    line = advice_line("ssgd", paces)
    assert "most of it for worker 2, which computes for 300 ms a step, others for 100 ms" in line
    assert "pulls" not in line


@pytest.mark.parametrize("mode", ["ssd(steps=5)", "allreduce(average_every=9)"])
def test_other_modes_get_the_share_alone(mode: str) -> None:
    assert advice_line(mode, [pace(0.5, 0.5, 1.0)]) == "workers waited 50% of the time"


@pytest.mark.parametrize(
    "paces",
    [
        [],
        [pace(0.9, 0.1, 0.5)],  # It hardly waits.
        [pace(0.1, 0.9, 0.9, num=STEPS_MIN - 1)],  # Its means say nothing yet.
    ],
)
def test_nothing_is_said_without_a_reason(paces: list[PaceSums]) -> None:
    assert advice_line("ssgd", paces) == ""
