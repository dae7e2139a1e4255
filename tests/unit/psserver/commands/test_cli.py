"""The options of `psserver`'s commands."""

import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from psserver.commands import cli
from psserver.commands.cli import app
from psserver.exits import Exit
from psserver.process.settings import SECTIONS, flag_of

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def parameters(name: str) -> list[Any]:
    command = COMMANDS[name]
    return list(command.get_params(typer.Context(command)))


def test_each_setting_has_a_flag_that_is_passed_on_only_if_it_is_given() -> None:
    flags = {option.name: option for option in parameters("start")}
    settings = {
        flag_of(section, field).replace("-", "_")
        for section, kind in SECTIONS.items()
        for field in kind.model_fields
    }
    assert flags.keys() - settings == {"detach", "config", "help"}
    assert settings <= flags.keys()
    assert {flags[name].default for name in settings} == {None}
    assert flags["restart"].secondary_opts == ["--no-restart"]
    assert flags["insecure"].secondary_opts == []


def test_each_help_text_names_flags_as_they_are_written() -> None:
    """No option is without a text; a text has no Markdown, and no setting by its key in a file."""
    keys = {field for kind in SECTIONS.values() for field in kind.model_fields if "_" in field}
    for name in COMMANDS:
        for option in parameters(name):
            text = getattr(option, "help", None)
            assert text or option.hidden or name == "config", (name, option.name)
            assert "](" not in (text or "")
            assert not keys & set(re.findall(r"`(\w+)`", text or "")), (name, option.name)


def test_a_misspelt_variable_is_refused_before_a_shard_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CHECKPOINTS", "60")
    monkeypatch.setattr(sys, "argv", ["psserver", "start"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == Exit.USAGE
    assert "PACELINE_CHECKPOINT_S was probably meant" in capsys.readouterr().err


def test_an_export_into_no_folder_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["psserver", "export", "/nonesuch/m.safetensors"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == Exit.STATE_DIR
    assert "there is no folder /nonesuch; make it first" in capsys.readouterr().err


def test_commands_that_find_servers_describe_the_search_and_not_the_start() -> None:
    start = {option.name: option.help for option in parameters("start")}
    found = [
        (command, option)
        for command in COMMANDS.values()
        for option in parameters(command.name)
        if command.name != "start" and option.name in ("port", "state_dir")
    ]
    assert {command.name for command, _ in found} >= {"status", "stop", "forget", "logs", "doctor"}
    assert not [command.name for command, option in found if option.help == start[option.name]]


LIGHT = """
import sys
import psserver.__main__ as program
try:
    program.main()
except SystemExit as end:
    assert end.code in (1, 6), end.code  # Unhealthy, or nothing answers.
assert "grpc" in sys.modules
assert not {"numba", "numpy", "torch"} & sys.modules.keys()
"""


@pytest.mark.parametrize("command", ["health", "jobs", "readers", "status", "stop"])
def test_a_command_that_only_asks_servers_does_without_numba(command: str) -> None:
    """A container's health check runs each five seconds: Numba is most of a second of CPU."""
    words = [sys.executable, "-c", LIGHT, command, "--servers", "127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
