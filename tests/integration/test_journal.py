"""Shards killed under load come back with all they had acknowledged: to the bit, and unasked."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Station, Worker
from tests.integration.command import Command, lasting_ports, live_shards, require_started

DEADLINE_S = 200.0
STEPS = 60
KILLS = 4


class Shards:
    """Two shards under their supervisor; journals where the command puts them by itself."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._rng = random.Random(7)

    def addresses(self) -> list[str]:
        return list(self.command.run_file()["addresses"])

    def pids(self) -> list[int]:
        return live_shards(self.command.folder)

    def kill(self) -> None:
        """Kills a random shard."""
        os.kill(self._rng.choice(self.pids()), signal.SIGKILL)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    command = Command(tmp_path)
    with command.spawn("start", "--shards", 2, *lasting_ports()) as process:
        require_started(process)
        yield Shards(command)


def train(station: Station, optimizer: str, mode: str, compression: str) -> list[float]:
    """Trains; says each step and waits for leave to continue. Returns the weights."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    kind, arguments = OPTIMIZERS[optimizer]
    wrapped = psworker.DistributedOptimizer(
        kind(model.parameters(), **arguments),
        model.named_parameters(),
        mode=mode,
        compression=compression,
    )
    torch.manual_seed(100 + station.rank)
    for step in range(STEPS):
        inputs = torch.randn(16, 64)
        wrapped.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        wrapped.step()
        if station.rank == 0 and step % 10 == 9:
            station.tell(step)
            station.hear()
    with wrapped.global_weights():
        return [value for tensor in model.parameters() for value in tensor.flatten().tolist()]


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 0.001}),
}


def run(shards: Shards, job: str, kills: int, arguments: tuple[Any, ...]) -> list[float]:
    servers = ",".join(shards.addresses())
    workers = [
        Worker(
            train,
            rank,
            arguments,
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PACELINE_SERVERS": servers,
                "PACELINE_JOB": job,
            },
        )
        for rank in range(2)
    ]
    for _ in range(STEPS // 10):
        workers[0].hear(DEADLINE_S)
        if kills:
            shards.kill()
            kills -= 1
        workers[0].tell("continue")
    results = [worker.result(DEADLINE_S) for worker in workers]
    for worker in workers:
        worker.close()
    assert results[0] == results[1]
    weights: list[float] = results[0]
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mode", "compression"),
    [
        ("sgd", "ssgd", "none"),
        ("nadam", "ssd(steps=3, warmup=4)", "none"),
        ("sgd", "cd(steps=4)", "2bit"),
    ],
)
def test_training_through_killed_shards_has_the_same_bits(
    shards: Shards, optimizer: str, mode: str, compression: str
) -> None:
    calm = run(shards, "calm", 0, (optimizer, mode, compression))
    assert run(shards, "killed", KILLS, (optimizer, mode, compression)) == calm
