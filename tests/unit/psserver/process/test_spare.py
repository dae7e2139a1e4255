"""The spare process: it becomes a shard, also in its log, and ends when nobody needs it."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from psserver.process.shard_plan import Ready
from psserver.process.spare import SPARE, SpareProcess, start_process
from psserver.process.supervisor import ShardProcess, stop, wait_ready
from tests.unit.psserver.process.test_supervisor import make_plan


def test_a_spare_process_becomes_the_shard_of_a_plan_and_writes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "shard-1.log"
    plan = replace(make_plan(index=1), log_file=str(log), log_max_mb=1)
    spare = SpareProcess()
    spare.start()
    pid = spare.pid
    shard = ShardProcess(plan, log, spare)
    try:
        assert wait_ready([shard])
        assert shard.pid == pid
        assert isinstance(shard.report, Ready)
        assert Path(f"/proc/{shard.pid}/comm").read_text() == "shard-1-of-2\n"
        assert Path(f"/proc/{shard.pid}/fd/2").resolve() == log
    finally:
        assert stop([shard], 5.0)
    assert "shard ready" in log.read_text()
    assert spare.take(plan) is None


def test_a_spare_process_that_has_died_is_not_taken() -> None:
    spare = SpareProcess()
    spare.start()
    pid = spare.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert spare.take(make_plan()) is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_spare_process_ends_with_its_supervisor_and_when_it_is_told() -> None:
    alone = start_process(SPARE)
    assert alone.stdin is not None
    assert alone.stdout is not None
    alone.stdin.close()
    assert alone.wait() == 0
    alone.stdout.close()
    spare = SpareProcess()
    spare.start()
    pid = spare.pid
    spare.end()
    assert not Path(f"/proc/{pid}").exists()
    spare.end()


def test_a_machine_without_room_has_no_spare_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    spare = SpareProcess()
    spare.start()
    assert spare.take(make_plan()) is None
