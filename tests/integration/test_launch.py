"""`psworker run` with small programs as workers: ends, failures and signals."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from psworker.commands.run import Launch, LaunchPlan, OnFailure
from psworker.job.place import LaunchPlace
from tests.integration import warm

NO_SHARD = ("127.0.0.1:1",)  # The workers here never ask it.
LOOP = "while true; do sleep 0.05; done"


class Job:
    """A launch in this process, with its output and its messages."""

    def __init__(self, script: str, **options: object) -> None:
        options = {"grace_s": 3600.0} | options  # Nobody is killed because the machine is slow.
        self.lines: list[tuple[int, str]] = []
        self.told: list[str] = []
        self.on_line: Callable[[int, str], None] = lambda rank, line: None
        plan = LaunchPlan(
            command=("sh", "-c", script),
            place=LaunchPlace.alone(2),
            servers=NO_SHARD,
            job="j",
            **options,  # type: ignore[arg-type]
        )
        self.on_told: Callable[[], object] = lambda: None
        self.launch = Launch(plan, write=self.write, tell=self.tell)

    def write(self, rank: int, line: str, target: IO[str]) -> None:
        self.lines.append((rank, line.rstrip()))
        self.on_line(rank, line.rstrip())

    def tell(self, message: str) -> None:
        self.told.append(message)
        if "failed with status" in message:
            self.on_told()

    def said(self, rank: int) -> list[str]:
        return [line for speaker, line in self.lines if speaker == rank]


def once_both_have(said: str, act: Callable[[], None]) -> Callable[[int, str], None]:
    """Returns what calls `act` when both workers have said `said`."""
    ranks: set[int] = set()
    lock = threading.Lock()

    def hear(rank: int, line: str) -> None:
        with lock:
            if line == said and rank not in ranks:
                ranks.add(rank)
                if len(ranks) == 2:
                    act()

    return hear


def test_all_that_workers_say_has_come_when_a_launch_ends() -> None:
    job = Job('echo "rank $RANK of $WORLD_SIZE"; echo aside >&2; printf "no end"')
    assert job.launch.run() == 0
    for rank in (0, 1):
        assert sorted(job.said(rank)) == sorted([f"rank {rank} of 2", "aside", "no end"])


def test_a_failure_stops_the_others_and_gives_its_status() -> None:
    job = Job(f"test $RANK = 0 && exit 3; {LOOP}")
    assert job.launch.run() == 3
    assert "worker 0 (process " in job.told[-1]
    assert "failed with status 3; stopping the others (--on-failure stop)" in job.told[-1]


def after_a_failure(tmp_path: Path, command: str) -> Job:
    """Returns a job in which worker 0 fails with 3, and then worker 1 runs a command."""
    told = tmp_path / "told"
    wait = f"until test -e {told}; do sleep 0.05; done"
    job = Job(f"test $RANK = 0 && exit 3; {wait}; {command}", on_failure=OnFailure.CONTINUE)
    job.on_told = told.touch
    return job


def test_after_a_failure_the_others_may_continue(tmp_path: Path) -> None:
    job = after_a_failure(tmp_path, "echo done")
    assert job.launch.run() == 3
    assert job.said(1) == ["done"]
    assert "the others continue (--on-failure continue)" in job.told[-1]


def test_the_first_failure_gives_the_status(tmp_path: Path) -> None:
    job = after_a_failure(tmp_path, "exit 4")
    assert job.launch.run() == 3
    assert "worker 1 (process " in job.told[-1]


def test_a_signal_that_ended_a_worker_is_named() -> None:
    job = Job(f"test $RANK = 1 && kill -SEGV $$; {LOOP}")
    assert job.launch.run() == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV; stopping the others" in job.told[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_worker_once(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    job = Job(f"trap 'echo got {name}; exit 0' {name}; echo ready; {LOOP}")
    job.on_line = once_both_have("ready", lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    assert job.launch.run() == 128 + number
    assert [job.said(rank).count(f"got {name}") for rank in (0, 1)] == [1, 1]
    assert signal.getsignal(number) is before


def test_processes_that_a_worker_started_get_the_signal_too() -> None:
    job = Job('sh -c \'trap "echo child; exit" TERM; echo ready; ' + LOOP + "' & wait; wait")
    job.on_line = once_both_have("ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert job.launch.run() == 128 + signal.SIGTERM
    assert "child" in job.said(0)


def test_a_worker_that_outlives_its_grace_period_is_killed() -> None:
    job = Job(f"trap '' TERM; echo ready; {LOOP}", grace_s=0.2)
    job.on_line = once_both_have("ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert job.launch.run() == 128 + signal.SIGTERM
    assert job.told[-1] == "killing what has not ended within 0.2 s: worker 0, 1"


def test_a_second_signal_kills_at_once() -> None:
    job = Job(f"trap 'echo no' INT; echo ready; {LOOP}", grace_s=3600.0)
    once = once_both_have("ready", lambda: os.kill(os.getpid(), signal.SIGINT))
    twice = once_both_have("no", lambda: os.kill(os.getpid(), signal.SIGINT))
    job.on_line = lambda rank, line: (once(rank, line), twice(rank, line))[0]
    assert job.launch.run() == 128 + signal.SIGINT


@pytest.mark.slow
def test_shards_start_for_a_job_and_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "w.py"
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['PACELINE_SERVERS'], *sys.argv[1:])\n"
    )
    command = ("run", "--workers", "2", "--shards", "2", "--job", "mine", "--", str(script), "-x")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    done = warm.run(["-m", "psworker", *command], env=kept, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "job mine: 2 workers, 2 shards on this machine" in done.stderr
    servers = done.stderr.partition("machine (")[2].partition(")")[0]
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} {servers} -x" for r in (0, 1)]
    assert len(servers.split(",")) == 2
