"""The process that takes scheduled checkpoints, without shards; and the supervisor's end of it."""

import fcntl
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.durability import records
from psserver.exits import CommandError, Exit
from psserver.logs.rotation import former
from psserver.process import checkpoint_keeper as keepers
from psserver.process import checkpoint_schedule
from psserver.process.checkpoint_keeper import Keeper
from psserver.process.checkpoint_schedule import CheckpointSchedule
from psserver.process.shard_plan import SchedulePlan
from psserver.remote import ask
from psserver.remote.checkpoint_files import write
from tests.integration.command import eventually
from tests.unit.psserver.remote.test_checkpoint_files import make, names


def plan_of(folder: Path) -> SchedulePlan:
    return SchedulePlan(
        addresses=["127.0.0.1:1"],
        folder=str(folder),
        every_s=3600.0,
        token_file=None,
        log_format="text",
        log_level="info",
    )


class Cluster:
    """Stands for two shards: their status, and the checkpoints that can be taken of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: dict[str, int] = {}  # By job.
        self.optimizers: dict[str, str] = {}  # Of each job.
        self.states: dict[str, str] = {}  # Of each job.
        self.failing: dict[str, Exception] = {}
        monkeypatch.setattr(ask, "statuses", self.statuses)
        monkeypatch.setattr(checkpoint_schedule, "capture", self.capture)

    def statuses(self, *_: object, **__: object) -> list[pb.StatusReply]:
        if problem := self.failing.get("all"):
            raise problem
        return [pb.StatusReply(jobs=[self.job(name) for name in self.versions]) for _ in range(2)]

    def job(self, name: str) -> pb.JobStatus:
        version = self.versions[name]
        table = pb.TableStatus(name="model", num_slices=1, version_min=version, version_max=version)
        table.optimizer = self.optimizers.get(name, "sgd")
        state = self.states.get(name, "live")
        return pb.JobStatus(job=name, num_workers=1, tables=[table], state=state)

    def capture(self, addresses: object, credentials: object, job: str, **_: Any) -> Any:
        if problem := self.failing.get(job):
            raise problem
        return make(float(self.versions[job]), job)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_job_whose_weights_are_on_its_workers_is_left_out_with_one_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    taker = CheckpointSchedule(plan_of(tmp_path))
    cluster.versions, cluster.optimizers = {"a": 3, "b": 3}, {"b": "mean"}
    with capture_logs() as entries:
        taker.take()
        taker.take()
    assert names(tmp_path) == ["a-00000001"]
    (line,) = [entry for entry in entries if entry.get("job") == "b"]
    assert line["event"].startswith("no checkpoints of this job: its workers run the optimizer")


def test_checkpoints_of_ended_jobs_are_deleted_after_their_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    for job, is_finished in (("ended", True), ("waits", False)):
        write(tmp_path, make(1.0, job, is_finished=is_finished), keep=3)
    assert names(tmp_path) == ["ended-00000001", "waits-00000001"]
    CheckpointSchedule(replace(plan_of(tmp_path), keep_checkpoints_s=0.0)).take()
    assert names(tmp_path) == ["waits-00000001"]


def test_a_job_is_saved_when_it_has_changed(cluster: Cluster, tmp_path: Path) -> None:
    """Its end is a change; without weights there is nothing to save."""
    taker = CheckpointSchedule(plan_of(tmp_path))
    cluster.versions = {"a": 3, "b": -1}
    taker.take()
    taker.take()
    assert names(tmp_path) == ["a-00000001"]
    cluster.versions = {"a": 3, "b": 0}
    taker.take()
    assert names(tmp_path) == ["a-00000001", "b-00000001"]
    cluster.states["a"] = "ended"
    taker.take()
    taker.take()
    assert names(tmp_path) == ["a-00000001", "a-00000002", "b-00000001"]
    for cluster.versions["b"] in range(1, 9):
        taker.take()
    assert len([name for name in names(tmp_path) if name[0] == "b"]) == checkpoint_schedule.KEEP


def test_a_failed_checkpoint_is_announced_and_tried_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker = CheckpointSchedule(plan_of(tmp_path))
    cluster.versions = {"a": 1, "b": 1}
    cluster.failing = {"a": CommandError(Exit.NO_ANSWER, "a worker has stopped")}
    with capture_logs() as lines:
        taker.take()
    assert names(tmp_path) == ["b-00000001"]
    assert lines[0]["event"] == "no checkpoint written; the last one is kept"
    assert (lines[0]["job"], lines[0]["reason"]) == ("a", "a worker has stopped")
    cluster.failing = {}
    taker.take()
    assert names(tmp_path) == ["a-00000001", "b-00000001"]
    cluster.versions["a"] = 2

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(records, "sync", full)
        taker.take()
    assert "No space left" in lines[0]["reason"]
    cluster.failing = {"all": CommandError(Exit.NO_ANSWER, "nobody answers")}
    with capture_logs() as lines:
        taker.take()
    assert lines[0]["reason"] == "nobody answers"
    cluster.failing = {}
    taker.take()
    assert names(tmp_path) == ["a-00000001", "a-00000002", "b-00000001"]


def test_a_job_that_does_not_answer_delays_only_its_own_checkpoint(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def capture(addresses: object, credentials: object, job: str, **_: Any) -> Any:
        if job.startswith("stuck"):
            assert may_go_on.wait(200.0)
            raise CommandError(Exit.NO_ANSWER, "a worker has not sent its residuals: [0]")
        return make(float(cluster.versions[job]), job)

    monkeypatch.setattr(checkpoint_schedule, "capture", capture)
    cluster.versions = {"stuck": 1, "stuck too": 1, "z": 1}
    taker = CheckpointSchedule(replace(plan_of(tmp_path), every_s=0.01))

    def has_newest() -> bool:
        taker.take()  # Once more if the thread of the former one was not over yet.
        return f"z-{cluster.versions['z']:08d}" in names(tmp_path)

    for cluster.versions["z"] in (1, 2, 3):
        eventually(has_newest)
    cluster.versions["z"] = 4
    with capture_logs() as lines:
        may_go_on.set()
        taker.take(is_last=True)
    assert names(tmp_path)[-1] == "z-00000004"
    refused = [line["job"] for line in lines if line["event"].startswith("no checkpoint written")]
    assert set(refused) == {"stuck", "stuck too"}


def test_a_bug_in_one_checkpoint_ends_no_other_one(cluster: Cluster, tmp_path: Path) -> None:
    taker = CheckpointSchedule(plan_of(tmp_path))
    cluster.versions = {"a": 1, "b": 1}
    cluster.failing = {"a": AttributeError("residual_requests")}
    with capture_logs() as lines:
        taker.take()
    assert names(tmp_path) == ["b-00000001"]
    (line,) = [line for line in lines if line["log_level"] == "error"]
    assert (line["job"], line["exc_info"]) == ("a", cluster.failing["a"])
    cluster.failing = {}
    taker.take()
    assert names(tmp_path) == ["a-00000001", "b-00000001"]


def test_two_starts_do_not_write_into_one_folder(cluster: Cluster, tmp_path: Path) -> None:
    cluster.versions = {"a": 1}
    first = CheckpointSchedule(plan_of(tmp_path))  # Its lock is that of the object.
    first.take()
    with capture_logs() as lines:
        CheckpointSchedule(plan_of(tmp_path)).take()
    assert names(tmp_path) == ["a-00000001"]
    assert "another psserver writes its checkpoints into" in lines[0]["reason"]


def test_a_last_checkpoint_is_written_behind_the_one_under_way(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once could mix their files: the last one waits, however long the other takes."""
    under_way: list[int] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: object, **more: object) -> Any:
        under_way.append(1)
        has_begun.set()
        assert may_go_on.wait(200.0)
        assert len(under_way) == 1
        under_way.pop()
        return make(float(cluster.versions["a"]), "a")

    monkeypatch.setattr(checkpoint_schedule, "capture", slow)
    monkeypatch.setattr(sys, "stdin", io.StringIO("last\n"))
    monkeypatch.setattr(os, "_exit", lambda code: None)  # The end of the input ends the process.
    cluster.versions = {"a": 1}
    taker = CheckpointSchedule(replace(plan_of(tmp_path), every_s=0.01))
    thread = threading.Thread(target=taker.run)
    thread.start()
    assert has_begun.wait(200.0)
    cluster.states["a"] = "ended"
    taker.listen()
    may_go_on.set()
    thread.join(200.0)
    assert not thread.is_alive()
    assert names(tmp_path) == ["a-00000001", "a-00000002"]
    assert not under_way


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_stop_that_was_cut_short_is_announced_at_the_next_start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """An engine that kills a container says nothing in its log."""
    cluster.versions = {"a": 1}
    monkeypatch.setattr(os, "_exit", lambda code: None)  # The end of the input ends the process.
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # Each is a process of its own.

    def stop(is_cut: bool) -> list[Any]:
        taker = CheckpointSchedule(plan_of(tmp_path))
        monkeypatch.setattr(sys, "stdin", io.StringIO("last\n"))
        with capture_logs() as lines:
            taker.begin()
        taker.listen()
        if not is_cut:
            taker.run()
        return [line for line in lines if "was cut short" in line["event"]]

    stop(is_cut)
    assert len(stop(is_cut=False)) == is_cut
    assert not stop(is_cut=False)


