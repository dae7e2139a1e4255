"""A worker that comes late calls what the others have passed, and begins behind where they wait."""

import time
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job, results_of, wait_until

NUM, NUMEL = 3, 9000  # Two slices on two shards.
STEPS, EPOCH = 40, 10
LEASE_S = 3.0
MODES = ("ssgd", "asgd", "dpsgd(average_every=6)")


def make(mode: str) -> Any:
    named = [(name, torch.nn.Parameter(torch.zeros(NUMEL))) for name in ("first", "second")]
    inner = torch.optim.SGD([value for _, value in named], lr=1.0)
    return psworker.DistributedOptimizer(inner, named, mode=mode)


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for value in group["params"]:
            value.grad = torch.ones(NUMEL)
    optimizer.step()


def call_all(me: Station) -> tuple[float, float]:
    """Calls what scripts call at their start; returns a mean, and a value of the first worker."""
    psworker.barrier()
    mean = psworker.push_pull(torch.full((2,), float(me.rank)), "mean")
    first = torch.full((2,), 5.0 + me.rank)
    others = [(f"buffer {number}", torch.zeros(2)) for number in range(20)]
    psworker.broadcast_parameters([*others, ("buffer", first)])
    return float(mean[0]), float(first[0])


def begins_with_calls(me: Station, mode: str, before: bool, is_again: bool) -> tuple[float, float]:
    """Trains behind the calls, which come before or after the optimizer is made."""
    psworker.init()
    if is_again:
        me.tell()
    found = call_all(me) if before else None
    optimizer = make(mode)
    found = found or call_all(me)
    while optimizer.steps < STEPS:
        if optimizer.steps % EPOCH == 0:
            psworker.barrier("epoch")
        step(optimizer)
        if optimizer.steps == EPOCH + 2 and not is_again:
            me.tell()
            me.hear()
    psworker.barrier()
    optimizer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_started_again_does_not_wait_where_the_others_have_passed(
    mode: str, before: bool
) -> None:
    """It gets what they have got there. They waited for its step, and it for them at a barrier."""
    job = new_job()
    with (
        Shards(2, lease_s=LEASE_S) as shards,
        shards.workers(begins_with_calls, mode, before, False, num_workers=NUM, job=job) as workers,
    ):
        for worker in workers:
            worker.hear()
        workers[0].kill()
        with shards.workers(
            begins_with_calls, mode, before, True, num_workers=NUM, ranks=[0], job=job
        ) as again:
            again[0].hear()
            for worker in workers[1:]:
                worker.tell()
            assert results_of([*again, *workers[1:]]) == [(1.0, 5.0)] * NUM
            assert "does not wait at" in again[0].written()


def waits_for_the_first(me: Station, mode: str, is_again: bool) -> tuple[float, float]:
    """Trains behind a barrier, to which the first worker comes when told.

    Returns:
        When this worker came to the barrier, and when it had passed.
    """
    psworker.init()
    if me.rank == 0 and is_again:
        me.hear()
    came_s = time.monotonic()
    psworker.barrier()
    passed_s = time.monotonic()
    optimizer = make(mode)
    while optimizer.steps < STEPS:
        step(optimizer)
        if optimizer.steps == EPOCH and not is_again:
            me.tell()
    psworker.barrier()
    optimizer.close()
    return came_s, passed_s


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_workers_that_are_all_started_again_wait_for_each_other(mode: str) -> None:
    job = new_job()
    with (
        Shards(2, lease_s=LEASE_S) as shards,
        shards.workers(waits_for_the_first, mode, False, num_workers=NUM, job=job) as workers,
    ):
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.kill()
        with shards.workers(waits_for_the_first, mode, True, num_workers=NUM, job=job) as again:
            # They have asked several times by then.
            wait_until(lambda: all("has waited" in other.written() for other in again[1:]))
            again[0].tell()
            (came_s, _), *_ = times = results_of(again)
            assert all(passed_s >= came_s for _, passed_s in times)


def meets_behind_epochs(me: Station, mode: str, call: str, stop: int, is_late: bool) -> int:
    """Trains, and meets the others behind each epoch; a late worker joins and begins when told.

    Args:
        stop: The step behind which it waits to be told to go on.
    """
    psworker.init()
    if is_late:
        me.tell()
        me.hear()
    optimizer = make(mode)
    while optimizer.steps < 2 * STEPS:
        step(optimizer)
        if optimizer.steps == stop and not is_late:
            me.tell()
            me.hear()
        if optimizer.steps % EPOCH == 0:
            if optimizer.steps == EPOCH * (stop // EPOCH + 1):
                me.tell()
            if call == "barrier":
                psworker.barrier()
            else:
                psworker.push_pull(torch.ones(1), "accuracy")
    psworker.barrier("end")
    steps: int = optimizer.steps
    optimizer.close()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("is_elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("stop", [2, EPOCH + 2])
@pytest.mark.parametrize("call", ["barrier", "push_pull"])
@pytest.mark.parametrize("mode", MODES)
def test_workers_do_not_wait_for_one_that_begins_behind_them(
    mode: str, call: str, stop: int, is_elastic: bool
) -> None:
    """It waits for their step; they waited for it at a barrier to which it does not come.

    Or in the first round of a tensor.
    """
    job, rank = new_job(), 3 if is_elastic else 1
    elastic = {"PACELINE_MIN_WORKERS": "3", "PACELINE_MAX_WORKERS": "4", "PACELINE_RANK": "-1"}
    env = elastic if is_elastic else {}
    with (
        Shards(2, lease_s=LEASE_S) as shards,
        shards.workers(
            meets_behind_epochs, mode, call, stop, False, num_workers=NUM, job=job, env=env
        ) as workers,
    ):
        for worker in workers:
            worker.hear()
        others = [one for one in workers if is_elastic or one.rank != rank]
        if not is_elastic:
            workers[rank].kill()
        with shards.workers(
            meets_behind_epochs, mode, call, stop, True,
            num_workers=NUM + is_elastic, ranks=[rank], job=job, env=env,
        ) as (late,):  # fmt: skip
            late.hear()
            for worker in others:
                worker.tell()
            for worker in others:
                worker.hear()
            late.tell()
            assert min(results_of([late, *others])) >= 2 * STEPS
