"""The commands of `psworker`: refused arguments, and the messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pscore.errors import ConfigError, RemoteProtocolError, ServerUnavailableError
from psworker.commands import cli
from psworker.exits import MEANINGS, Exit

PIPELINE = ("plan", "lenet", "--pipeline", "--bandwidth", "1gbit")


def psworker(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs a command in this process and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["psworker", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_SERVERS", "PACELINE_JOB", "DMLC_PS_ROOT_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nonesuch.py"), "psworker: no script 'nonesuch.py'"),
        (("run", "--workers", "0", "env"), "psworker: --workers is 0, must be in 1..1024"),
        (("run", "--servers", "here", "env"), "psworker: server address 'here'"),
        (("run", "--servers", "a:1", "--shards", "2", "env"), "psworker: --shards 2 starts"),
        (("bench", "compressors", "lenet", "--latency-ms", "1"), "psworker: --latency-ms has no"),
        (
            ("bench", "compressors", "lenet", "--gbit", "1", "--servers", "a:1"),
            "psworker: --servers has no effect",
        ),
        (("doctor", "--model", "lenet"), "psworker: --model lenet has no effect without --job"),
        (("demo", "--modes", "ssdg"), "psworker: no mode 'ssdg'; there are adpsgd"),
        (("demo", "--modes", "ssd(k=5)"), "psworker: mode 'ssd' has no argument 'k'; it has "),
        (("run", "--grace-s", "nan", "env"), "psworker: --grace-s is nan, must be a number from 0"),
        (("plan", "lenet", "--mode", "auto"), "psworker: mode is 'auto', by which a job that runs"),
        (("demo", "--modes", "auto"), "psworker: mode is 'auto', by which a job that runs chooses"),
        ((*PIPELINE, "--sync", "mesh"), "psworker: --sync is 'mesh', must be one of shards, ring"),
        ((*PIPELINE, "--device", "tpu"), "psworker: --device is 'tpu': Expected one of cpu, cuda"),
        (("plan", "x", *PIPELINE[2:]), "psworker: model is 'x', must be one of alexnet, gpt2"),
        (("demo", "--data", "nowhere"), "psworker: Fashion-MNIST is needed, and none at nowhere"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert psworker(monkeypatch, *arguments) == Exit.USAGE
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_shards_are_not_started_beside_servers_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    assert psworker(monkeypatch, "run", "--shards", "2", "env") == Exit.USAGE
    assert "servers are given: a:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PACELINE_MODE", "ssp", "mode is an argument of psworker.DistributedOptimizer"),
        ("PACELINE_JOB", " night", "the name of the job is ' night'"),
        ("PACELINE_TOKEN_FILE", "token", "the shards that a job starts for itself ignore it"),
    ],
)
def test_a_variable_that_would_be_ignored_is_refused_before_anything_starts(
    name: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert psworker(monkeypatch, "run", "--workers", "1", "env") == Exit.USAGE
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_misspelt_variable_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_SERVES", "a:1")
    assert psworker(monkeypatch, "run", "--workers", "1", "env") == Exit.USAGE
    said = capsys.readouterr().err
    assert said.startswith("psworker: PACELINE_SERVES is set, which is no variable of Paceline: ")
    assert said.count("\n") == 1


def test_a_command_that_needs_torch_says_so_in_an_image_for_shards() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['psworker', 'doctor']; "
        "from psworker.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == Exit.USAGE
    assert ended.stderr.startswith("psworker: torch is not installed here: ")
    assert ended.stderr.count("\n") == 1


def test_a_misspelled_option_is_not_taken_for_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psworker(monkeypatch, "run", "--wrokers", "2", "env") == Exit.USAGE
    assert "--wrokers" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert psworker(monkeypatch, "demo", "--out", str(out)) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"psworker: cannot write to --out {out}: ")


def test_modes_are_listed_with_their_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psworker(monkeypatch, "modes") == 0
    listed = capsys.readouterr().out
    assert "steps=5" in listed
    assert "arXiv:2012.05396" in listed
    assert psworker(monkeypatch, "modes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ssd"]["steps"] == 5


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psworker(monkeypatch, "version", "--json") == 0
    assert {"paceline", "torch", "python"} <= json.loads(capsys.readouterr().out).keys()


def test_help_and_version_have_their_usual_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert psworker(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("paceline ")
    assert psworker(monkeypatch, "bench", "-h") == 0
    # Whole, on a terminal that is wide enough.
    summary = "Show what each compressor costs and saves on this machine and link."
    assert f"compressors  {summary}\n" in capsys.readouterr().out
    monkeypatch.setenv("_PSWORKER_COMPLETE", "source_bash")  # As `--show-completion` in bash.
    assert psworker(monkeypatch) == 0
    assert "_PSWORKER_COMPLETE=complete_bash" in capsys.readouterr().out


def test_every_exit_code_is_documented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psworker(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"{code:>3}  {MEANINGS[code]}" in shown for code in Exit)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (ConfigError("x"), Exit.USAGE),
        (ServerUnavailableError("x"), Exit.NO_SHARDS),
        (RemoteProtocolError("x"), Exit.FAILED),
    ],
)
def test_errors_have_exit_codes(problem: ConfigError, code: Exit) -> None:
    assert cli.exit_code(problem) == code


@pytest.mark.parametrize(
    "arguments",
    [("run", "--shards", "0", "env"), ("run", "--shards", "65", "env"), ("demo", "--seed", "-1")],
)
def test_a_number_out_of_its_range_is_refused_by_the_option_s_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert psworker(monkeypatch, *arguments) == Exit.USAGE
    assert f"Invalid value for '{arguments[1]}'" in capsys.readouterr().err


def test_a_run_without_a_script_shows_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psworker(monkeypatch, "run", "--workers", "2") == Exit.USAGE
    assert "no command: psworker run --workers 2 -- train.py" in capsys.readouterr().err
