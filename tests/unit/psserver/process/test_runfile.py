"""Run files: found while their process lives, and in nobody else's directory."""

import errno
import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from pscore.observe.boot import began
from psserver.exits import CommandError, Exit
from psserver.process import run_dir
from psserver.process.run_dir import RunDirectory, ShardRun, StartedRun

OURS = psutil.Process()


def make_run(port: int = 7070) -> StartedRun:
    shard = ShardRun(index=0, pid=1, port=port, metrics_port=None, log=None)
    return StartedRun(
        pid=OURS.pid,
        began=began(OURS.pid),
        cluster="c",
        host="127.0.0.1",
        port=port,
        addresses=[f"127.0.0.1:{port}"],
        grace_s=1.0,
        detached=True,
        supervisor_log=None,
        shards=[shard],
    )


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "state")
    runs = [make_run(7071), make_run(7070)]
    for run in runs:
        run_dir.write(directory.make(str(run.port)), run)
    assert directory.runs() == sorted(runs, key=lambda run: run.port)
    run_dir.remove(directory.path / "7070")
    run_dir.remove(directory.path / "7070")
    assert directory.runs() == [runs[0]]


def test_on_a_full_disk_the_run_file_that_is_there_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory = RunDirectory(tmp_path)
    run_dir.write(directory.make("7070"), replace(make_run(), pid=1, cluster="of a longer name"))
    monkeypatch.setattr(Path, "write_text", has_no_room)
    run_dir.write(tmp_path / "7070", make_run())
    assert directory.runs() == [make_run()]
    with pytest.raises(CommandError, match="make room there"):
        run_dir.write(directory.make("7071"), make_run(7071))


def test_the_run_file_of_another_process_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    folder = directory.make("7070")
    run_dir.write(folder, replace(make_run(), pid=1))
    run_dir.remove(folder)
    assert (folder / run_dir.FILE).exists()


def test_files_of_ended_runs_on_free_ports_are_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    gone = 2**22 + 1  # Above the largest number that Linux gives to a process.
    for name in (f"free-{gone}", f"free-{gone + 1}", f"free-{OURS.pid}", "7070"):
        (directory.make(name) / "shard-0.log").touch()
    run_dir.write(tmp_path / f"free-{gone + 1}", make_run())
    (directory.make(f"free-{gone + 2}") / "weights").touch()
    directory.clear()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"free-{gone + 1}",
        f"free-{gone + 2}",
        f"free-{OURS.pid}",
        "7070",
    }


def test_a_process_that_is_gone_or_another_one_does_not_count(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    directory = RunDirectory(tmp_path)
    for number, run in enumerate(
        [
            replace(make_run(), pid=ended.pid),
            replace(
                make_run(), began=f"{make_run().began}0"
            ),  # Not its parent's: of one tick, perhaps.
            replace(make_run(), began=""),
        ]
    ):
        run_dir.write(directory.make(str(number)), run)
    assert directory.runs() == []


def test_a_run_is_found_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day at which a process began is another one then."""
    run = make_run()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: OURS.pid * 1e3)
    assert run.is_alive()


def test_a_process_that_never_was_began_at_no_time() -> None:
    assert began(2**22 + 1) == ""


def test_a_zombie_does_not_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # It has ended, and nobody has waited for it.
    since = began(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not replace(make_run(), pid=child.pid, began=since).is_alive()
    child.wait()
    child.stdout.close()


@pytest.mark.parametrize("wrong", [10**30, -1, "x", 1.5, True, math.nan])
@pytest.mark.parametrize("name", ["pid", "port"])
def test_a_run_file_with_a_wrong_number_is_skipped(
    tmp_path: Path, name: str, wrong: object
) -> None:
    directory = RunDirectory(tmp_path)
    run = asdict(make_run())
    (shard,) = run["shards"]
    for spoilt in (run | {name: wrong}, run | {"shards": [shard | {name: wrong}]}):
        (directory.make("7070") / run_dir.FILE).write_text(json.dumps(spoilt))
        assert directory.runs() == []


@pytest.mark.parametrize("text", ["", "{}", '{"shards": [{}]}', "[1]"])
def test_a_wrong_run_file_is_skipped(tmp_path: Path, text: str) -> None:
    directory = RunDirectory(tmp_path)
    (directory.make("7070") / run_dir.FILE).write_text(text)
    assert directory.runs() == []


def test_the_default_directory_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = RunDirectory(None)
    directory.make("7070")
    assert directory.path == tmp_path / f"paceline-{os.getuid()}"
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.path.chmod(0o777)
    with pytest.raises(CommandError, match="another user") as caught:
        directory.make("7070")
    assert caught.value.code is Exit.STATE_DIR


def test_a_link_in_place_of_the_default_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "paceline").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(CommandError):
        RunDirectory(None).make("7070")


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CommandError, match="is not a directory") as caught:
        RunDirectory(file).make("7070")
    assert caught.value.code is Exit.STATE_DIR
