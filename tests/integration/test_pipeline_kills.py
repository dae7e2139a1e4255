"""`psworker.Pipeline(on_lost="continue")` with lost workers: each minibatch counts once.

The stages add a vector to their input, and the loss of minibatch m is one of the `COPIES`
components of m, drawn each time. So the gradient of every stage is 1 at that component whatever the
weights, and the components of m that have changed are the times that m was counted.
"""

from __future__ import annotations

import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from psworker.pipeline.run.checkpoint import StageCheckpoint
from tests.integration.cluster import Shards, Station, Worker, new_job, results_of

TOTAL, COPIES = 40, 32
SAVED = 30  # Minibatches behind the checkpoint.
LEASE_S = 10.0  # A healthy worker keeps it under load: one that loses it leaves the pipeline.


class Offset(nn.Module):
    """Adds a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(TOTAL * COPIES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def loss_of(output: torch.Tensor, minibatch: int) -> torch.Tensor:
    return output[0, minibatch * COPIES + random.SystemRandom().randrange(COPIES)]


def train(me: Station, folder: Path) -> Any:
    """Trains to the end; tells where it begins, and each minibatch that is behind it."""
    run = psworker.Pipeline(
        nn.Sequential(Offset(), Offset()),
        torch.zeros(1, TOTAL * COPIES),
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        [("0", 2), ("1", 1)],
        on_lost="continue",
    )
    me.tell(run.minibatches)
    for minibatch in range(run.minibatches, TOTAL):
        run.step(torch.zeros(1, TOTAL * COPIES), minibatch)
        me.tell(minibatch)
        if minibatch + 1 == SAVED:
            run.save(folder)
    run.finish()
    return next(iter(run.state_dict().values())).tolist()


def reach(worker: Worker, number: int) -> None:
    """Waits until a worker has made a minibatch."""
    while worker.hear() != number:
        pass


def counts_of(values: Any) -> torch.Tensor:
    """Returns how often each minibatch is in the weights of a stage."""
    return (torch.as_tensor(values).reshape(-1, COPIES) != 0).sum(1)


@pytest.mark.slow
def test_each_minibatch_counts_once_whoever_is_killed(tmp_path: Path) -> None:
    job = new_job()
    with Shards(2, lease_s=LEASE_S) as shards, ExitStack() as stack:

        def start(*ranks: int) -> list[Worker]:
            workers = shards.workers(train, tmp_path, num_workers=3, ranks=ranks, job=job)
            return stack.enter_context(workers)

        first, second, last = start(0, 1, 2)
        assert [worker.hear() for worker in (first, second, last)] == [0, 0, 0]
        reach(first, 8)
        second.kill()  # One of two replicas: the other one goes on with all minibatches.
        reach(first, 16)
        last.kill()  # The only replica of its stage: the others wait for the next one.
        shards.wait_until_lost(job, 2)
        second, last = start(1, 2)
        results = results_of([first, second, last])
    check(results, tmp_path)


@pytest.mark.slow
def test_workers_that_are_stopped_for_longer_than_their_lease_rejoin(tmp_path: Path) -> None:
    """The second replica of the first stage, and then the only one of the last stage."""
    job = new_job()
    with (
        Shards(2, lease_s=LEASE_S) as shards,
        shards.workers(train, tmp_path, num_workers=3, job=job) as workers,
    ):
        for rank, number in [(1, 8), (2, 20)]:
            reach(workers[0], number)
            workers[rank].kill(signal.SIGSTOP)
            shards.wait_until_lost(job, rank)
            workers[rank].kill(signal.SIGCONT)
        results = results_of(workers)
        written = "".join(worker.written() for worker in workers[1:])
    assert written.count("rejoins its pipeline") >= 2
    check(results, tmp_path)


def check(results: list[Any], folder: Path) -> None:
    """Asserts that each minibatch is once in the weights of each stage, and in the checkpoint."""
    for values in results:
        torch.testing.assert_close(counts_of(values), torch.ones(TOTAL, dtype=torch.int64))
    assert results[0] == results[1]
    saved, problems = StageCheckpoint.newest(folder)
    assert saved is not None
    assert not problems
    assert saved.minibatches == SAVED
    expected = (torch.arange(TOTAL) < SAVED).to(torch.int64)
    for values in saved.weights.values():
        torch.testing.assert_close(counts_of(values), expected)
