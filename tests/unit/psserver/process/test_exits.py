"""Every exit code of `psserver` and its cause; other tests cover those of real processes."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from psserver import __main__
from psserver.commands import cli, find
from psserver.exits import MEANINGS, CommandError, Exit
from psserver.process import daemon
from psserver.process.run_dir import StartedRun
from psserver.remote import ask
from tests.house.source import ROOT
from tests.unit.psserver.process.test_supervisor import make_plan

NOBODY = ("--servers", "127.0.0.1:1")  # A port that only root could listen on, and nobody does.
# Of a process, or of several: where they are tested.
ELSEWHERE = {
    Exit.PORT_TAKEN: "tests/integration/test_psserver_cli.py",
    Exit.ALREADY_RUNNING: "tests/integration/test_psserver_cli.py",
    Exit.SHARD_DIED: "tests/integration/test_psserver_cli.py",
    Exit.HOST: "tests/integration/test_psserver_cli.py",
    Exit.BUG: "tests/unit/psserver/process/test_daemon.py",
    Exit.ACCESS: "tests/attacks/test_access.py",
    Exit.OUTPUT: "tests/integration/test_friction.py",
}


def psserver(
    monkeypatch: pytest.MonkeyPatch, *arguments: object, main: Callable[[], None] = cli.main
) -> int:
    """Runs a command in this process and returns its exit code."""
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["psserver", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


COMMANDS: list[tuple[Exit, tuple[object, ...]]] = [
    (Exit.OK, ("rules",)),
    (Exit.UNHEALTHY, ("health", *NOBODY)),
    (Exit.UNHEALTHY, ("doctor", *NOBODY)),
    (Exit.USAGE, ("start", "--shards", 0)),
    (Exit.USAGE, ("start", "--nonesuch")),
    (Exit.USAGE, ("start", "--config", "/nonexistent.toml")),
    (Exit.USAGE, ("status", "--servers", "nonsense")),
    (Exit.USAGE, ("start", "--host", "0.0.0.0")),
    (Exit.USAGE, ("checkpoint", "", *NOBODY)),
    (Exit.USAGE, ("stop", "--servers", "")),
    (Exit.STATE_DIR, ("certs", "{file}")),
    (Exit.STATE_DIR, ("restore", "/nonexistent", *NOBODY)),
    (Exit.NO_ANSWER, ("status", *NOBODY)),
    (Exit.NO_ANSWER, ("stop", *NOBODY)),
    (Exit.NO_ANSWER, ("checkpoint", "{folder}", *NOBODY)),
    (Exit.NO_ANSWER, ("export", "{folder}/x.safetensors", *NOBODY)),
    (Exit.NO_ANSWER, ("logs", "--port", 1, "--state-dir", "{folder}")),
]


@pytest.mark.parametrize(("code", "arguments"), COMMANDS)
def test_a_command_ends_as_documented(
    code: Exit, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ask, "ANSWER_S_MAX", 0.2)
    file = tmp_path / "file"
    file.touch()
    places = {"{file}": str(file), "{folder}": str(tmp_path)}
    given = [str(word) for word in arguments]
    for place, path in places.items():
        given = [word.replace(place, path) for word in given]
    assert psserver(monkeypatch, *given) == code


def refusal(call: Callable[[], object]) -> Exit:
    with pytest.raises(CommandError) as caught:
        call()
    return caught.value.code


def test_a_folder_of_journals_that_cannot_be_used_is_a_state_directory(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    plan = replace(make_plan(), journal_dir=str(tmp_path / "journal"))
    assert refusal(lambda: daemon._open_journals(plan)) is Exit.STATE_DIR


def test_a_process_of_another_user_is_not_ours_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "kill", deny)
    run = StartedRun(
        pid=1,
        began="",
        cluster="c",
        host="h",
        port=1,
        addresses=[],
        grace_s=0.0,
        detached=True,
        supervisor_log=None,
        shards=[],
    )
    assert refusal(lambda: find.end(run)) is Exit.NOT_PERMITTED


def test_ctrl_c_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ask, "answers", interrupted)
    assert psserver(monkeypatch, "status", *NOBODY, main=__main__.main) == Exit.INTERRUPTED


def test_every_code_has_a_meaning_a_test_and_a_row_in_the_reference() -> None:
    here = {code for code, _ in COMMANDS} | {Exit.NOT_PERMITTED, Exit.INTERRUPTED}
    assert here | set(ELSEWHERE) == set(Exit)
    assert set(MEANINGS) == set(Exit)
    for code, path in ELSEWHERE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"code={int(code)}" in text or f"Exit.{code.name}" in text or f"== {code}" in text
    rows = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert all(f"| {int(code)} |" in rows or f"| {int(code)}, " in rows for code in Exit)
