"""The text for a person when an error ends a script."""

import os
import subprocess
import sys

import pytest

from pscore.errors import ConfigError
from psworker.job import context
from psworker.training import script_errors


@pytest.fixture(autouse=True)
def _own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DEBUG", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(script_errors, "_former", sys.__excepthook__)


def told(problem: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what the hook writes of `problem`."""
    try:
        raise problem
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err


def test_ours_are_one_line_that_names_the_scripts_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        context.join(num_workers=1, max_workers=2)
    script_errors.print_short_errors()
    sys.excepthook(ConfigError, raised.value, raised.value.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("psworker: num_workers is 1 and max_workers 2: give one (")
    assert f"{__file__}, line " in line
    assert line.endswith("; PACELINE_DEBUG=1 shows the traceback)")


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    script_errors.print_short_errors()
    script_errors.print_short_errors()
    assert told(KeyboardInterrupt(), capsys).startswith("psworker: interrupted by Ctrl-C (")


def test_other_exceptions_go_where_they_went_before(capsys: pytest.CaptureFixture[str]) -> None:
    script_errors.print_short_errors()
    said = told(KeyError("mine"), capsys)
    assert "Traceback" in said
    assert "psworker:" not in said


def test_the_traceback_comes_when_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script_errors.print_short_errors()
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    said = told(ConfigError("wrong"), capsys)
    assert said.startswith("Traceback")
    assert "psworker: wrong (" in said


HOOK = "import sys; before = sys.excepthook; import psworker; print(sys.excepthook is before)"


@pytest.mark.parametrize(("asked", "is_kept"), [("", "True"), ("1", "False")])
def test_an_import_keeps_the_hook_unless_the_launcher_asks(asked: str, is_kept: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK],
        env=os.environ | {"PACELINE_SHORT_ERRORS": asked},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == f"{is_kept}\n"
