"""Workers that are killed in a step or before it, and the steps of their next processes."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import psworker
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import Session
from tests.integration.cluster import Shards, Station, Worker, new_job, results_of, wait_until
from tests.integration.command import Command, lasting_ports, live_shards, require_started

NUMEL = 9000  # Two slices on two shards.
STEPS = 6
KILLED_IN = 2  # A step.


def make(mode: str) -> Any:
    named = [(name, torch.nn.Parameter(torch.zeros(NUMEL))) for name in ("first", "second")]
    inner = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
    return psworker.DistributedOptimizer(inner, named, mode=mode)


def step(me: Station, optimizer: Any) -> None:
    """Makes a step whose gradient is 1 at an element of its own in each slice."""
    grad = torch.zeros(NUMEL)
    grad[STEPS * me.rank + optimizer.steps] = 1.0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = grad.clone()
    optimizer.step()


def counts(me: Station, optimizer: Any) -> np.ndarray:
    """Returns how often each step of each worker counts, by slice: `(2, workers * STEPS)`."""
    psworker.barrier("trained")
    with optimizer.global_weights():
        (group,) = optimizer.param_groups
        values = [parameter.detach().numpy() for parameter in group["params"]]
    optimizer.close()
    return -np.stack([value[: me.num_workers * STEPS] for value in values])


def stops_between_slices(me: Station) -> None:
    """Trains; the second worker stops in a step of which one slice counts."""
    optimizer = make("asgd")
    while optimizer.steps < KILLED_IN:
        step(me, optimizer)
    me.tell()
    if me.rank == 0:
        me.hear()
    real = Exchange.push

    def push(self: Exchange, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        self.flush()
        me.tell()
        me.hear()

    with mock.patch.object(Exchange, "push", push):
        step(me, optimizer)


def stops_before_another_shard(me: Station, shard: int) -> None:
    """Stops in the first step, of which only slices of one shard have left."""
    optimizer = make("ssgd")
    real = Exchange.push

    def push(self: Exchange, index: int, *given: Any, **named: Any) -> None:
        if self.layout.slices[index].shard == shard:
            real(self, index, *given, **named)
            self.flush()
            me.tell()
            me.hear()

    with mock.patch.object(Exchange, "push", push):
        step(me, optimizer)


def stops_with_the_model(me: Station) -> None:
    """Stops at the end of a round, behind the push of its model, or before that."""
    optimizer = make("allreduce(average_every=2)")
    step(me, optimizer)
    real = Exchange.push

    def push(self: Exchange, *given: Any, **named: Any) -> None:
        if me.rank == 0:
            real(self, *given, **named)
            self.flush()
        if me.rank == 1 or given[0] == 1:
            me.tell()
            me.hear()

    with mock.patch.object(Exchange, "push", push):
        step(me, optimizer)


def rounds(me: Station) -> np.ndarray:
    """Trains in rounds to the end, and returns the first weights of each slice."""
    optimizer = make("allreduce(average_every=2)")
    while optimizer.steps < STEPS:
        step(me, optimizer)
    psworker.barrier("trained")
    with optimizer.global_weights():
        (group,) = optimizer.param_groups
        values = [parameter.detach().numpy() for parameter in group["params"]]
    optimizer.close()
    return np.stack([value[: 2 * STEPS] for value in values])


def steps_alone(me: Station) -> int:
    """Makes a step, and those that are left once it is told to; returns their number."""
    optimizer = make("dpsgd(average_every=2)")
    step(me, optimizer)
    me.tell()
    me.hear()
    return steps_on(optimizer)


def changes_alone(me: Station) -> int:
    """Makes steps in two modes; the first worker loses the answer with which it parts."""
    optimizer = make("sgp(average_every=2)")
    step(me, optimizer)
    real, answers = Session.meet, list[Any]()

    def meet(self: Session, request: Any) -> Any:
        reply = real(self, request)
        if me.rank == 0 and request.peer.parts and reply.meetings and not answers:
            answers.append(reply)
            me.tell()
            me.hear()
            return real(self, request)
        return reply

    with mock.patch.object(Session, "meet", meet):
        optimizer.set_mode("dpsgd(average_every=2)")
    return steps_on(optimizer)


def comes_to_peers(me: Station) -> int:
    """Joins workers that train, and trains with them."""
    return steps_on(make("dpsgd(average_every=2)"))


def steps_on(optimizer: Any) -> int:
    """Makes steps without a gradient to the end; returns their number."""
    while optimizer.steps < STEPS:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros(NUMEL)
        optimizer.step()
    psworker.shutdown()
    return int(optimizer.steps)


def train(me: Station, optimizer: Any) -> np.ndarray:
    """Trains to the end; all meet there."""
    while optimizer.steps < STEPS:
        step(me, optimizer)
    return counts(me, optimizer)


def goes_on(me: Station) -> np.ndarray:
    """Joins, and trains once it is told to, as another may train alone before."""
    optimizer = make("asgd")
    me.tell()
    me.hear()
    return train(me, optimizer)


def is_stopped(me: Station, mode: str) -> np.ndarray:
    """Waits in the first step, and trains."""
    optimizer = make(mode)
    me.tell()
    me.hear()
    return train(me, optimizer)


def begins(me: Station, mode: str) -> np.ndarray:
    return train(me, make(mode))


def changes(me: Station) -> np.ndarray:
    """Begins in a mode by step, changes to an asynchronous one, and trains once it is told to."""
    optimizer = make("ssgd")
    step(me, optimizer)
    optimizer.set_mode("asgd")
    me.tell()
    me.hear()
    return train(me, optimizer)


def comes(me: Station) -> np.ndarray:
    """Joins, and makes the optimizer once it is told to."""
    psworker.init()
    me.tell()
    me.hear()
    return train(me, make("ssgd"))


@contextmanager
def begun(
    shards: Shards, function: Callable[..., Any], job: str, *, again: bool = False
) -> Iterator[list[Worker]]:
    """Starts the workers of a job, or starts them again; yields once each has told something.

    They are killed at the end.
    """
    restarts = {"TORCHELASTIC_RESTART_COUNT": str(int(again))}
    with shards.workers(function, job=job, env=restarts) as workers:
        for worker in workers:
            worker.hear()
        yield workers


@pytest.mark.slow
def test_a_step_that_a_slice_has_of_a_killed_worker_is_not_made_again(shards: Shards) -> None:
    """It counted twice there; and in ssp the worker waited for those that had made all steps."""
    job = new_job()
    with begun(shards, stops_between_slices, job) as workers:
        workers[1].hear()
    with begun(shards, goes_on, job, again=True) as workers:
        for worker in workers:
            worker.tell()
        found, other = results_of(workers)
    assert np.array_equal(found, other)
    assert sorted(found[:, STEPS + KILLED_IN]) == [0.0, 1.0]
    others = [at for at in range(2 * STEPS) if at % STEPS != KILLED_IN]
    assert (found[:, others] == 1.0).all()


@pytest.mark.slow
def test_workers_that_were_all_killed_as_they_began_make_each_step_together(
    shards: Shards,
) -> None:
    """One of them had joined and pulled nothing: it counted as there, and steps went without it."""
    job = new_job()
    with begun(shards, comes, job) as workers:
        workers[0].tell()
        wait_until(lambda: "for step 0 of worker 1" in workers[0].written())
    with begun(shards, comes, job, again=True) as workers:
        workers[0].tell()
        wait_until(lambda: "for step 0 of worker 1" in workers[0].written() or workers[0].is_over())
        workers[1].tell()
        for found in results_of(workers):
            assert (found == 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_job_of_which_one_shard_alone_has_an_update_continues(shards: Shards, shard: int) -> None:
    """The other shard began the job anew, without weights, and the workers ended with an error.

    The second shard follows the first one, which does begin it anew.
    """
    job = new_job()
    with begun(shards, partial(stops_before_another_shard, shard=shard), job):
        pass
    with begun(shards, comes, job, again=True) as workers:
        for worker in workers:
            worker.tell()
        for found in results_of(workers):
            assert sorted(found[:, ::STEPS].sum(1)) == [float(shard), 1.0]
            others = [at for at in range(2 * STEPS) if at % STEPS]
            assert (found[:, others] == 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["ssgd", "ssp", "local(steps=2)", "allreduce"])
def test_a_worker_that_was_stopped_while_its_job_began_anew_takes_part(
    mode: str, rank: int
) -> None:
    """The new one waited for its first weights, in an asynchronous mode for its arrival too."""
    job = new_job()
    with (
        Shards(2, lease_s=3.0) as shards,
        begun(shards, partial(is_stopped, mode=mode), job) as old,
    ):
        stays, other = old[rank], old[1 - rank]
        stays.kill(signal.SIGSTOP)
        other.kill()
        for worker in old:
            shards.wait_until_lost(job, worker.rank)
        with shards.workers(begins, mode, ranks=[other.rank], job=job) as (again,):
            wait_until(lambda: f"worker {rank} (has not joined yet)" in again.written())
            stays.kill(signal.SIGCONT)
            stays.tell()
            for found in results_of([stays, again]):
                assert (found == (1.0 if mode == "ssp" else 0.5)).all()


@pytest.mark.slow
def test_a_worker_that_is_started_again_after_a_change_to_an_asynchronous_mode_begins(
    shards: Shards,
) -> None:
    """It waited for the others where all workers of such a job begin, and none had been there."""
    job = new_job()
    with begun(shards, changes, job) as workers:
        workers[1].kill()
        env = {"TORCHELASTIC_RESTART_COUNT": "1"}
        with shards.workers(begins, "asgd", ranks=[1], job=job, env=env) as (again,):
            wait_until(lambda: again.is_over() or "at barrier" in again.written())
            workers[0].tell()
            found, other = results_of([workers[0], again])
    assert np.array_equal(found, other)
    assert (found[:, STEPS + 1 :] == 1.0).all()


@pytest.mark.slow
def test_a_worker_whose_model_is_in_an_open_round_is_not_waited_for_in_the_first_meeting(
    shards: Shards,
) -> None:
    """It waited for the end of that round, and the one started after it waited for it to meet."""
    job = new_job()
    with begun(shards, stops_with_the_model, job) as workers:
        workers[0].kill()
        env = {"TORCHELASTIC_RESTART_COUNT": "1"}
        with shards.workers(rounds, ranks=[0], job=job, env=env) as (first,):
            wait_until(lambda: "step 0 of worker 1" in first.written())
            workers[1].kill()
            with shards.workers(rounds, ranks=[1], job=job, env=env) as (second,):
                found, other = results_of([first, second])
    assert np.array_equal(found, other)


@pytest.mark.slow
def test_a_worker_notices_one_that_came_while_the_first_shard_began_again(tmp_path: Path) -> None:
    """The shard counted its meetings from 1 again, which was the number that the worker knew."""
    command, job = Command(tmp_path), new_job()
    bounds = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    with command.spawn("start", "--shards", 2, *lasting_ports()) as process, ExitStack() as stack:
        require_started(process)
        servers = ",".join(command.run_file()["addresses"])
        env = bounds | {"PACELINE_SERVERS": servers, "PACELINE_JOB": job, "WORLD_SIZE": "2"}
        first = stack.enter_context(closing(Worker(steps_alone, 0, (), env)))
        first.hear()
        os.kill(live_shards(tmp_path)[0], signal.SIGKILL)
        second = stack.enter_context(closing(Worker(comes_to_peers, 1, (), env)))
        wait_until(lambda: "to know who takes part" in second.written())
        first.tell()
        assert [worker.result() for worker in (first, second)] == [STEPS, STEPS]


@pytest.mark.slow
def test_workers_change_the_mode_where_the_first_shard_forgets_who_exchanges_nothing(
    tmp_path: Path,
) -> None:
    """One had reported that before, and the other waited for it while it waited for that one."""
    command = Command(tmp_path)
    with command.spawn("start", "--shards", 2, *lasting_ports()) as process, ExitStack() as stack:
        require_started(process)
        servers = ",".join(command.run_file()["addresses"])
        env = {"PACELINE_SERVERS": servers, "PACELINE_JOB": new_job(), "WORLD_SIZE": "2"}
        first, second = (
            stack.enter_context(
                closing(Worker(changes_alone, rank, (), {**env, "RANK": str(rank)}))
            )
            for rank in range(2)
        )
        first.hear()
        wait_until(lambda: "at barrier 'mode'" in second.written())
        os.kill(live_shards(tmp_path)[0], signal.SIGKILL)
        live_shards(tmp_path)
        first.tell()
        assert [worker.result() for worker in (first, second)] == [STEPS, STEPS]
