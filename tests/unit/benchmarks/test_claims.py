"""The page of claims, for results that are given and for a run that failed."""

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import claims

STEPS = {"ssgd": 900.0, "ddp_gloo": 1000.0, "ssd": 400.0, "cd": 500.0, "ssgd_2bit": 600.0}
BOUNDS = {"ssd": 450.0, "cd": 480.0, "ssgd_2bit": 300.0}
RESULTS = {
    "hosts": {"date": "2026-11-01", "four_hosts": {"step_ms": STEPS, "bound_ms": BOUNDS}},
    "accuracy": {"ssgd": {"accuracy": 0.9}, "mirror k=5": {"accuracy": 0.897}},
    "learning": [
        {"name": name, "accuracy": accuracy, "sim_s": seconds, "seed": 1}
        for name, accuracy, seconds in (
            ("ssgd", 0.88, 15.0), ("asgd", 0.85, 12.0), ("od mirror", 0.879, 11.0),
            ("dcasgd adaptive", 0.86, 12.0), ("staleness n=4", 0.848, 12.0),
        )
    ],
    "stragglers": {"straggler": {"figures": {
        "adpsgd": {"1x": 3.0, "100x": 3.1}, "allreduce": {"1x": 3.0, "100x": 300.0},
    }}},
    "pipeline": {"1gbit": {"ssgd": 0.4, "ddp": 0.5, "pipeline": 2.0, "predicted": 2.2}},
    "predictions": None,
}  # fmt: skip


def test_every_claim_has_a_figure_and_a_verdict() -> None:
    lines = claims.page(RESULTS, ["links.png"]).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][2:]
    verdicts = [row[2] for row in rows]
    assert verdicts == ["yes", "yes", "yes", "no", "yes", "no", "yes", "no", "?"]
    assert rows[0][1] == "+125%; against DDP over Gloo +150%"
    assert rows[3][1] == "-17% time"
    assert rows[3][3].endswith("its bytes alone take 480 ms a step, those of 2-bit pushes 300 ms")
    assert [bool(row[3].strip()) for row in rows] == [row[2] == "no" for row in rows]
    assert lines[-1] == "![links.png](links.png)"


def test_a_result_that_is_whole_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(claims.COMMANDS, "hosts", "json.tool {out}/in.json {result}")
    (tmp_path / "in.json").write_text(json.dumps(RESULTS["hosts"]))
    first = claims.measure("hosts", tmp_path, tmp_path, again=False)
    assert first == RESULTS["hosts"]
    (tmp_path / "in.json").unlink()
    assert claims.measure("hosts", tmp_path, tmp_path, again=False) == first
    assert claims.measure("hosts", tmp_path, tmp_path, again=True, is_asked=False) == first
    assert claims.measure("hosts", tmp_path, tmp_path, again=True) is None
    assert claims.measure("hosts", tmp_path, tmp_path, again=False, is_asked=False) is None


def test_a_printed_command_has_no_place_left_open() -> None:
    assert "{" not in claims.page(RESULTS, [])


def test_a_mode_that_takes_longer_takes_no_negative_share_less() -> None:
    steps = STEPS | {"cd": 606.0}
    results = RESULTS | {"hosts": {"four_hosts": {"step_ms": steps, "bound_ms": BOUNDS}}}
    assert claims.rows_of(results)[3]["measured here"] == "+1% time"


def test_the_table_is_kept_with_the_date_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "measure", lambda name, *_, **__: RESULTS[name])
    kept = tmp_path / "claims.json"
    monkeypatch.setattr(sys, "argv", ["claims", "--out", str(tmp_path), "--results", str(kept)])
    claims.main()
    found = json.loads(kept.read_text())
    assert found["runs"]["hosts"] == {"date": "2026-11-01"}
    assert "predictions" not in found["runs"]
    assert found["claims"] == claims.rows_of(RESULTS)


class ParsedError(Exception):
    """The arguments are those of the command."""


@pytest.mark.parametrize("name", claims.COMMANDS)
def test_a_driver_has_the_arguments_with_which_it_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    given = {"result": tmp_path / "r.json", "out": tmp_path, "data": tmp_path}
    monkeypatch.setattr(sys, "argv", shlex.split(claims.COMMANDS[name].format(**given)))
    with pytest.raises(ParsedError):
        importlib.import_module(sys.argv[0]).main()