def test_a_stop_lasts_until_the_last_checkpoint_is_copied(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards end when they are told that it is over, and `psserver stop --servers` returns."""
    cluster.versions = {"a": 1}
    copied: dict[bool, list[str]] = {}
    place, folder = tmp_path / "place", tmp_path / "folder"
    place.mkdir()
    folder.mkdir()

    def note_last(*_: object, is_over: bool) -> None:
        copied[is_over] = names(place)

    monkeypatch.setattr(ask, "note_last", note_last)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("last\n"))
    taker = CheckpointSchedule(replace(plan_of(folder), copies=str(place)))
    taker.begin()
    taker.listen()
    taker.run()
    assert copied == {False: [], True: ["a-00000001"]}


def started(keeper: Keeper) -> subprocess.Popen[str]:
    """Waits for the process, and returns it."""
    process = eventually(lambda: keeper._process)
    assert process is not None
    return process


@pytest.mark.slow
@pytest.mark.parametrize("has_folder", [True, False])
def test_it_is_started_once_and_ends_when_it_is_asked_to(tmp_path: Path, has_folder: bool) -> None:
    """Also where it can take no last one."""
    folder = tmp_path / "checkpoints"
    if not has_folder:
        folder.write_text("")
    keeper = Keeper(last_s=60.0)
    keeper.start(plan_of(folder).to_json)
    keeper.start(lambda: "not asked for again")
    process = started(keeper)
    keeper.last()
    assert process.returncode == 0
    keeper.close()


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    keeper = Keeper(last_s=0.05)
    keeper.start(plan_of(tmp_path).to_json)
    process = started(keeper)
    process.send_signal(signal.SIGSTOP)
    with capture_logs() as lines:
        keeper.last()
    assert process.returncode == -signal.SIGKILL
    assert lines[0]["event"] == "no last checkpoint was written in time; earlier ones are kept"


def test_one_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when descriptors or memory run out for a while."""
    tries = itertools.count()
    popen = subprocess.Popen

    def failing(*arguments: Any, **more: Any) -> Any:
        if next(tries) < 2:
            raise OSError(24, "Too many open files")
        return popen(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", failing)
    monkeypatch.setattr(keepers, "PAUSE_S_MIN", 1e-3)
    keeper = Keeper(last_s=60.0)
    with capture_logs() as lines:
        keeper.start(plan_of(tmp_path).to_json)
        started(keeper)
    assert [line["how"] for line in lines] == [
        "could not be started: [Errno 24] Too many open files"
    ] * 2
    keeper.close()


def test_one_that_has_died_writes_no_last_one_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", failing)
    keeper = Keeper(last_s=60.0)
    with capture_logs() as lines:
        keeper.start(plan_of(tmp_path).to_json)
        eventually(lambda: lines)
        keeper.last()
    said = [line["event"] for line in lines]
    assert said[-1] == "no last checkpoint is written: the process that writes them has died"


def test_without_a_start_there_is_nothing_to_end() -> None:
    keeper = Keeper(last_s=60.0)
    keeper.last()
    keeper.close()


@pytest.mark.slow
def test_its_lines_rotate_the_log_of_the_supervisor(tmp_path: Path) -> None:
    """It may outlast every line of the supervisor's, so it rotates the file that both write."""
    log = tmp_path / "supervisor.log"
    log.write_text("a line of before\n" * (1 << 16))
    plan = replace(plan_of(tmp_path / "checkpoints"), log_file=str(log), log_max_mb=1)
    command = [sys.executable, "-m", "psserver", "schedule", plan.to_json()]
    with (
        log.open("ab") as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdin is not None
        process.stdin.write("last\n")
        process.stdin.flush()
        assert process.wait(200) == 0
    assert former(log).stat().st_size > 1 << 20
    assert log.stat().st_size < 1 << 20
