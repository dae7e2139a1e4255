"""The file of a pipeline's plan, from `psworker plan` to the workers that `psworker run` starts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pscore.errors import ConfigError
from psworker.commands import cli
from psworker.job.environment import Environment
from psworker.pipeline.plan.choice import resolve_plan
from psworker.pipeline.plan.plan_file import PlanFile, PlanStage, read_plan

PROFILE = Path(__file__).parent / "profiles" / "vgg16.json"
PLAN = PlanFile(
    model="m",
    stages=(PlanStage(last="a", replicas=2), PlanStage(last="b", replicas=1)),
    predicted_ms=2.5,
    verdict="pipeline",
    reason="fast",
)


def cli_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Runs `psworker`; returns its exit code."""
    monkeypatch.setattr("sys.argv", ["psworker", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    found = read_plan(tmp_path / "plan.json")
    assert found == PLAN
    assert found.name == "2-1"
    assert found.cuts == [("a", 2), ("b", 1)]
    assert found.places() == "ranks 0 to 1 are stage 0 (to a), rank 2 is stage 1 (to b)"


GOOD: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "stages": [{"last": "a", "replicas": 1}],
    "predicted_ms": 1.0,
    "verdict": "pipeline",
    "reason": "",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is no plan of a pipeline"),
        ("[]", "is no plan of a pipeline"),
        (json.dumps({**GOOD, "version": 2}), "has version 2, must be 1"),
        (json.dumps({**GOOD, "stages": []}), "is no plan of a pipeline"),
        (json.dumps({**GOOD, "stages": [{"last": "a"}]}), "is no plan of a pipeline"),
        (json.dumps({**GOOD, "stages": [{"last": "a", "replicas": 0}]}), "must be 1 or more"),
        (json.dumps({**GOOD, "more": 1}), "is no plan of a pipeline"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_plan(path)
    assert "psworker plan MODEL --pipeline --save-plan FILE writes one" in str(refused.value)


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the plan cannot be read: .*none\.json"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="the plan cannot be written: "):
        PLAN.write(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize(
    ("link", "cuts", "verdict"),
    [
        ("1gbit", [("pool5", 3), ("fc8", 1)], "pipeline"),
        ("10gbit", [("fc8", 4)], "do not pipeline"),
        ("10mbit", [("fc8", 1)], "do not pipeline"),  # One worker alone is as fast.
    ],
)
def test_the_command_saves_the_advised_plan(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    link: str,
    cuts: list[tuple[str, int]],
    verdict: str,
) -> None:
    path = tmp_path / "plan.json"
    flags = ("--pipeline", "--workers", "4", "--bandwidth", link, "--save-plan", str(path))
    assert cli_of(monkeypatch, "plan", str(PROFILE), *flags, "--json") == 0
    found, printed = read_plan(path), json.loads(capsys.readouterr().out)
    assert (found.cuts, found.verdict, found.reason) == (cuts, verdict, printed["reason"])
    if verdict == "pipeline":
        assert found.predicted_ms == printed["pipeline_ms"]


SHOW = 'echo "rank $RANK of $WORLD_SIZE has $PACELINE_PIPELINE"'


def test_run_starts_the_workers_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    PLAN.write(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    words = ("--pipeline", "plan.json", "--servers", "127.0.0.1:1", "--", "sh", "-c", SHOW)
    assert cli_of(monkeypatch, "run", *words) == 0
    said = capfd.readouterr()
    path = os.path.realpath(tmp_path / "plan.json")
    for rank in range(3):
        assert f"rank {rank} of 3 has {path}" in said.out
    assert "pipeline 2-1: ranks 0 to 1 are stage 0 (to a), rank 2 is stage 1 (to b)" in said.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "2"), "--workers is 2, but the plan plan.json, 2-1, has 3: leave out"),
        (("--elastic", "1:3"), "--elastic has no effect with --pipeline"),
    ],
)
def test_run_refuses_other_workers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: tuple[str, ...],
    message: str,
) -> None:
    PLAN.write(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    assert cli_of(monkeypatch, "run", "--pipeline", "plan.json", *flags, "--", "true") == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_script_takes_the_plan_of_its_launcher(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.write(path)
    handed = Environment.read({"PACELINE_PIPELINE": str(path)}).pipeline
    assert resolve_plan("auto", handed, None, None) == (PLAN.cuts, None)
    assert resolve_plan("auto", handed, "1gbit", "16g") == (PLAN.cuts, None)
    assert resolve_plan(path, "", None, None) == (PLAN.cuts, None)
    assert resolve_plan([("c", 1)], handed, None, None) == ([("c", 1)], None)
    found, limits = resolve_plan("auto", "", "1gbit", None)
    assert not found
    assert limits is not None
    with pytest.raises(ConfigError, match="bandwidth='1gbit' has no effect but with plan='auto'"):
        resolve_plan(path, "", "1gbit", None)
