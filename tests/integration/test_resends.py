"""A shard that is killed again while its worker sends again: no wait is longer than the limit."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import psworker
from pscore.net.channel import FrameChannel
from tests.integration.cluster import Station, Worker, new_job
from tests.integration.command import Command, eventually, gone, lasting_ports
from tests.integration.test_journal import Shards

NUMEL = 1 << 20  # One slice of 4 MiB: more than the kernel keeps of it.
KILLS = 3


def train(me: Station, steps: int) -> list[float]:
    """Trains; stops at each new connection with requests that are to be sent again."""
    weights = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0), [("w", weights)], overlap=False
    )
    name = "_resume"
    resume = getattr(FrameChannel, name)

    def stopping(channel: FrameChannel[Any], stream: Any) -> None:
        if vars(channel)["_open"]:
            me.tell("sends again")
            me.hear()
        resume(channel, stream)

    weights.grad = torch.ones(NUMEL)
    with mock.patch.object(FrameChannel, name, stopping):
        me.tell("begins")
        for _ in range(steps):
            optimizer.step()
        me.tell("ends")
    return [weights.min().item(), weights.max().item()]


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", "tcp"])
def test_a_shard_may_be_killed_while_its_worker_sends_again(tmp_path: Path, plane: str) -> None:
    steps = 100
    command = Command(tmp_path)
    with command.spawn("start", "--shards", 1, *lasting_ports(1)) as process:
        assert process.stdout is not None
        servers = process.stdout.readline().strip().partition("=")[2]
        shards = Shards(command)
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "PACELINE_SERVERS": servers,
            "PACELINE_JOB": new_job(),
            "PACELINE_DATA_PLANE": plane,
        }
        worker = Worker(train, 0, (steps,), environment)
        try:
            assert worker.hear() == "begins"
            shards.kill()
            kills = 0
            while worker.hear() == "sends again":
                if kills < KILLS:
                    (pid,) = shards.pids()
                    os.kill(pid, signal.SIGKILL)
                    eventually(partial(gone, pid))
                    kills += 1
                worker.tell("continue")
            assert kills == KILLS
            assert worker.result() == [-steps, -steps]
        finally:
            worker.close()
