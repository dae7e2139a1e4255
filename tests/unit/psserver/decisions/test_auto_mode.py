"""The choice of a job's mode, against the equations of a step, and its reports."""

import re
from collections.abc import Sequence

import pytest

from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.timing.auto import auto_candidates
from pscore.timing.deployment import TimedSlice
from psserver.decisions.auto_mode import ModeChoice, ModeReport
from psserver.decisions.worker_reports import ReportedPace

WORKERS, FIRST, SECOND = 4, 25, 50
NUMBER, NBYTES = 50, 100e6
SLICES = [TimedSlice(0, round(NBYTES / 4 / NUMBER)) for _ in range(NUMBER)]
COMPUTES_S = 0.3


def possible(*names: str) -> frozenset[str]:
    modes = [str(parse_mode(one.mode)) for one in auto_candidates(WORKERS)]
    return frozenset(mode for mode in modes if mode.startswith(names))


def report(step: int, step_s: float, modes: frozenset[str], **fields: object) -> ModeReport:
    """Returns the report of a worker with steps of one length, behind a first minute."""
    pace = ReportedPace(
        num_steps=step,
        steps_s=60.0 + step * step_s,
        waits_s=59.0 + step * (step_s - COMPUTES_S),
    )
    given = {"incarnation": 7, "pace": pace, "near": (False,), "overlaps": False, "possible": modes}
    return ModeReport(**(given | fields))  # type: ignore[arg-type]


def choose(
    step_s: float,
    modes: frozenset[str],
    risk: str = "none",
    *,
    hosts: Sequence[str] = ("a", "b", "c", "d"),
    near: bool = False,
) -> ModeChoice:
    choice = ModeChoice()
    for step in (FIRST, SECOND):
        for rank, host in enumerate(hosts):
            one = report(step, step_s, modes, host=host, near=(near,))
            choice.report(step, rank, one)
        choice.decide(step, range(len(hosts)), SLICES, 1, risk)
        assert bool(choice.text) == (step == SECOND), "the second report decides"
    return choice


def predicted_s(choice: ModeChoice) -> float:
    matched = re.search(r", about ([\d,]+) ms", choice.text)
    assert matched is not None, choice.text
    return float(matched[1].replace(",", "")) / 1e3


# One shard on a host of its own, four workers: each step it receives and sends 4 n bytes. Without
# overlap a step of ssgd takes c + 4 n / b and, behind the last slice, its way there and back.
RATE = 1e9  # b, bytes of payload per second.
LAST_S = WORKERS * NBYTES / NUMBER / RATE
TOOK_S = COMPUTES_S + WORKERS * NBYTES / RATE + LAST_S


def test_the_ring_takes_the_shards_link_out_of_the_way() -> None:
    choice = choose(TOOK_S, possible("allreduce", "od", "ssd"))
    assert choice.mode == "allreduce"
    ring_s = 2 * (WORKERS - 1) / WORKERS * NBYTES / RATE
    assert predicted_s(choice) == pytest.approx(COMPUTES_S + ring_s, rel=0.03)
    assert "ms a step in ssgd" in choice.text


def test_without_peers_the_same_updates_leave_only_the_present_mode() -> None:
    choice = choose(TOOK_S, possible("od", "ssd", "ssgd"))
    assert not choice.mode
    assert choice.text.startswith("auto keeps ssgd at step 50: ")


def test_a_risk_allows_what_lost_little_where_it_was_measured() -> None:
    """`ssd(steps=5)` pushes 4 n to the shard's link each step, and lost half a point."""
    choice = choose(TOOK_S, possible("od", "ssd"), "low")
    assert choice.mode.startswith("ssd(steps=")
    assert predicted_s(choice) == pytest.approx(WORKERS * NBYTES / RATE, rel=0.03)
    assert "points" in choice.text


def test_a_mode_of_another_rate_is_never_taken() -> None:
    names = {one.mode.partition("(")[0] for one in auto_candidates(8)}
    assert names == {"ssgd", "od", "ssd", "allreduce"}


def test_a_small_gain_changes_nothing() -> None:
    choice = choose(1.05 * COMPUTES_S, possible("allreduce", "od", "ssd"), "any")
    assert not choice.mode


def test_where_workers_share_memory_with_the_shard_no_link_is_to_blame() -> None:
    hosts = ("a",) * WORKERS
    choice = choose(TOOK_S, possible("allreduce"), hosts=hosts, near=True)
    assert not choice.mode


def test_a_worker_that_joined_in_between_defers_the_choice() -> None:
    choice = ModeChoice()
    for step, incarnation in ((25, 1), (50, 2), (75, 2)):
        for rank in range(WORKERS):
            fields = {"incarnation": incarnation} if rank == 2 else {}
            choice.report(step, rank, report(step, TOOK_S, possible("allreduce"), **fields))
        choice.decide(step, range(WORKERS), SLICES, 1, "none")
        assert bool(choice.mode) == (step == 75)


def after(choice: ModeChoice, lengths_s: Sequence[float]) -> list[str]:
    """Returns the mode after each of some windows of steps of other lengths."""
    modes, sum_s = [], SECOND * COMPUTES_S
    for number, step_s in enumerate(lengths_s, 1):
        step = SECOND + FIRST * number
        sum_s += FIRST * step_s
        for rank in range(WORKERS):
            one = report(step, sum_s / step, possible("allreduce"), host=str(rank))
            choice.report(step, rank, one)
        for _ in range(WORKERS):  # Each asks for the decision.
            choice.decide(step, range(WORKERS), SLICES, 1, "none")
        modes.append(choice.mode)
    return modes


def test_a_job_that_kept_its_mode_takes_another_when_two_windows_in_a_row_name_it() -> None:
    choice = choose(COMPUTES_S, possible("allreduce"))
    kept = choice.text
    assert after(choice, [COMPUTES_S, TOOK_S, TOOK_S]) == ["", "", "allreduce"]
    assert choice.text.startswith("auto takes allreduce at step 125: ")
    assert kept.startswith("auto keeps ssgd at step 50: ")


def test_one_slow_window_is_no_reason_to_change() -> None:
    choice = choose(COMPUTES_S, possible("allreduce"))
    assert after(choice, [TOOK_S, COMPUTES_S, TOOK_S, COMPUTES_S]) == [""] * 4
    assert choice.text.startswith("auto keeps ssgd at step 50: ")


def test_a_missing_report_defers_the_choice() -> None:
    choice = ModeChoice()
    for step in (25, 50):
        for rank in range(WORKERS - 1):
            choice.report(step, rank, report(step, TOOK_S, possible("allreduce")))
        choice.decide(step, range(WORKERS), SLICES, 1, "none")
    assert not choice.mode


def test_a_choice_stands() -> None:
    choice = ModeChoice("od", "auto takes od")
    for step in (25, 50):
        for rank in range(WORKERS):
            choice.report(step, rank, report(step, TOOK_S, possible("allreduce")))
        choice.decide(step, range(WORKERS), SLICES, 1, "none")
    assert (choice.mode, choice.text) == ("od", "auto takes od")


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="reports at step 0"):
        ModeChoice().report(0, 0, report(1, 1.0, frozenset()))
    with pytest.raises(ConfigError, match="risk is 'high'"):
        ModeChoice().decide(1, [0], SLICES, 1, "high")
