"""Without journals a killed shard comes back with its last snapshot, and training goes on."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import psworker
from tests.integration.cluster import Station, Worker, WorkerError
from tests.integration.command import Command, eventually

DEADLINE_S = 60.0


class Cluster:
    """Two shards under their supervisor, with a state directory."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command = command
        self.folder = folder
        run = json.loads((next(folder.glob("*/run.json"))).read_text())
        self.addresses = [f"127.0.0.1:{shard['port']}" for shard in run["shards"]]

    def pid(self, index: int) -> int:
        run = json.loads((next(self.folder.glob("*/run.json"))).read_text())
        return int(run["shards"][index]["pid"])

    def workers(self, count: int, compressor: str = "none") -> list[Worker]:
        return [
            Worker(
                train,
                rank,
                (compressor,),
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "PACELINE_SERVERS": ",".join(self.addresses),
                    "PACELINE_JOB": "survivor",
                },
            )
            for rank in range(count)
        ]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    command = Command(tmp_path)
    folder = tmp_path / "state"
    options = ("--state-dir", folder, "--snapshot-s", 0.2, "--durability", "memory")
    ports = ("--port", 0, "--metrics-port", 0)
    with command.spawn("start", "--shards", 2, *ports, *options) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("PACELINE_SERVERS=")
        yield Cluster(command, folder)


def train(station: Station, compressor: str) -> list[float]:
    """Trains until told to end; says each step. The loss falls if the weights are kept."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(
        plain,
        model.named_parameters(),
        compression=compressor,
        pull_compression=compressor,
        compress_min_nbytes=1024,
    )
    inputs = torch.randn(32, 64)
    losses = []
    step = 0
    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step % 5 == 0:
            station.tell(step)
            if station.hear() == "end":
                return losses


def run_until(worker: Worker, step: int) -> None:
    while worker.hear(DEADLINE_S) < step:
        worker.tell("go on")


def saved(cluster: Cluster, shard: int, after_ns: int = 0) -> int:
    """Waits for a snapshot of a shard that is newer than `after_ns`, and returns when it was."""
    folder = cluster.folder / f"shard-{shard}-of-2"

    def newest() -> int:
        times = [path.stat().st_mtime_ns for path in folder.glob("*.safetensors")]
        return max([when for when in times if when > after_ns], default=0)

    return eventually(newest)


@pytest.mark.parametrize("compressor", ["none", "int8"])
def test_training_goes_on_after_a_shard_was_killed(cluster: Cluster, compressor: str) -> None:
    """With compressed pulls the shard has forgotten the estimate, and begins with the whole."""
    (worker,) = cluster.workers(1, compressor)
    run_until(worker, 50)
    saved(cluster, 0, saved(cluster, 0))
    victim = cluster.pid(0)
    os.kill(victim, signal.SIGKILL)
    worker.tell("go on")
    run_until(worker, 80)
    assert cluster.pid(0) != victim
    worker.tell("end")
    losses = worker.result(DEADLINE_S)
    worker.close()
    assert losses[-1] < losses[40] * 1.5 < losses[0]


def test_weights_that_were_not_saved_are_not_begun_anew_in_silence(
    cluster: Cluster, tmp_path: Path
) -> None:
    (worker,) = cluster.workers(1)
    run_until(worker, 10)
    saved(cluster, 0)
    victim = cluster.pid(0)
    os.kill(victim, signal.SIGSTOP)  # It writes nothing more.
    for path in (cluster.folder / "shard-0-of-2").glob("*"):
        path.unlink()
    os.kill(victim, signal.SIGKILL)
    worker.tell("go on")
    with pytest.raises(WorkerError, match=r"StateLostError: .* without the weights"):
        run_until(worker, 80)
    worker.close()
