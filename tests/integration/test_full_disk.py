"""A full disk and a killed shard: the shard comes back, and nobody healthy ends."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Station, Worker
from tests.integration.command import Command, eventually, gone

DEADLINE_S = 200.0
SIZE_MB = 24


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
