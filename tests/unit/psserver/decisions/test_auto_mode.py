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
        num_steps=step, steps_s=60.0 + step * step_s, waits_s=59.0 + step * (step_s - COMPUTES_S)
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


def test_a_slow_worker_explains_a_step_whose_exchange_takes_longer_than_assumed() -> None:
    """Through memory a step of 3.05 s has hardly any transfers; a slow worker computes for 3 s."""
    choice = ModeChoice()
    for step in (FIRST, SECOND):
        for rank in range(WORKERS):
            waits_s = 0.05 if rank == 2 else 3.05 - COMPUTES_S
            pace = ReportedPace(num_steps=step, steps_s=step * 3.05, waits_s=step * waits_s)
            one = report(step, 1.0, possible("ssgd"), pace=pace, near=(True,), host="a")
            choice.report(step, rank, one)
        choice.decide(step, range(WORKERS), SLICES, 1, "any")
    assert choice.mode == "ssgd(backup=1)"


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


def windows(
    choice: ModeChoice, lengths_s: Sequence[float], *, risk: str = "none", begin: int = 0
) -> list[str]:
    """Returns the mode after each report; from one to the next steps take so long."""
    modes, names = [], possible("allreduce", "od", "ssd", "ssgd")
    sum_s, step = 0.0, begin
    for step_s in lengths_s:
        step, sum_s = step + FIRST, sum_s + FIRST * step_s
        for rank in range(WORKERS):
            made = step - begin
            one = report(made, sum_s / made, names, host=str(rank))
            choice.report(step, rank, one)
        for _ in range(WORKERS):
            choice.decide(step, range(WORKERS), SLICES, 1, risk)
        modes.append(choice.mode)
    return modes


def test_a_job_that_has_changed_changes_again_when_its_link_becomes_slow() -> None:
    """With a slow link all four pushes of `ssd` pass the shard's; the ring's two do not."""
    choice = ModeChoice("ssd(steps=5)", "auto takes ssd(steps=5)")
    fast, slow_s = [COMPUTES_S] * 3, 4 * WORKERS * NBYTES / RATE
    modes = windows(choice, [*fast, slow_s, slow_s], risk="low", begin=1000)
    assert modes == ["ssd(steps=5)"] * 4 + ["allreduce"]
    ring_s = COMPUTES_S + 4 * 2 * (WORKERS - 1) / WORKERS * NBYTES / RATE
    assert predicted_s(choice) == pytest.approx(ring_s, rel=0.03)


def test_the_steps_of_a_warm_up_are_as_those_of_ssgd() -> None:
    choice = ModeChoice()
    modes = windows(choice, [TOOK_S] * 20, risk="low")
    assert modes[1].startswith("ssd(")
    assert modes[1:] == [modes[1]] * 19, "it takes no less yet, and is no worse for that"
    slow_s = COMPUTES_S + 4 * (TOOK_S - COMPUTES_S)
    choice = ModeChoice("ssd(steps=5)", "auto takes ssd(steps=5)")
    assert windows(choice, [TOOK_S, *[slow_s] * 3], risk="low")[-1] == "allreduce"


def test_a_mode_that_takes_no_less_is_left_at_its_first_window_and_not_taken_again() -> None:
    choice = ModeChoice()
    slower_s = 1.2 * TOOK_S
    modes = windows(choice, [TOOK_S, TOOK_S, slower_s, slower_s, *[TOOK_S] * 20])
    assert modes == ["", "allreduce", "allreduce", *["ssgd"] * 21]
    assert choice.text.startswith("auto returns to ssgd at step 100: ")


def test_a_mode_that_was_left_is_taken_where_the_present_one_takes_longer_than_it_did() -> None:
    choice, slower_s = ModeChoice(), 1.2 * TOOK_S
    windows(choice, [TOOK_S, TOOK_S, slower_s, slower_s])
    assert windows(choice, [4 * TOOK_S] * 8, begin=100)[-1] == "allreduce"


def test_a_mode_whose_computing_became_slower_is_no_worse_for_that() -> None:
    choice = ModeChoice()
    windows(choice, [TOOK_S, TOOK_S])
    assert choice.mode == "allreduce"
    for step in (75, 100):
        sums = ReportedPace(num_steps=step, steps_s=step * 2 * TOOK_S, waits_s=step * 0.2)
        for rank in range(WORKERS):
            choice.report(step, rank, report(step, 1.0, possible("ssgd", "allreduce"), pace=sums))
        choice.decide(step, range(WORKERS), SLICES, 1, "none")
    assert choice.mode == "allreduce"


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="reports at step 0"):
        ModeChoice().report(0, 0, report(1, 1.0, frozenset()))
    with pytest.raises(ConfigError, match="risk is 'high'"):
        ModeChoice().decide(1, [0], SLICES, 1, "high")
