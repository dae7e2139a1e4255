"""The supervisor over simulated shards: which it restarts, when, and when it gives up."""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pscore.signals import signal_pipe
from psserver.access.files import Trust
from psserver.exits import CommandError, Exit
from psserver.process import supervisor
from psserver.process.shard_plan import Ready, Refused, Report, ShardPlan
from psserver.process.spare import SpareProcess
from psserver.process.supervisor import (
    ShardProcess,
    SupervisedShard,
    Supervisor,
    ended,
    stop,
    wait_ready,
)

KILLED = -signal.SIGKILL


def make_plan(index: int = 0, num_shards: int = 2) -> ShardPlan:
    return ShardPlan(
        index=index,
        num_shards=num_shards,
        cluster="c",
        host="127.0.0.1",
        port=0,
        metrics_port=None,
        num_threads=1,
        lease_s=10.0,
        grace_s=0.0,
        log_format="text",
        log_level="info",
    )


class Fake(ShardProcess):
    """Reports, then ends, as its script says; a script without an end runs until it is told."""

    scripts: dict[int, Iterator[tuple[Report | None, int | None]]]
    started: list["Fake"]

    def __init__(
        self, plan: ShardPlan, log_file: Path | None = None, spare: SpareProcess | None = None
    ) -> None:
        self.plan = plan
        self.log_file = log_file
        self.spare = spare
        self.report = None
        self.is_ending = self.hangs = False
        self.started_s = time.monotonic()
        self._next, self._status = next(self.scripts[plan.index])
        self._fds = os.pipe()
        os.write(self._fds[1], b"x" * ((self._next is not None) + (self._status is not None)))
        self.started.append(self)

    @property
    def pid(self) -> int:
        return 1000 + self.started.index(self)

    def fileno(self) -> int:
        return self._fds[0]

    def read(self) -> bool:
        os.read(self._fds[0], 1)
        if self.report is None and self._next is not None:
            self.report = self._next
            return True
        return False

    def send(self, number: signal.Signals) -> None:
        self._status = 0
        if number is signal.SIGKILL:
            self._status = KILLED
            os.write(self._fds[1], b"x")

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._status

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


