"""A checkpoint under load has the dense part and the row tables at one step, and continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from psserver.remote import checkpoint
from psserver.remote import checkpoint_files as files
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.command import Command
from tests.integration.row_models import Net, batch, first_rows, make_tables

NUM_TAKEN, LEASE_S = 3, 3000.0
AHEAD = 5  # No worker can be so many steps ahead of another.
Rows = dict[str, np.ndarray]


def train(me: Station, last: int | None) -> tuple[int, Rows]:
    """Trains up to a step, or one that it is told; returns its first step, and all weights."""
    torch.set_num_threads(1)
    model = Net(make_tables())
    tables: list[Any] = [table.weight for table in model.tables.values()]
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.1, momentum=0.9),
        model.named_parameters(),
        rows=[torch.optim.Adagrad(tables[:2], lr=0.1), torch.optim.SparseAdam(tables[2:])],
        mode="ssgd",
    )
    first = optimizer.steps
    me.tell()
    while last is None or optimizer.steps < last:
        if last is None and me.is_told():
            me.hear()
            me.tell(optimizer.steps)
            last = me.hear()
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(me.rank, optimizer.steps)))
        optimizer.step()
    psworker.barrier("trained")
    rows = {name: rows.numpy() for name, rows in first_rows(dict(model.tables.items())).items()}
    return first, rows | {"head": model.head.weight.detach().numpy().copy()}


@pytest.mark.slow
def test_a_checkpoint_under_load_has_all_tables_of_a_model_at_one_step(tmp_path: Path) -> None:
    job, exported = new_job(), tmp_path / "users.safetensors"
    # A worker that is lost on a busy machine would be missing in a step.
    with Shards(2, lease_s=LEASE_S) as shards, shards.workers(train, None, job=job) as workers:
        for worker in workers:
            worker.hear()
        taken = [
            checkpoint.capture(shards.addresses, ANYONE, job, weights_only=False)
            for _ in range(NUM_TAKEN)
        ]
        versions = [[table.version for table in each.tables] for each in taken]
        assert versions == [[of[0]] * 3 for of in versions]
        workers[0].tell()
        last = workers[0].hear() + AHEAD
        workers[1].tell()
        for worker in reversed(workers):  # The first one waits for it.
            worker.tell(last)
        (_, expected), _ = [worker.result() for worker in workers]
        path = files.write(tmp_path / "checkpoints", taken[0], keep=1)
        former = files.in_files(path, taken[0])
        whole, merged = (
            checkpoint.capture(shards.addresses, ANYONE, job, weights_only=False, base=base)
            for base in (None, former)
        )
        for one, other in zip(whole.tables, merged.tables, strict=True):
            assert one.arrays.keys() == other.arrays.keys()
            for array, tensors in one.arrays.items():
                for name, values in tensors.items():
                    np.testing.assert_array_equal(other.arrays[array][name], values, name)
        given = ("export", exported, "--table", "users", "--job", job)
        Command(tmp_path).run(*given, "--servers", shards.servers)
        module = psworker.load_embedding(exported)
        assert np.array_equal(module.weight.detach().numpy(), expected["users"])
    with Shards(3, lease_s=LEASE_S) as others:
        checkpoint.restore(others.addresses, ANYONE, taken[-1], job)
        for first, found in others.run(train, last, job=job):
            assert first == versions[-1][0]
            assert found.keys() == expected.keys()
            for name, rows in found.items():
                np.testing.assert_array_equal(rows, expected[name], name)
