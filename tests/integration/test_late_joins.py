"""A worker comes while the others, who have met, change the mode or the table of their job."""

import re
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import psworker
from pscore.errors import JobMismatchError
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership import taking_part
from psworker.connection.membership.joining import PlaceWait
from psworker.training.changes import growth
from psworker.training.table import TrainingTable
from tests.integration.cluster import (
    Shards,
    Station,
    Worker,
    WorkerError,
    new_job,
    results_of,
    wait_until,
)

NUMEL = 9000  # Two slices on two shards.
STEPS = 3
# By change: the modes before and after it, and the first call after the workers have met.
CHANGES = {
    "ssd": ("ssgd", "ssd(steps=3, warmup=0)", "change"),
    "dpsgd": ("ssgd", "dpsgd", "step_aside"),
    "back": ("dpsgd", "ssgd", "step_aside"),
    "growth": ("ssgd", "ssgd", "step_aside"),
}


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(NUMEL))) for name in ("first", "second")]


def make(named: list[tuple[str, torch.nn.Parameter]], mode: str) -> Any:
    inner = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
    return psworker.DistributedOptimizer(inner, named, mode=mode)


def train(optimizer: Any, until: int) -> None:
    while optimizer.steps < until:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.ones(NUMEL)
        optimizer.step()


def changes(me: Station, name: str) -> np.ndarray:
    """Trains, changes the job, and trains on; the first worker waits once all have met for it."""
    before, after, call = CHANGES[name]
    named = parameters()
    named[1][1].requires_grad = name != "growth"
    optimizer = make(named, before)
    train(optimizer, STEPS)
    me.tell()
    if me.hear() == "go on":
        train(optimizer, 2 * STEPS)
        return torch.cat([value.detach() for _, value in named]).numpy()
    real = getattr(taking_part, call)

    def met(*given: Any) -> Any:
        me.tell("met")
        me.hear()
        return real(*given)

    with mock.patch.object(taking_part, call, met):
        if name == "growth":
            named[1][1].requires_grad = True
            train(optimizer, STEPS + 1)
        else:
            optimizer.set_mode(after)
    me.hear()  # The other one has joined.
    train(optimizer, 2 * STEPS)
    optimizer.close()
    return torch.cat([value.detach() for _, value in named]).numpy()


def dies(me: Station, before: str, after: str) -> tuple[int, np.ndarray]:
    """Changes the mode; the first worker stops where it would upload what the next table needs."""
    optimizer = make(parameters(), before)
    train(optimizer, STEPS)
    real = TrainingTable.upload

    def upload(*given: Any, **named: Any) -> None:
        if me.rank == 0:
            me.tell()
            me.hear()
        real(*given, **named)

    with mock.patch.object(TrainingTable, "upload", upload):
        optimizer.set_mode(after)
    step = optimizer.steps
    with optimizer.global_weights():
        (group,) = optimizer.param_groups
        weights = [value.detach().numpy().copy() for value in group["params"]]
    return step, np.concatenate(weights)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["ssgd", "asgd", "allreduce"])
def test_a_change_goes_on_where_the_worker_dies_that_uploads_the_state(after: str) -> None:
    """The others continued at step 0, and made all steps once more."""
    before = "ssgd" if after == "allreduce" else "dpsgd(average_every=1)"
    with (
        Shards(2, lease_s=3.0) as shards,
        shards.workers(dies, before, after) as (first, second),
    ):
        first.hear()
        first.kill()
        step, weights = second.result()
    assert step == STEPS
    assert (weights == -STEPS).all()


def dies_loading(me: Station) -> np.ndarray:
    """Loads a former state; the first worker stops when it has uploaded one of two slices."""
    named = parameters()
    optimizer = make(named, "ssgd")
    train(optimizer, STEPS)
    state = optimizer.state_dict()
    train(optimizer, 2 * STEPS)
    for _, value in named:
        value.data.fill_(-float(STEPS))
    real = Exchange.load

    def load(*given: Any, **more: Any) -> None:
        real(*given, **more)
        given[0].flush()
        me.tell()
        me.hear()

    with mock.patch.object(Exchange, "load", real if me.rank else load):
        optimizer.load_state_dict(state)
    train(optimizer, STEPS + 1)
    optimizer.close()
    return torch.cat([value.detach() for _, value in named]).numpy()


@pytest.mark.slow
def test_a_state_is_loaded_whole_where_the_worker_dies_that_uploads_it() -> None:
    """The others continued with one slice of the state, and another of before."""
    with Shards(2, lease_s=3.0) as shards, shards.workers(dies_loading) as (first, second):
        first.hear()
        first.kill()
        assert (second.result() == -(STEPS + 1)).all()


def changes_and_waits(me: Station) -> int:
    """Changes from one mode without a server to another, and trains on once it is told to."""
    optimizer = make(parameters(), "sgp")
    train(optimizer, STEPS)
    optimizer.set_mode("dpsgd")
    me.tell()
    me.hear()
    train(optimizer, 2 * STEPS)
    return int(optimizer.steps)


