"""A worker that is lost between two steps finds out when it looks rows up, and rejoins there."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job

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


@pytest.mark.slow
def test_a_worker_that_was_lost_continues_where_it_looks_rows_up() -> None:
    job = new_job()
    with Shards(2, lease_s=5.0) as shards, shards.workers(count, job=job) as workers:
        first, second = workers
        second.hear()
        os.kill(second.pid, signal.SIGSTOP)
        shards.wait_until_lost(job, 1)
        os.kill(second.pid, signal.SIGCONT)
        second.tell()
        for worker in workers:
            worker.hear()  # Its pushes are counted.
        for worker in workers:
            worker.tell()
        assert first.result() == [-STEPS, -STEPS]
        assert second.result() == [-STEPS, -STEPS]
