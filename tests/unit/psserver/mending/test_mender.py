"""Sets all shards back to the newest whole checkpoint when one has lost a job."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.exits import CommandError, Exit
from psserver.mending import mender as module
from psserver.mending.mender import Mender
from psserver.remote import ask
from psserver.remote.checkpoint_files import write
from psserver.standby.menders import LEASE_S
from tests.unit.psserver.mending.test_losses import shard
from tests.unit.psserver.remote.test_checkpoint_files import make


class Cluster:
    """Two shards whose answers the test sets, and the restores that the mender makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[pb.StatusReply | CommandError] = [shard(1, a=7), shard(2, a=7)]
        self.restored: list[tuple[Any, ...]] = []
        # Seconds after each question while a restore runs, which ends with the last one.
        self.pauses_s: list[float] = []
        self.is_restoring, self.is_asked = threading.Event(), threading.Event()
        self.refusal: CommandError | None = None
        self.requests: list[pb.StatusRequest] = []
        self.now_s = 0.0
        self.answer_s = 0.0  # How long an answer takes.
        monkeypatch.setattr(ask, "answers", self.answer)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(module, "restore", self.restore)

    def answer(
        self, addresses: Any, credentials: Any, request: pb.StatusRequest | None = None
    ) -> list[pb.StatusReply | CommandError]:
        self.now_s += self.answer_s
        if request is not None:
            self.requests.append(request)
            if self.is_restoring.is_set() and self.pauses_s:
                self.now_s += self.pauses_s.pop(0)
                if not self.pauses_s:
                    self.is_asked.set()
        return self.answers

    def restore(
        self, addresses: Any, credentials: Any, checkpoint: Any, job: str, order: Any, **how: bool
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.pauses_s:
            self.is_restoring.set()
            assert self.is_asked.wait(60)
        self.restored.append((job, checkpoint.tables[0].arrays["weights"], order, how))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_all_shards_go_back_the_one_that_lost_its_part_last(
    cluster: Cluster, tmp_path: Path
) -> None:
    for value in (1.0, 2.0):
        write(tmp_path, make(value, "a"), keep=3)
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.answers = [shard(3), shard(2, a=7)]
    mender.look()
    ((job, weights, order, how),) = cluster.restored
    assert (job, order, how) == ("a", [1, 0], {"replaces": True})
    assert float(next(iter(weights.values())).flat[0]) == 2.0


def test_a_shard_that_loses_a_job_directly_after_its_first_checkpoint_is_mended(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No look has found the job on it. A later look knows it by itself."""
    new = [shard(1), shard(2)]
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    for answers in (new, []):  # The first look, or none, precedes it.
        cluster.answers = list(answers)
        mender.look()
        mender.note("a", [shard(1, a=1), shard(2, a=1)])
        write(tmp_path, make(1.0, "a"), keep=3)
        cluster.answers = [shard(1, a=2), shard(3)]
        mender.look()
        assert len(cluster.restored) == 1
        cluster.answers = [shard(1, a=1), shard(3, a=1)]
        mender.look()
        mender.note("a", [shard(1, a=2), shard(2, a=2)])  # It had waited, and is of the former one.
        mender.look()
        assert len(cluster.restored) == 1
        cluster.restored.clear()
        mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)


def test_a_shard_without_slices_of_a_job_loses_nothing_after_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.note("a", [shard(1, a=1), shard(2, a=None)])
    write(tmp_path, make(1.0, "a"), keep=3)
    for answers in ([shard(1, a=2), shard(2, a=None)], [shard(1, a=2), shard(3)]):
        cluster.answers = list(answers)
        mender.look()
    assert not cluster.restored


def test_a_shard_that_refuses_is_asked_again_and_logged_once(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.answers = [shard(1, a=9), shard(5, a=-1)]
    for _ in range(3):
        mender.look()
    written = capsys.readouterr()
    assert (written.out + written.err).count("no checkpoint of it can be used") == 1
    write(tmp_path, make(1.0, "a"), keep=3)
    cluster.refusal = CommandError(Exit.NO_ANSWER, "b:1 does not answer")
    mender.look()
    assert not cluster.restored
    cluster.refusal = None
    mender.look()
    assert len(cluster.restored) == 1


def test_it_reports_the_standbys_that_it_knows(cluster: Cluster, tmp_path: Path) -> None:
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    second = shard(2, a=7)
    second.next_address = "c:1"
    cluster.answers = [shard(1, a=7), second]
    for _ in range(2):
        mender.look()
    assert [list(one.next_addresses) for one in cluster.requests] == [["", ""], ["", "c:1"]]
    assert len({one.mender for one in cluster.requests}) == 1


@pytest.mark.parametrize("pause_s", [module.LATE_S, module.LATE_S + 1])
def test_it_restores_nothing_that_was_lost_while_it_was_stopped(
    pause_s: float, cluster: Cluster, tmp_path: Path
) -> None:
    write(tmp_path, make(1.0, "a"), keep=3)
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.now_s += pause_s
    cluster.answers = [shard(1, a=7), shard(5, a=-1)]
    for _ in range(2):
        mender.look()
    assert bool(cluster.restored) is (pause_s <= module.LATE_S)
    assert module.LATE_S < LEASE_S


@pytest.mark.parametrize("answer_s", [1.0, module.LATE_S])
def test_it_restores_nothing_that_was_lost_while_it_was_stopped_in_a_question(
    answer_s: float, cluster: Cluster, tmp_path: Path
) -> None:
    write(tmp_path, make(1.0, "a"), keep=3)
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.now_s += 1
    cluster.answer_s, cluster.answers = answer_s, [shard(1, a=7), shard(5, a=-1)]
    mender.look()
    cluster.answer_s = 0.0
    mender.look()
    assert bool(cluster.restored) is (answer_s < module.LATE_S)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_restores_nothing_of_a_shard_that_is_silent_when_it_runs_again(
    is_stopped: bool, cluster: Cluster, tmp_path: Path
) -> None:
    write(tmp_path, make(1.0, "a"), keep=3)
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.now_s += module.LATE_S + is_stopped
    for second in (CommandError(Exit.NO_ANSWER, "b:1"), shard(5, a=-1), shard(5, a=-1)):
        cluster.answers = [shard(1, a=7), second]
        mender.look()
    assert bool(cluster.restored) is not is_stopped
    cluster.answers = [shard(1, a=7), shard(5, a=8)]
    mender.look()
    cluster.answers = [shard(1, a=7), shard(6, a=-1)]
    mender.look()
    assert cluster.restored  # A later loss is restored.


@pytest.mark.parametrize("pause_s", [7, module.LATE_S + 1])
def test_it_restores_what_was_lost_during_a_long_restore(
    pause_s: float, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.001)
    write(tmp_path, make(1.0, "a"), keep=3)
    mender = Mender(["a:1", "b:1"], [tmp_path], lambda: ANYONE)
    mender.look()
    cluster.answers, cluster.pauses_s = [shard(1, a=7), shard(5, a=-1)], [7, pause_s, 7]
    mender.look()
    cluster.answers = [shard(6, a=-1), shard(5, a=7)]
    mender.look()
    assert len(cluster.restored) == (2 if pause_s == 7 else 1)
