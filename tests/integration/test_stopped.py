"""Workers that are stopped for longer than their lease, in a moment that matters: they rejoin."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import psworker
from psworker.connection.membership.session import Session
from psworker.training.table import TrainingTable
from tests.integration.cluster import Shards, Station, Worker, new_job, results_of, wait_until

LEASE_S = 4.0
STEPS = 6
MOMENTS: dict[str, tuple[Any, str]] = {
    "declares": (Session, "_declare"),
    "starts": (TrainingTable, "start"),
    "begins": (TrainingTable, "begin"),
    "waits": (Session, "agree_at"),
}


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    with Shards(2, lease_s=LEASE_S) as started:
        yield started


def stopping(me: Station, where: Any, name: str) -> Any:
    """Makes a function wait for the test each time before it does anything."""
    real: Callable[..., Any] = getattr(where, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        me.tell("there")
        me.hear()
        return real(*args, **options)

    return mock.patch.object(where, name, wrapped)


def train(me: Station, mode: str, moment: str) -> list[float]:
    """Trains; in each call of the moment's function it waits for the test."""
    weights = torch.nn.Parameter(torch.zeros(1 << 16))
    with ExitStack() as stack:
        if me.rank == 1:
            stack.enter_context(stopping(me, *MOMENTS[moment]))
        optimizer = psworker.DistributedOptimizer(
            torch.optim.SGD([weights], lr=1.0), [("w", weights)], mode=mode
        )
        weights.grad = torch.ones(1 << 16)
        if me.rank == 1:
            me.tell("trains")
            me.hear()
        for _ in range(STEPS):
            optimizer.step()
    if me.rank == 1:
        me.tell("ends")
    optimizer.close()
    return [weights.min().item(), weights.max().item()]


def stop(shards: Shards, job: str, worker: Worker) -> None:
    """Stops a worker until the shards have declared it lost, once more."""
    lost = {"worker lost", f"job={job} ", "worker=1 "}

    def count() -> int:
        lines = shards.written().splitlines()
        return sum(all(part in f"{line} " for part in lost) for line in lines)

    before = count()
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: count() >= before + len(shards.addresses))
    os.kill(worker.pid, signal.SIGCONT)


def require_whole_steps(results: list[list[float]]) -> None:
    """Requires that each step counted in all slices; the first worker may end before the other."""
    (first, other_first), (last, other_last) = results
    assert first == other_first <= -STEPS
    assert last == other_last <= -STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "moment"),
    [("ssgd", "declares"), ("ssgd", "starts"), ("ssgd", "begins"), ("asgd", "waits")],
)
def test_a_worker_that_is_stopped_in_its_constructor_rejoins(
    shards: Shards, mode: str, moment: str
) -> None:
    job = new_job()
    with shards.workers(train, mode, moment, job=job) as (first, second):
        assert second.hear() == "there"
        stop(shards, job, second)
        second.tell("continue")
        while second.hear() != "ends":
            second.tell("continue")
        results = results_of([first, second])
        assert "worker 1 rejoins, " in second.written()
        require_whole_steps(results)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["declares", "begins"])
def test_a_worker_that_is_stopped_again_while_it_rejoins_rejoins_again(
    shards: Shards, moment: str
) -> None:
    job = new_job()
    with shards.workers(train, "ssgd", moment, job=job) as (first, second):
        assert second.hear() == "there"
        second.tell("continue")
        assert second.hear() == "trains"
        stop(shards, job, second)
        second.tell("continue")
        assert second.hear() == "there"  # In its step, which rejoins.
        stop(shards, job, second)
        second.tell("continue")
        while second.hear() != "ends":
            second.tell("continue")
        results = results_of([first, second])
        assert "it was lost meanwhile" in second.written()
    require_whole_steps(results)
