"""Scans: step times of many workers, beside all-reduce."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from pssim.timing.plot import draw
from pssim.timing.scan import ScanRequest, break_even_gbit, scan, situation_of
from psworker.advice.situation import GIVEN
from psworker.commands import cli

REQUEST = ScanRequest(
    model="7B",
    workers=(8, 32),
    per_host=8,
    gbits=(1.0, 400.0),
    modes=("ssgd", "local(steps=8)"),
    compute_ms=2000.0,
)


@pytest.mark.slow
def test_every_point_has_its_limit_shards_and_distance_from_runs(tmp_path: Path) -> None:
    points = scan(REQUEST)
    assert [(p["workers"], p["gbit"], p["mode"]) for p in points][:2] == [
        (8, 1.0, "ssgd"), (8, 1.0, "local(steps=8)"),
    ]  # fmt: skip
    assert all(point["limit"] and point["shards"] >= 1 for point in points)
    assert all(point["beyond_measured"] for point in points)
    slow = next(p for p in points if (p["workers"], p["gbit"], p["mode"]) == (32, 1.0, "ssgd"))
    fast = next(p for p in points if (p["workers"], p["gbit"], p["mode"]) == (32, 400.0, "ssgd"))
    assert slow["limit"] == "links"
    assert slow["step_ms"] > 20 * fast["step_ms"]
    draw(points, tmp_path / "scan.png", "7B")
    assert (tmp_path / "scan.png").stat().st_size > 1000
    for path in (tmp_path, tmp_path / "scan.txt", tmp_path / "scan.png" / "scan.png"):
        with pytest.raises(ConfigError, match="cannot draw"):
            draw(points, path, "7B")


@pytest.mark.slow
def test_all_reduce_wins_from_its_break_even_on() -> None:
    gbit = break_even_gbit(REQUEST, 64, "local(steps=8)")
    assert gbit is not None
    one = replace(REQUEST, workers=(64,), modes=("local(steps=8)",))
    for factor, wins in ((0.9, False), (1.1, True)):
        (point,) = scan(replace(one, gbits=(factor * gbit,)))
        assert point["all_reduce_wins"] is wins


def test_a_host_that_is_not_full_has_the_rest_of_the_workers() -> None:
    situation = situation_of(REQUEST, 12, 1.0)
    assert situation.groups == (8, 4)
    assert situation.sources["link"].source == GIVEN


@pytest.mark.slow
def test_more_processes_lose_more_time_and_waiting_for_all_costs_most() -> None:
    modes = ("ssgd", "asgd")
    one = replace(REQUEST, gbits=(400.0,), modes=modes, failure_hours=24.0, workers=(16, 64))
    points = scan(one)
    few, more = points[:2], points[2:]
    assert [point["mode"] for point in points] == [*modes, *modes]
    assert all(a["lost_share"] < b["lost_share"] for a, b in zip(few, more, strict=True))
    assert all(ssgd["lost_share"] > asgd["lost_share"] for ssgd, asgd in (few, more))
    assert "lost_share" not in scan(replace(one, failure_hours=None))[0]


@pytest.mark.slow
def test_every_message_agrees_with_the_closed_form() -> None:
    points = scan(replace(REQUEST, workers=(64,), gbits=(10.0,), every_message=True))
    for point in points:
        assert point["simulated_ms"] == pytest.approx(point["step_ms"], rel=0.2)
        assert point["simulated_slices_per_shard"] == 8


@pytest.mark.slow
def test_the_command_runs_the_simulator_and_refuses_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "7B", "--workers", "64", "--gbit", "10", "--mode", "od"]
    monkeypatch.setattr(sys, "argv", ["psworker", "simulate", *flags, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    (point,) = json.loads(capsys.readouterr().out)
    assert point["mode"] == "od"
    for wrong, message in (
        (["--model", "7X", *flags[2:]], "model is '7X'"),
        ([*flags[:3], "none", *flags[4:]], "--workers is 'none'"),
        ([*flags, "--mode", "sgd"], "sgd"),
        ([*flags, "--compute-ms", "nan"], "--compute-ms is nan, must be 0.001 to 10000000"),
        ([*flags, "--compute-ms", "inf"], "--compute-ms is inf, must be"),
        ([*flags, "--failures", "inf"], "--failures is inf, must be"),
        ([*flags, "--failures", "0"], "--failures is 0, must be"),
    ):
        monkeypatch.setattr(sys, "argv", ["psworker", "simulate", *wrong])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
