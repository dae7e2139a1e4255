"""Rounds with a quorum through real shards: a learner and a shard are killed, and nobody stops."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import psworker
from tests.integration.cluster import Station, Worker
from tests.integration.command import Command, lasting_ports, require_started

MODES = (
    "diloco(steps=2, quorum=2, window=0.1)",
    "diloco(steps=2, quorum=2, window=0.1, fragments=2, overlap=mirror, delay=1)",
)
LEASE_S, DEADLINE_S = 600, 200.0
WHILE_S = 0.5  # Several windows.


def learn(me: Station, mode: str) -> int:
    """Trains until it is told to end; tells the time and the clock of each round."""
    torch.manual_seed(1)
    model = torch.nn.Linear(96, 96)  # Two slices, one on each shard.
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = psworker.DistributedOptimizer(
        inner, model.named_parameters(), mode=mode, samples=4.0
    )
    rounds = 0
    while not me.is_told():
        for _ in range(2):
            inputs = torch.randn(4, 96)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
        rounds += 1
        me.tell((time.monotonic(), optimizer.clock))
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    psworker.shutdown()
    return rounds


def learner(servers: str, mode: str, rank: int, restart: int = 0) -> Worker:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "PACELINE_SERVERS": servers,
        "PACELINE_JOB": "quorum",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }
    return Worker(learn, rank, (mode,), environment)


def after(each: Worker, since_s: float) -> int:
    """Returns a worker's clock at its first round that ends after a time, long before the lease."""
    while True:
        at_s, clock = each.hear(LEASE_S / 2)
        if at_s > since_s:
            return int(clock)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_learner_and_a_killed_shard_stop_nobody(tmp_path: Path, mode: str) -> None:
    """The lease is far longer than the test: without a quorum the others would wait for it."""
    command = Command(tmp_path)
    options = ("--shards", 2, *lasting_ports(), "--lease-s", LEASE_S)
    with command.spawn("start", *options) as process:
        require_started(process)
        (found,) = command.folder.glob("paceline/*/run.json")
        run = json.loads(found.read_text())
        servers = ",".join(run["addresses"])
        learners = [learner(servers, mode, rank) for rank in range(3)]
        try:
            for each in learners:
                each.hear(DEADLINE_S)
            learners[2].kill()
            since_s = time.monotonic() + WHILE_S
            for each in learners[:2]:
                after(each, since_s)
            os.kill(int(run["shards"][0]["pid"]), signal.SIGKILL)
            since_s = time.monotonic() + WHILE_S
            clocks = [after(each, since_s) for each in learners[:2]]
            learners[2].close()
            learners[2] = learner(servers, mode, 2, restart=1)
            assert after(learners[2], 0.0) >= min(clocks)  # It begins where the others are.
            for each in learners:
                each.tell("end")
            assert all(each.result(DEADLINE_S) > 0 for each in learners)
        finally:
            for each in learners:
                each.close()
