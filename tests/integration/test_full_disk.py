"""A full disk and a killed shard: nobody healthy ends, and workers report exactly what is lost."""

import json
import os
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
from tests.integration.command import Command, eventually, gone

DEADLINE_S = 200.0
SIZE_MB = 64


def may_mount() -> bool:
    """Whether this user may mount a file system of its own; else there is no small disk to fill."""
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


class OnSmallDisk(Command):
    """`psserver` in a mount namespace in which its folder is a file system of its own."""

    def line(self, *arguments: object) -> list[str]:
        mount = f"mount -t tmpfs -o size={SIZE_MB}m tmpfs {self.folder}"
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
        Its clock, the fewest steps that are in a weight, and the steps that it reports as missed.
    """
    parts = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(2)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(torch.optim.SGD(parts, lr=1.0), named)
    station.tell(0)
    station.hear()
    while not station.is_told():
        for part in parts:
            part.grad = torch.ones_like(part)
        optimizer.step()
        station.tell(optimizer.clock)
    clock = optimizer.clock
    optimizer.close()
    return clock, min(-int(part.detach().max()) for part in parts), optimizer.missed.num_steps


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
    ports = ("--port", 0, "--metrics-port", 0)
    with command.spawn("start", "--shards", 2, *ports, "--state-dir", tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("PACELINE_SERVERS=")
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
            assert run_file(state) == run  # That of the shard's new process had no room.
            assert process.poll() is None
            assert not gone(pids[1])
            worker.tell()
            worker.result(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_workers_report_exactly_the_steps_that_had_no_journal(tmp_path: Path) -> None:
    """The others push before rank 0, and their pushes need room that the disk does not have."""
    command = OnSmallDisk(tmp_path)
    places = ("--port", 0, "--metrics-port", 0, "--state-dir", tmp_path)
    options = ("--shards", 2, "--lease-s", 100, "--checkpoint-s", 1, "--log-level", "warning")
    with ExitStack() as stack:
        process = stack.enter_context(command.spawn("start", *places, *options))
        assert process.stdout is not None
        assert process.stdout.readline().startswith("PACELINE_SERVERS=")
        state = Path(f"/proc/{process.pid}/root{tmp_path}")
        run = run_file(state)
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

        def exposed() -> bool:
            fill(state)  # A checkpoint that was being written gives its room back.
            found = [one.jobs[0] for one in ask.statuses(run["addresses"])]
            return all(t.num_exposed == t.num_slices for job in found for t in job.tables)

        reach(0)
        eventually(lambda: any((state / "checkpoints").glob("night-*")))
        fill(state)
        for worker in workers[1:]:
            worker.tell()
        eventually(exposed)
        workers[0].tell()
        reach(30)
        eventually(exposed)  # A checkpoint may have given its room to the journals meanwhile.
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: gone(pids[0]))
        reach(workers[1].hear(DEADLINE_S) + 20)
        for worker in workers:
            worker.tell()
        for clock, counted, missed in results_of(workers):
            assert missed == clock - counted >= 0
