"""Logs of several files in one order, and lines that follow later."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from psserver.commands.logview import LogView, files, last_files
from psserver.exits import CommandError, Exit
from psserver.process.run_dir import RunDirectory, ShardRun
from tests.unit.psserver.process.test_runfile import make_run


def test_lines_come_in_the_order_of_their_stamps_and_tracebacks_stay_together(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    one.write_text("2026-01-01T00:00:01.5Z a\nTraceback\n  more\n2026-01-01T00:00:03.5Z c\n")
    two.write_text('{"event": "b", "timestamp": "2026-01-01T00:00:02.5Z"}\n')
    lines = LogView([one, two, tmp_path / "none.log"]).read()
    assert [line.split()[-1] for line in lines[:3]] == ["a", "Traceback", "more"]
    assert '"b"' in lines[3]
    assert lines[4].endswith("c\n")


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    view = LogView([path])
    assert view.read() == []
    path.write_text("first\nsec")
    assert view.read() == ["first\n"]
    path.write_text("first\nsecond\n")
    assert view.read() == ["second\n"]
    assert view.read() == []


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    path.write_text("last words\n")
    ended = replace(make_run(), began="")
    assert list(LogView([path]).follow(ended)) == [["last words\n"]]


def test_only_a_detached_run_has_files() -> None:
    shard = ShardRun(index=0, pid=1, port=1, metrics_port=None, log="/tmp/shard-0.log")
    run = replace(make_run(), shards=[shard], supervisor_log="/tmp/supervisor.log")
    assert [path.name for path in files(run, None)] == ["shard-0.log", "supervisor.log"]
    assert [path.name for path in files(run, 0)] == ["shard-0.log"]
    with pytest.raises(CommandError, match=r"must be in 0\.\.0"):
        files(run, 1)
    with pytest.raises(CommandError, match="without --detach"):
        files(replace(run, detached=False), None)


def test_the_logs_of_the_last_run_are_found_after_it_has_ended(tmp_path: Path) -> None:
    for age, port in enumerate((7070, 7080)):
        folder = tmp_path / str(port)
        folder.mkdir()
        for name in ("shard-0.log", "shard-1.log", "supervisor.log"):
            (folder / name).write_text("a line\n")
            os.utime(folder / name, (1000 - age, 1000 - age))
    (tmp_path / "empty").mkdir()
    directory = RunDirectory(tmp_path)
    found = last_files(directory, None, None)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        *("7070/shard-0.log", "7070/shard-1.log", "7070/supervisor.log")
    ]
    assert last_files(directory, 7080, 1) == [tmp_path / "7080" / "shard-1.log"]
    with pytest.raises(CommandError, match="no log of shard 2") as caught:
        last_files(directory, None, 2)
    assert caught.value.code is Exit.USAGE
    with pytest.raises(CommandError, match="on port 7090") as caught:
        last_files(directory, 7090, None)
    assert caught.value.code is Exit.NO_ANSWER
