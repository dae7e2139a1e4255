"""The report of advice fits a terminal, and its lines to write are commands that work."""

import ast
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import psworker
from pscore.rules import parse_mode
from psserver.commands import cli as server_cli
from psserver.process import start
from psworker.advice.report import advise
from psworker.advice.shown import lines_of
from psworker.advice.situation import Situation, parse_sites, read_situation


def situation(**changes: Any) -> Situation:
    given: dict[str, Any] = {"model": "gpt2-xl", "groups": (4, 4), "gbit": 10.0}
    return read_situation(**given | {"compute_ms": 900.0} | changes)


SITUATIONS = {
    "two hosts": situation(),
    "with TLS": situation(tls=True),
    "one host": situation(groups=(2,), model="gpt2", compute_ms=0.1),
    "many hosts": situation(groups=(8,) * 64, model="7B", gbit=400.0, compute_ms=10.0),
    "two sites": situation(groups=parse_sites("6,2"), between_gbit=0.5, model="350M"),
    "far, on CPUs": situation(groups=(1,) * 4, latency_ms=40.0, on_gpu=False, paces=True),
    "alone": situation(groups=(1,)),
    "too large": situation(model="llama-70b"),
}


@pytest.mark.parametrize("risk", ["none", "low", "any"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_the_report_fits_80_columns(name: str, risk: str) -> None:
    lines = lines_of(advise(SITUATIONS[name], risk))
    assert max(map(len, lines)) <= 80


def test_it_fits_40_columns_but_for_names_and_the_lines_to_write() -> None:
    report = advise(SITUATIONS["two hosts"])
    lines = lines_of(report, 40)[: -len(report.lines)]
    long = [line.strip() for line in lines if len(line) > 40]
    assert all(" " not in line and "/" in line for line in long)
    assert any(line.startswith("* ssd(steps=5)") for line in lines)


def test_a_table_has_the_times_with_three_figures_and_marks_what_is_advised() -> None:
    lines = lines_of(advise(SITUATIONS["two hosts"]))
    (marked,) = [line for line in lines if line.startswith("*")]
    assert marked.split() == ["*", "ssd(steps=5)", "/host", "3,750", "?", "links", "-0.5", "points"]
    assert any(line.split() == ["ddp", "5,660", "?", "links", "same", "updates"] for line in lines)


def test_the_warm_up_that_takes_longer_is_said() -> None:
    """A run of 100 steps in ssd takes as long as in ssgd."""
    report = advise(SITUATIONS["two hosts"])
    text = " ".join(" ".join(lines_of(report)).split())
    assert "behind the warm-up, whose steps are those of ssgd: od 200, ssd 500, cd 1,000" in text
    assert {row.mode: row.warmup for row in report.rows}["ssgd"] == 0
    assert report.verdict.row.as_json()["warmup_steps"] == 500


def test_a_measured_number_has_three_figures() -> None:
    assert situation(compute_ms=183.671234).sources["computing"].value == "184 ms a step"


def commands(lines: list[str], program: str) -> list[list[str]]:
    """Returns the arguments of each command of a program among lines to write."""
    text = "\n".join(lines).replace("\\\n", "")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith(program)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Any]:
    """Runs a command of `psserver`; returns the settings with which shards would start."""
    launched: list[Any] = []

    def launch(settings: Any, *, detach: bool) -> int:
        launched.append(settings)
        return 0 if detach else 1

    monkeypatch.setattr(start, "launch", launch)
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)

    def run(arguments: list[str]) -> Any:
        monkeypatch.setattr(sys, "argv", ["psserver", *arguments])
        with pytest.raises(SystemExit) as ended:
            server_cli.main()
        assert not ended.value.code
        return launched.pop() if launched else None

    return run


@pytest.mark.parametrize("name", ["two hosts", "with TLS", "one host", "two sites"])
def test_the_lines_start_shards_and_workers(
    name: str, server: Callable[[list[str]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = advise(SITUATIONS[name], "any")
    lines = list(report.lines)
    number = len(report.shards.hosts)
    started = [one.server for one in map(server, commands(lines, "psserver")) if one is not None]
    assert started
    assert {each.shards for each in started} == {number}
    assert sorted(index for each in started for index in each.indices) == [*range(number)]
    assert all(each.insecure == (name in ("two hosts", "two sites")) for each in started)
    (torchrun,) = commands(lines, "torchrun")
    known = [part.replace("HOSTS", "2").replace("HERE", "1") for part in torchrun]
    assert get_args_parser().parse_args(known).training_script == "train.py"
    (servers,) = [words[0] for words in commands(lines, "export") if "SERVERS" in words[0]]
    assert len(servers.split(",")) == number


@pytest.mark.parametrize(
    "given",
    [
        {"groups": (1,) * 100, "gbit": 1.0},
        {"groups": (8,) * 64, "gbit": 400.0, "compute_ms": 10.0},
        {"groups": (1,) * 100, "between_gbit": 1.0},
    ],
    ids=["hosts", "hosts of fast links", "sites"],
)
def test_more_shards_are_never_advised_than_a_job_can_have(
    given: dict[str, Any], server: Callable[[list[str]], Any]
) -> None:
    report = advise(situation(**given), "any")
    started = [server(command).server for command in commands(list(report.lines), "psserver")]
    assert {each.shards for each in started} == {len(report.shards.hosts)}


@pytest.mark.parametrize("name", ["two hosts", "one host", "far, on CPUs"])
def test_the_line_of_the_script_is_one_that_it_can_have(name: str) -> None:
    report = advise(SITUATIONS[name], "any")
    begin = report.lines.index("# in train.py")
    body = ast.parse("\n".join(report.lines[begin:])).body
    call = body[-1].value  # type: ignore[attr-defined]
    given = {each.arg: each.value for each in call.keywords}
    inspect.signature(psworker.DistributedOptimizer).bind(*call.args, **given)
    assert str(parse_mode(ast.literal_eval(given["mode"]))).startswith(
        report.verdict.row.mode.partition("(")[0]
    )
    # A group of processes needs torch.distributed.
    assert ("init_process_group" in "\n".join(report.lines)) is report.verdict.row.grouped