def comes_back(me: Station) -> int:
    psworker.init()
    me.tell()
    optimizer = make(parameters(), "dpsgd")
    train(optimizer, 2 * STEPS)
    return int(optimizer.steps)


@pytest.mark.slow
def test_a_worker_is_started_again_after_a_change_between_modes_without_a_server(
    shards: Shards,
) -> None:
    """The shards but the first one refused it: the others changed the mode, still."""
    job = new_job()
    with shards.workers(changes_and_waits, job=job) as (first, second):
        for worker in (first, second):
            worker.hear()
        second.kill()
        env = {"TORCHELASTIC_RESTART_COUNT": "1"}
        with shards.workers(comes_back, job=job, ranks=[1], env=env) as (again,):
            again.hear()
            first.tell()
            assert results_of([first, again]) == [2 * STEPS, 2 * STEPS]


def comes(me: Station, name: str) -> np.ndarray:
    """Joins the job that changes, and trains to its end; tells when it waits, or is there."""
    real = PlaceWait.wait

    def waits(*given: Any) -> Any:
        me.tell("waits")
        return real(*given)

    with mock.patch.object(PlaceWait, "wait", waits):
        psworker.init()
    me.tell("has joined")
    named = parameters()
    optimizer = make(named, CHANGES[name][1])
    train(optimizer, 2 * STEPS)
    optimizer.close()
    return torch.cat([value.detach() for _, value in named]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_worker_that_comes_in_the_middle_of_a_change_waits_for_its_end(
    shards: Shards, name: str
) -> None:
    job = new_job()
    with shards.workers(changes, name, num_workers=3, job=job) as workers:
        for worker in workers:
            worker.hear()
        workers[2].kill()
        shards.wait_until_lost(job, 2)
        for worker in workers[:2]:
            worker.tell()
        for worker in workers[:2]:
            assert worker.hear() == "met"
        with shards.workers(comes, name, num_workers=3, ranks=[2], job=job) as (late,):
            assert late.hear() == "waits"
            for worker in workers[:2]:
                worker.tell()
            while late.hear() != "has joined":
                pass
            for worker in workers[:2]:
                worker.tell()
            results = results_of([*workers[:2], late])
    for weights in results:
        assert np.isfinite(weights).all()
        assert (weights < 0).all()


def change_without(shards: Shards, name: str, workers: list[Worker], job: str) -> None:
    """Changes a job by two of three workers while the third one is stopped and lost."""
    for worker in workers:
        worker.hear()
    workers[2].kill(signal.SIGSTOP)
    shards.wait_until_lost(job, 2)
    for worker in workers[:2]:
        worker.tell()
    for worker in workers[:2]:
        assert worker.hear() == "met"
        worker.tell()
    workers[2].kill(signal.SIGCONT)
    workers[2].tell("go on")


@pytest.mark.slow
def test_a_worker_that_was_away_takes_the_mode_that_the_others_have_changed_to(
    shards: Shards,
) -> None:
    job = new_job()
    with shards.workers(changes, "ssd", num_workers=3, job=job) as workers:
        change_without(shards, "ssd", workers, job)
        said = "takes the mode ssd(steps=3"
        wait_until(lambda: said in workers[2].written() or workers[2].is_over())
        for worker in workers[:2]:
            worker.tell()
        for weights in results_of(workers):
            assert (weights < 0).all()
        assert said in workers[2].written()


def stops_before(me: Station) -> list[str]:
    """Trains and changes the mode; the second worker is stopped before it steps aside."""
    named = parameters()
    optimizer = make(named, "ssgd")
    train(optimizer, STEPS)
    real, calls = taking_part.step_aside, iter(range(2))

    def aside(*given: Any) -> None:
        if next(calls) == 0:  # It may join again before the others have gone on without it.
            me.tell()
            me.hear()
        real(*given)

    with mock.patch.object(taking_part, "step_aside", aside if me.rank else real):
        optimizer.set_mode("asgd")
    train(optimizer, 2 * STEPS)
    optimizer.close()
    return [optimizer.rule.name, str(optimizer.steps)]


@pytest.mark.slow
def test_a_worker_that_is_lost_in_a_change_of_the_mode_joins_again_and_has_it(
    shards: Shards,
) -> None:
    job = new_job()
    with shards.workers(stops_before, job=job) as (first, second):
        second.hear()
        second.kill(signal.SIGSTOP)
        # The first shard says so; the others may learn of it by the change.
        said = re.compile(rf"^(?=.*\bjob={job}\b).*worker lost", re.MULTILINE)
        wait_until(lambda: said.search(shards.written()) is not None)
        second.kill(signal.SIGCONT)
        second.tell()
        wait_until(lambda: first.is_over() or second.is_over())
        assert results_of([first, second]) == [["asgd", str(2 * STEPS)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpsgd", "growth"])
def test_a_worker_that_was_away_does_not_train_a_table_that_the_others_have_left(
    shards: Shards, name: str
) -> None:
    job = new_job()
    with shards.workers(changes, name, num_workers=3, job=job) as workers:
        change_without(shards, name, workers, job)
        with pytest.raises(WorkerError, match=r"JobMismatchError: .*start this worker again"):
            workers[2].result()
        for worker in workers[:2]:
            worker.tell()
        for weights in results_of(workers[:2]):
            assert (weights < 0).all()


def stops_in_change(me: Station, name: str, place: str) -> int:
    """Trains and changes the job; the second worker is stopped in the change."""
    before, after, _ = CHANGES[name]
    owner: Any = {"step_aside": taking_part, "take_over": growth}[place]
    named = parameters()
    named[1][1].requires_grad = name != "growth"
    optimizer = make(named, before)
    train(optimizer, STEPS)
    real = getattr(owner, place)

    def stops(*given: Any) -> Any:
        me.tell()
        me.hear()
        return real(*given)

    with mock.patch.object(owner, place, stops if me.rank else real):
        if name == "growth":
            named[1][1].requires_grad = True
        else:
            optimizer.set_mode(after)
        train(optimizer, 2 * STEPS)
    optimizer.close()
    return int(optimizer.steps)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step_aside", "take_over"])
@pytest.mark.parametrize("name", ["dpsgd", "back", "growth"])
def test_a_worker_that_is_lost_while_the_job_takes_another_table_says_what_to_do(
    shards: Shards, name: str, place: str
) -> None:
    job = new_job()
    with shards.workers(stops_in_change, name, place, job=job) as (first, second):
        second.hear()
        second.kill(signal.SIGSTOP)
        assert first.result() == 2 * STEPS
        second.kill(signal.SIGCONT)
        second.tell()
        with pytest.raises(WorkerError, match=r"JobMismatchError: .*start this worker again"):
            second.result()


def changes_when_told(me: Station) -> int:
    """Trains, changes the mode once it is told to, and trains on."""
    optimizer = make(parameters(), "ssgd")
    train(optimizer, STEPS)
    me.tell()
    me.hear()
    optimizer.set_mode("asgd")
    train(optimizer, 2 * STEPS)
    optimizer.close()
    return int(optimizer.steps)


@pytest.mark.slow
def test_the_others_wait_for_a_worker_in_the_place_of_one_that_died_at_the_change(
    shards: Shards,
) -> None:
    """The change does not count it as there: it would train on in the former mode."""
    job = new_job()
    waits = "at barrier 'mode'"
    with shards.workers(changes_when_told, num_workers=3, job=job) as workers:
        for worker in workers:
            worker.hear()
        workers[2].tell()
        wait_until(lambda: waits in workers[2].written())
        workers[2].kill()
        again = {"PACELINE_RESTART": "1"}
        with shards.workers(changes_when_told, num_workers=3, ranks=[2], job=job, env=again) as (
            new,
        ):
            new.hear()
            for worker in workers[:2]:
                worker.tell()
            wait_until(lambda: all(waits in each.written() for each in workers[:2]))
            new.tell()
            assert results_of([*workers[:2], new]) == [2 * STEPS] * 3


def is_killed_behind_growth(me: Station) -> None:
    """Trains, unfreezes a parameter, and makes a step; the second worker stops before that step."""
    named = parameters()
    named[1][1].requires_grad = False
    optimizer = make(named, "ssgd")
    train(optimizer, STEPS)
    real = growth.take_over

    def take_over(*given: Any) -> None:
        real(*given)
        me.tell()
        if me.rank:
            me.hear()

    with mock.patch.object(growth, "take_over", take_over):
        named[1][1].requires_grad = True
        train(optimizer, STEPS + 1)


def goes_on(me: Station) -> list[float]:
    """Begins as the first worker did, then with all parameters, and trains to the end."""
    named = parameters()
    named[1][1].requires_grad = False
    with pytest.raises(JobMismatchError, match="all parameters that the job has by now"):
        make(named, "ssgd")
    named[1][1].requires_grad = True
    optimizer = make(named, "ssgd")
    begun = optimizer.steps
    train(optimizer, 2 * STEPS)
    optimizer.close()
    return [begun, *(float(value.detach()[0]) for _, value in named)]


@pytest.mark.slow
def test_workers_that_are_all_killed_in_the_first_step_behind_growth_continue_there(
    shards: Shards,
) -> None:
    """Those who made the change again found a push of the former life, and waited for ever."""
    job = new_job()
    with shards.workers(is_killed_behind_growth, job=job) as workers:
        for worker in workers:
            worker.hear()
        wait_until(lambda: "has waited" in workers[0].written())
        for worker in workers:
            worker.kill()
    again = {"PACELINE_RESTART": "1"}
    results = shards.run(goes_on, job=job, env=again)
    assert results == [[STEPS, -2.0 * STEPS, -1.0 * STEPS]] * 2
