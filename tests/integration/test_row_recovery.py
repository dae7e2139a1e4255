"""A worker that is lost between two steps finds out when it looks rows up, and rejoins there."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, Worker, new_job

STEPS, STOPPED_AT = 10, 5


def count(me: Station) -> list[Any]:
    """Pushes a gradient of 1 in the worker's own row; worker 1 is stopped before a lookup."""
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 2, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(2, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode="asgd",
    )

    def look() -> list[Any]:
        with torch.no_grad():  # It holds all pushes of this worker.
            values: list[Any] = table(torch.tensor([100, 101]))[:, 0].tolist()
        return values

    for step in range(STEPS):
        if me.rank == 1 and step == STOPPED_AT:
            assert look()[1] == -STOPPED_AT
            me.tell()
            me.hear()
        optimizer.zero_grad()
        rows = table(torch.tensor([100 + me.rank]))
        torch.autograd.backward(rows.sum() + 0.0 * model["top"](rows).sum())
        optimizer.step()
    look()
    me.tell()
    me.hear()
    return look()


def lose(shards: Shards, job: str, worker: Worker) -> None:
    """Stops a worker where it says so, until its lease is over."""
    worker.hear()
    os.kill(worker.pid, signal.SIGSTOP)
    shards.wait_until_lost(job, 1)
    os.kill(worker.pid, signal.SIGCONT)
    worker.tell()


@pytest.mark.slow
def test_a_worker_that_was_lost_continues_where_it_looks_rows_up() -> None:
    job = new_job()
    with Shards(2, lease_s=10.0) as shards, shards.workers(count, job=job) as workers:
        first, second = workers
        lose(shards, job, second)
        for worker in workers:
            worker.hear()  # Its pushes are counted.
        for worker in workers:
            worker.tell()
        # The step of that lookup is given up: its gradient may belong to older dense weights.
        assert first.result() == [-STEPS, 1 - STEPS]
        assert second.result() == [-STEPS, 1 - STEPS]


def look_up_in_the_middle(me: Station) -> float:
    """Trains with weights that the forward has used before it looks rows up."""
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 2, name="table", init="zeros")
    bottom = torch.nn.Linear(2, 2, dtype=torch.bfloat16)  # Weights are copied into it.
    model = torch.nn.ModuleDict({"table": table, "bottom": bottom})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.1),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode="asgd",
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        before = bottom(bottom(torch.ones(1, 2, dtype=torch.bfloat16)))
        if me.rank == 1 and step == STOPPED_AT:
            me.tell()
            me.hear()
        rows = table(torch.tensor([100 + me.rank]))
        rows = rows + 0.0 * table(torch.tensor([102]))
        torch.autograd.backward(rows.sum() + 0.0 * before.sum())
        optimizer.step()
    with torch.no_grad():
        pushed = float(table(torch.tensor([100 + me.rank]))[0, 0])
    me.tell()
    me.hear()
    return pushed


@pytest.mark.slow
def test_a_lookup_in_the_middle_of_a_forward_leaves_its_weights_alone() -> None:
    """Autograd refused the gradient of weights that had been replaced since."""
    job = new_job()
    with (
        Shards(2, lease_s=10.0) as shards,
        shards.workers(look_up_in_the_middle, job=job) as workers,
    ):
        first, second = workers
        lose(shards, job, second)
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell()
        first.result()
        assert -STEPS < second.result() < 0  # One step is given up, or more if it is slow.