READY = Ready(port=5000, metrics_port=None)
Scripts = dict[int, Iterator[tuple[Report | None, int | None]]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.started = []
    monkeypatch.setattr(supervisor, "ShardProcess", Fake)
    monkeypatch.setattr(supervisor, "PAUSE_S_MIN", 1e-4)
    monkeypatch.setattr(supervisor, "PAUSE_S_MAX", 8e-4)
    return Fake


def run(
    scripts: Scripts, *, restart: bool = True, has_spare: bool = True
) -> tuple[Exit, list[Any], list[Any]]:
    """Returns the exit code, the ports announced at each change, and the log."""
    Fake.scripts = scripts
    announced: list[Any] = []

    def on_ready(shards: Sequence[SupervisedShard]) -> None:
        announced.append([shard.plan.port for shard in shards])

    plans = [make_plan(index) for index in scripts]
    with capture_logs() as lines:
        code = Supervisor(
            plans=plans,
            log_files=[None] * len(plans),
            restart=restart,
            has_spare=has_spare,
            on_ready=on_ready,
            on_end=lambda: announced.append("end"),
        ).run()
    return code, announced, lines


def test_all_drained_is_the_end_with_0(fake: type[Fake]) -> None:
    code, announced, lines = run({0: iter([(READY, 0)]), 1: iter([(READY, 0)])})
    assert code is Exit.OK
    assert announced == [[5000, 5000], "end"]
    assert [line["event"] for line in lines] == ["shard drained", "shard drained"]


def test_a_shard_that_dies_is_started_again_on_its_port(fake: type[Fake]) -> None:
    first = Ready(port=5001, metrics_port=6001)
    code, announced, lines = run({0: iter([(first, KILLED), (first, 0)])})
    assert code is Exit.OK
    assert announced == [[5001], [5001], "end"]
    assert [shard.plan.port for shard in fake.started] == [0, 5001]
    assert [shard.plan.metrics_port for shard in fake.started] == [None, 6001]
    assert lines[0]["event"] == "shard died; it is started again"
    assert lines[0]["how"] == "was killed by SIGKILL"
    assert lines[0]["log_level"] == "error"
    assert lines[1]["event"] == "shard restarted"


def test_pauses_double_up_to_a_limit_and_the_last_restart_is_the_tenth(fake: type[Fake]) -> None:
    dying = [(READY, KILLED)] * 20
    code, _, lines = run({0: iter(dying), 1: iter([(READY, None)])})
    assert code is Exit.SHARD_DIED
    pauses = [line["pause_s"] for line in lines if "pause_s" in line]
    assert pauses == [1e-4, 2e-4, 4e-4, 8e-4, 8e-4, 8e-4, 8e-4, 8e-4, 8e-4, 8e-4]
    assert len(fake.started) == 1 + 1 + 10
    assert lines[-1]["event"] == "shard died"


def test_a_shard_that_has_lived_long_starts_over_with_the_pauses(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SETTLED_S", -1e12)
    code, _, lines = run({0: iter([(READY, KILLED)] * 20 + [(READY, 0)])})
    assert code is Exit.OK
    assert {line["pause_s"] for line in lines if "pause_s" in line} == {1e-4}


def test_without_restart_the_first_death_ends_all(fake: type[Fake]) -> None:
    code, announced, _ = run({0: iter([(READY, KILLED)]), 1: iter([(READY, None)])}, restart=False)
    assert code is Exit.SHARD_DIED
    assert announced[-1] == "end"
    assert fake.started[1].wait() == 0


def test_a_restart_that_is_refused_is_tried_again(fake: type[Fake]) -> None:
    refused = Refused(code=Exit.PORT_TAKEN, message="cannot listen")
    code, _, lines = run({0: iter([(READY, KILLED), (refused, 3), (READY, 0)])})
    assert code is Exit.OK
    assert [line["how"] for line in lines if "how" in line] == [
        "was killed by SIGKILL",
        "cannot listen",
    ]


def test_a_restart_that_hangs_is_killed_and_tried_again(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_S_MAX", 0.01)
    monkeypatch.setattr(supervisor, "SETTLED_S", 0.001)  # A hang does not count as settled.
    code, _, lines = run({0: iter([(READY, KILLED), (None, None), (None, None), (READY, 0)])})
    assert code is Exit.OK
    died = [line for line in lines if line["event"] == "shard died; it is started again"]
    assert [line["how"] for line in died][1:] == ["was not ready within 0.01 s"] * 2
    assert [line["pause_s"] for line in died][-2:] == [2e-4, 4e-4]


class Drained(Fake):
    """A shard that a client asks to end: it serves until its parent says that it may end."""

    def read(self) -> bool:
        if self.report is not None and not self.is_ending:
            self.is_ending = bool(os.read(self._fds[0], 1))
            return True
        return super().read()

    def send(self, number: signal.Signals) -> None:
        self.heard.append(number)
        os.write(self._fds[1], b"x")

    heard: list[object]


def test_a_drained_shard_may_end_when_its_last_checkpoint_is_over(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ShardProcess", Drained)
    Drained.heard = []
    Fake.scripts = {0: iter([(READY, 0)])}
    kept = Supervisor(
        plans=[dataclasses.replace(make_plan(), checkpoint_dir="checkpoints")],
        log_files=[None],
        restart=False,
        on_ready=lambda shards: None,
        on_end=lambda: None,
        before_stop=lambda: Drained.heard.append("checkpoint"),
    )
    assert kept.run() is Exit.OK
    assert Drained.heard == ["checkpoint", signal.SIGINT]


def test_a_shard_that_is_stopped_during_its_start_ends_at_once_without_a_word(
    tmp_path: Path,
) -> None:
    token, log = tmp_path / "token", tmp_path / "log"
    os.mkfifo(token, mode=0o600)
    plan = dataclasses.replace(
        make_plan(num_shards=1), checkpoint_dir=str(tmp_path), trust=Trust(token_file=str(token))
    )
    shard = ShardProcess(plan, log)
    with token.open("wb"):  # The shard reads it now, until this end is closed.
        assert stop([shard], 0.0)
    assert shard.wait() == -signal.SIGTERM
    assert log.read_text() == ""


def test_a_shard_that_cannot_start_says_why_and_the_others_end(fake: type[Fake]) -> None:
    refused = Refused(code=Exit.NOT_PERMITTED, message="cannot listen on port 80")
    with pytest.raises(CommandError, match="shard 1 cannot listen on port 80") as caught:
        run({0: iter([(READY, None)]), 1: iter([(refused, 4)])})
    assert caught.value.code is Exit.NOT_PERMITTED
    assert fake.started[0].wait() == 0


def test_a_shard_that_dies_before_it_is_ready_is_named(fake: type[Fake]) -> None:
    with pytest.raises(CommandError, match="shard 0 ended with exit code 1 before") as caught:
        run({0: iter([(None, 1)])})
    assert caught.value.code is Exit.SHARD_DIED


def test_a_shard_that_says_nothing_is_not_waited_for_without_end(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_S_MAX", 0.01)
    with pytest.raises(CommandError, match=r"did not answer within 0\.01 s"):
        run({0: iter([(None, None)])})


def test_a_signal_ends_the_wait_for_readiness(fake: type[Fake]) -> None:
    fake.scripts = {0: iter([(None, None)])}
    shard = fake(make_plan())
    with signal_pipe([signal.SIGTERM]) as (wake_fd, _):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not wait_ready([shard], wake_fd)
    assert wait_ready([], None)
    shard.close()


def test_the_former_handlers_come_back() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with signal_pipe([signal.SIGTERM]):
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former


def test_the_end_of_a_process_is_told_in_words() -> None:
    assert ended(-9) == "was killed by SIGKILL"
    assert ended(3) == "ended with exit code 3"


def test_a_machine_without_room_for_a_process_is_asked_again(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other shards continue meanwhile."""
    failing = iter([True])

    class Failing(Fake):
        def __init__(
            self, plan: ShardPlan, log_file: Path | None = None, spare: SpareProcess | None = None
        ) -> None:
            if len(Fake.started) == 2 and next(failing, False):
                raise OSError(28, "No space left on device")
            super().__init__(plan, log_file, spare)

    monkeypatch.setattr(supervisor, "ShardProcess", Failing)
    monkeypatch.setattr(supervisor, "RESTARTS_MAX", 1)
    scripts: Scripts = {0: iter([(READY, KILLED), (READY, KILLED)]), 1: iter([(READY, None)])}
    code, _, lines = run(scripts)
    assert code is Exit.SHARD_DIED
    assert [line["event"] for line in lines if "shard" in line][:3] == [
        "shard died; it is started again",
        "shard cannot be started; the start is tried again",
        "shard restarted",
    ]


class Spare(SpareProcess):
    """Counts what the supervisor asks of its spare process."""

    asked: list[str]

    def start(self) -> None:
        self.asked.append("start")
        os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        self.asked.append("end")


@pytest.mark.parametrize(("restart", "wanted"), [(True, True), (False, True), (True, False)])
def test_a_spare_process_is_started_behind_the_shards_if_one_may_be_needed(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch, restart: bool, wanted: bool
) -> None:
    monkeypatch.setattr(supervisor, "SPARE_AFTER_S", 1e-4)
    monkeypatch.setattr(supervisor, "SpareProcess", Spare)
    Spare.asked = []
    is_kept = restart and wanted
    script = (READY, None) if is_kept else (READY, 0)
    code, _, _ = run({0: iter([script])}, restart=restart, has_spare=wanted)
    assert code is Exit.OK
    assert Spare.asked == (["start"] if is_kept else []) + ["end", "end"]


def test_the_spare_process_is_for_shards_that_are_started_again(fake: type[Fake]) -> None:
    run({0: iter([(READY, KILLED), (READY, 0)])})
    assert [shard.spare is None for shard in fake.started] == [True, False]
