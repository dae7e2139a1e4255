"""A full disk and a killed shard: nobody healthy ends, and workers report exactly what is lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from psserver.remote import ask
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.command import Command, eventually, gone, lasting_ports, require_started

DEADLINE_S = 200.0
SIZE_MB = 64


def may_mount() -> bool:
    """Whether this user may mount a file system of its own; else there is no small disk to fill."""
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


class OnSmallDisk(Command):
    """`psserver` in a mount namespace in which its folder is a file system of its own."""

    then = "true"  # A command of the shell once that is mounted.

    def line(self, *arguments: object) -> list[str]:
        mount = f"mount -t tmpfs -o size={SIZE_MB}m tmpfs {self.folder} && {self.then}"
        return [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            *super().line(*arguments),
        ]


def train(station: Station) -> None:
    """Makes steps until told to end, and says each."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(plain, model.named_parameters())
    while not station.is_told():
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        station.tell(optimizer.clock)


def count(station: Station) -> tuple[int, int, int]:
    """Subtracts 1 from each weight at each step, from when it is told to until it is told again.

    Returns:
        The number of its steps, the fewest steps that are in a weight, and the steps that it
        reports as missed. Its clock may be further: with a rejoin it goes on where the others do.
    """
    parts = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(2)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(torch.optim.SGD(parts, lr=1.0), named)
    station.tell(0)
    station.hear()
    made = 0
    while not station.is_told():
        for part in parts:
            part.grad = torch.ones_like(part)
        optimizer.step()
        made += 1
        station.tell(optimizer.clock)
    optimizer.close()
    return made, min(-int(part.detach().max()) for part in parts), optimizer.missed.num_steps


def writer_of_checkpoints(daemon: int) -> int:
    """Returns the process that takes the scheduled checkpoints of a daemon."""
    for child in Path(f"/proc/{daemon}/task").glob("*/children"):
        for pid in map(int, child.read_text().split()):
            if b"schedule" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    raise LookupError(f"process {daemon} has no process that writes checkpoints")


def run_file(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(next(folder.glob("*/run.json")).read_text())
    return run


@contextmanager
def one_worker(addresses: list[str]) -> Iterator[Worker]:
    names = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_JOB": "night"}
    worker = Worker(train, 0, (), {**names, "PACELINE_SERVERS": ",".join(addresses)})
    try:
        yield worker
    finally:
        worker.close()


def fill(folder: Path) -> Path:
    """Leaves no room in a file system; returns the file that takes it."""
    path = folder / "filler"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(fd, bytes(1 << 12)) == 1 << 12:
            pass
    except OSError:
        pass
    finally:
        os.close(fd)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_one_killed_shard_on_a_full_disk_comes_back_and_nobody_else_ends(tmp_path: Path) -> None:
    command = OnSmallDisk(tmp_path)
    with command.spawn(
        "start", "--shards", 2, *lasting_ports(), "--state-dir", tmp_path
    ) as process:
        require_started(process)
        state = Path(f"/proc/{process.pid}/root{tmp_path}")
        run = run_file(state)
        pids = [shard["pid"] for shard in run["shards"]]
        with one_worker(run["addresses"]) as worker:
            while worker.hear(DEADLINE_S) < 5:
                pass
            fill(state)
            os.kill(pids[0], signal.SIGKILL)
            eventually(lambda: gone(pids[0]))
            step = worker.hear(DEADLINE_S)
            while worker.hear(DEADLINE_S) < step + 20:  # Beyond what was on its way.
                pass
            # Its run file needs no more room; it is written a moment after the shard is back.
            eventually(lambda: run_file(state)["shards"][0]["pid"] not in (None, pids[0]))
            assert process.poll() is None
            assert not gone(pids[1])
            worker.tell()
            worker.result(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_shard_that_begins_on_a_full_disk_serves_unless_it_is_detached(tmp_path: Path) -> None:
    command = OnSmallDisk(tmp_path)
    command.then = f"! cat /dev/zero > {tmp_path}/filler"
    start = ("start", *lasting_ports(), "--state-dir", tmp_path)
    with command.spawn(*start) as process:
        require_started(process)
    said = command.run(*start, "--detach", code=5).stderr
    assert "run.json: No space left on device; make room there" in said


@pytest.mark.slow
def test_workers_report_exactly_the_steps_that_had_no_journal(tmp_path: Path) -> None:
    """A shard that may write no file is killed, 30 steps after its journals have ended.

    On a full disk an ended journal gives its room to the next one, so which steps are without a
    journal is a matter of luck. A limit of the process leaves no room at all.
    """
    command = Command(tmp_path)
    places = (*lasting_ports(), "--state-dir", tmp_path)
    options = ("--shards", 2, "--lease-s", 100, "--checkpoint-s", 1, "--log-level", "warning")
    with ExitStack() as stack:
        process = stack.enter_context(command.spawn("start", *places, *options))
        require_started(process)
        run = run_file(tmp_path)
        pids = [shard["pid"] for shard in run["shards"]]
        names = {"WORLD_SIZE": "6", "PACELINE_JOB": "night", "PACELINE_DATA_PLANE": "tcp"}
        names["PACELINE_SERVERS"] = ",".join(run["addresses"])
        workers = [Worker(count, rank, (), {**names, "RANK": str(rank)}) for rank in range(6)]
        for worker in workers:
            stack.callback(worker.close)

        def reach(steps: int) -> None:
            for worker in workers:
                while worker.hear(DEADLINE_S) < steps:
                    pass

        def step() -> int:
            """Returns the step of the first shard if all its journals have ended; else 0."""
            (table,) = ask.statuses(run["addresses"][:1])[0].jobs[0].tables
            return table.version_max if table.num_exposed == table.num_slices else 0

        reach(0)
        eventually(lambda: any((tmp_path / "checkpoints").glob("night-*")))
        writer = writer_of_checkpoints(process.pid)
        os.kill(writer, signal.SIGSTOP)  # The shard would continue from its next checkpoint.
        resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (0, 0))
        for worker in workers:
            worker.tell()
        eventually(lambda: step() > 0)
        reach(step() + 30)
        assert step() > 30
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: gone(pids[0]))
        os.kill(writer, signal.SIGCONT)
        reach(workers[1].hear(DEADLINE_S) + 20)
        for worker in workers:
            worker.tell()
        for made, counted, missed in (results := results_of(workers)):
            lost = made - counted
            # The step under way may hold the others' gradients and not those of this worker.
            assert 30 <= lost <= missed <= lost + 1, results
