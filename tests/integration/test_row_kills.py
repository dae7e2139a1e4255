"""Shards killed while row tables are trained come back with every row: to the bit, and unasked."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Station, Worker
from tests.integration.command import Command, lasting_ports, live_shards, require_started
from tests.integration.row_models import Net, batch, make_tables
from tests.integration.test_rows import Rows, require_same, values_of, wrap

STEPS, KILL_EVERY, NUM_WORKERS = 24, 6, 2


class Killed:
    """Two shards with journals, under their supervisor."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._rng = random.Random(7)

    def addresses(self) -> list[str]:
        return list(self._command.run_file()["addresses"])

    def kill(self) -> None:
        """Kills a random shard."""
        os.kill(self._rng.choice(live_shards(self._command.folder)), signal.SIGKILL)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Killed]:
    command = Command(tmp_path)
    # No worker may be lost on a busy machine: its steps would close without it, and it would end
    # before others, which then wait for its steps while it waits for them at the barrier.
    options = ("--shards", 2, *lasting_ports(), "--lease-s", 3000)
    with command.spawn("start", *options) as process:
        require_started(process)
        yield Killed(command)


def pause(me: Station, step: int) -> None:
    """Says each sixth step on rank 0, and waits for leave to continue."""
    if me.rank == 0 and step % KILL_EVERY == KILL_EVERY // 2:
        me.tell(step)
        me.hear()


def train(me: Station, options: dict[str, int]) -> Rows:
    torch.set_num_threads(1)
    model = Net(make_tables(**options))
    optimizer, _ = wrap(model, "adagrad")
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(me.rank, step)))
        pause(me, step)
        optimizer.step()
    psworker.barrier("trained")
    return values_of(model)


def count(me: Station) -> Rows:
    """Pushes a gradient of 1 in rows that differ by step, asynchronously; returns all rows."""
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 3, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(3, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        rows_mode="asgd",
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = table(torch.arange(step + 1))
        torch.autograd.backward(rows.sum() + 0.0 * model["top"](rows).sum())
        pause(me, step)
        optimizer.step()
    psworker.barrier("trained")
    with torch.no_grad():
        return {"rows": table(torch.arange(STEPS)).numpy()}


def run(
    shards: Killed, job: str, function: Callable[..., Rows], *given: Any, kills: bool
) -> list[Rows]:
    servers = ",".join(shards.addresses())
    env = {"WORLD_SIZE": str(NUM_WORKERS), "PACELINE_SERVERS": servers, "PACELINE_JOB": job}
    workers = [
        Worker(function, rank, given, env | {"RANK": str(rank)}) for rank in range(NUM_WORKERS)
    ]
    try:
        for _ in range(STEPS // KILL_EVERY):
            workers[0].hear()
            if kills:
                shards.kill()
            workers[0].tell("continue")
        return [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"min_count": 3, "ttl": 4}], ids=str)
def test_rows_have_the_same_bits_with_shards_killed_in_the_middle(
    shards: Killed, options: dict[str, int]
) -> None:
    """Also where rows are made late, and where they go."""
    calm, _ = run(shards, "calm", train, options, kills=False)
    for found in run(shards, "killed", train, options, kills=True):
        require_same(calm, found)


@pytest.mark.slow
def test_no_asynchronous_push_is_lost_or_counted_twice_or_in_another_row(shards: Killed) -> None:
    expected = -NUM_WORKERS * (STEPS - np.arange(STEPS, dtype=np.float32))
    for found in run(shards, "asgd", count, kills=True):
        assert np.array_equal(found["rows"], np.repeat(expected[:, None], 3, axis=1))
