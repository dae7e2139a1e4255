"""Steps of a worker that is started again, beside a synchronous dense part: in the rows too."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from psserver.remote import checkpoint
from psworker.rows.row_exchange import RowExchange
from psworker.rows.row_tables import RowTables
from psworker.training.table import TrainingTable
from tests.integration.cluster import Shards, Station, new_job, results_of, wait_until

KILLED_AT, STEPS, LOADED = 2, 4, 100
IDS = 16  # Of a step, some of them on each shard.


def ids_of(rank: int, step: int) -> torch.Tensor:
    return IDS * (STEPS * rank + step) + torch.arange(IDS)


def after(kind: type, name: str, action: Callable[[Any], None]) -> None:
    """Makes the next call of a method do an action at its end."""
    call = getattr(kind, name)

    def called(of: Any, *given: Any, **named: Any) -> None:
        setattr(kind, name, call)
        call(of, *given, **named)
        action(of)

    setattr(kind, name, called)


def make(
    rank: int, mode: str = "ssgd", given: float | None = None
) -> tuple[Any, Any, Callable[[int], None]]:
    """Returns a table, an optimizer, and a function that makes a step.

    Args:
        rank: That of this worker.
        given: The first value of every row, brought by the lowest worker; None: zeros.
    """
    table = psworker.Embedding(None, 1, name="table", init="zeros")
    if given is not None:
        rows = torch.full((2 * STEPS * IDS, 1), given)
        table = psworker.Embedding.from_pretrained(rows, freeze=False, name="table")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode=mode,
    )

    def make_step(step: int) -> None:
        optimizer.zero_grad()
        rows = table(ids_of(rank, step))
        torch.autograd.backward(-rows.sum() + 0.0 * model["top"](rows).sum())
        optimizer.step()

    return table, optimizer, make_step


def counted(table: Any) -> list[float]:
    """Returns the rows of all steps."""
    psworker.barrier("trained")
    with torch.no_grad():
        return [float(row) for row in table(torch.arange(2 * STEPS * IDS))]


def train(me: Station, is_again: bool = False) -> list[float]:
    """Trains; returns how the steps of both workers have counted in their rows.

    Args:
        me: Its line.
        is_again: Whether it waits where it has begun with the dense part, and trains to the end.
    """
    torch.set_num_threads(1)

    def wait(_: TrainingTable) -> None:
        me.tell("begun")
        me.hear()

    def flush(tables: RowTables) -> None:
        tables.exchange.flush()
        me.tell("pushed")

    if is_again:
        after(TrainingTable, "begin", wait)
    table, optimizer, make_step = make(me.rank)
    for step in range(optimizer.steps, STEPS):
        if step == KILLED_AT and not is_again:
            me.tell("trained")
            me.hear()
            after(RowTables, "push", flush)
        make_step(step)
    return counted(table)


@pytest.mark.slow
def test_the_first_step_of_a_worker_that_is_started_again_counts_in_the_rows() -> None:
    """The other one has pushed its rows of that step when this one has begun with the rest."""
    job = new_job()
    with Shards(2, lease_s=3.0) as shards, shards.workers(train, job=job) as workers:
        for worker in workers:
            assert worker.hear() == "trained"
        workers[1].kill()
        with shards.workers(train, True, job=job, ranks=[1]) as (again,):
            assert again.hear() == "begun"
            workers[0].tell()
            assert workers[0].hear() == "pushed"
            again.tell()
            for found in results_of([workers[0], again]):
                assert found == [0.5] * (2 * STEPS * IDS)


def load(me: Station, is_again: bool = False) -> list[float]:
    """Loads a state of a later step between two steps; returns how all steps have counted."""
    torch.set_num_threads(1)
    table, optimizer, make_step = make(me.rank)
    if not is_again:
        make_step(0)
        state = optimizer.state_dict()
        state["paceline"]["step"] = LOADED
        optimizer.load_state_dict(state)
        make_step(1)
    me.tell(optimizer.steps)
    me.hear()
    for step in range(KILLED_AT, STEPS):
        make_step(step)
    return counted(table)


@pytest.mark.slow
def test_rows_follow_the_step_of_a_state_that_was_loaded() -> None:
    """A worker that was started again waited for their step of that number, and the others too."""
    job = new_job()
    with Shards(2, lease_s=3.0) as shards, shards.workers(load, job=job) as workers:
        for worker in workers:
            assert worker.hear() == LOADED + 1
        taken = checkpoint.capture(shards.addresses, ANYONE, job, weights_only=False)
        assert {table.position for table in taken.tables} == {f"step {LOADED + 1}"}
        workers[1].kill()
        with shards.workers(load, True, job=job, ranks=[1]) as (again,):
            assert again.hear() == LOADED + 1
            for worker in (workers[0], again):
                worker.tell()
            for found in results_of([workers[0], again]):
                assert found == [0.5] * (2 * STEPS * IDS)


def train_to_the_end(me: Station, mode: str, given: float | None, stops: bool) -> list[float]:
    """Trains; one that stops waits in the first step."""
    torch.set_num_threads(1)
    table, optimizer, make_step = make(me.rank, mode, given)
    if stops:
        me.tell("begun")
        me.hear()
    while optimizer.steps < STEPS:
        make_step(optimizer.steps)
    return counted(table)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 2.0])
@pytest.mark.parametrize("mode", ["ssgd", "ssp"])
def test_a_worker_that_was_stopped_while_its_job_began_anew_brings_the_first_rows(
    mode: str, given: float | None
) -> None:
    """It waited for them, from itself."""
    job = new_job()
    with (
        Shards(2, lease_s=3.0) as shards,
        shards.workers(train_to_the_end, mode, given, True, job=job) as (first, second),
    ):
        for worker in (first, second):
            assert worker.hear() == "begun"
        first.kill(signal.SIGSTOP)
        second.kill()
        for rank in range(2):
            shards.wait_until_lost(job, rank)
        with shards.workers(train_to_the_end, mode, given, False, job=job, ranks=[1]) as (again,):
            wait_until(lambda: "worker 0 (has not joined yet)" in again.written())
            first.kill(signal.SIGCONT)
            first.tell()
            for found in results_of([first, again]):
                count = 1.0 if mode == "ssp" else 0.5
                assert found == [count + (given or 0.0)] * (2 * STEPS * IDS)


def dies_bringing(me: Station) -> list[float]:
    """Trains; the first worker stops when it has brought the first rows of one slice."""
    torch.set_num_threads(1)

    def wait(_: RowExchange) -> None:
        me.tell()
        me.hear()

    if me.rank == 0:
        after(RowExchange, "load", wait)
    return train_to_the_end(me, "ssgd", 2.0, False)


@pytest.mark.slow
def test_another_worker_brings_the_first_rows_where_the_first_one_dies_meanwhile() -> None:
    """It waited for ever for those that the other had not brought."""
    with Shards(2, lease_s=3.0) as shards, shards.workers(dies_bringing) as (first, second):
        first.hear()
        first.kill()
        found = second.result(60.0)
    assert found == [2.0] * (STEPS * IDS) + [3.0] * (STEPS * IDS)


def come_late(me: Station) -> list[float]:
    """Trains; worker 1 waits where it has declared its dense part and not its rows."""
    torch.set_num_threads(1)

    def wait(_: TrainingTable) -> None:
        me.tell("declared")
        me.hear()

    if me.rank == 1:
        after(TrainingTable, "__init__", wait)
    table, optimizer, make_step = make(me.rank)
    while optimizer.steps < STEPS:
        make_step(optimizer.steps)
    return counted(table)


@pytest.mark.slow
def test_a_worker_that_is_lost_before_its_rows_are_declared_joins_again() -> None:
    """Its script ended with an error."""
    job = new_job()
    with Shards(2, lease_s=3.0) as shards, shards.workers(come_late, job=job) as workers:
        second = workers[1]
        assert second.hear() == "declared"
        second.kill(signal.SIGSTOP)
        shards.wait_until_lost(job, 1)
        second.tell()
        second.kill(signal.SIGCONT)
        first, found = results_of(workers)
        assert first == found
