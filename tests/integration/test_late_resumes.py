"""A worker that is started again resumes from a file, as its script does at every start."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job, results_of, wait_until

NUM, NUMEL = 3, 9000  # Two slices on two shards.
STEPS, EPOCH, SAVED, KILLED = 40, 20, 6, 14
LEASE_S = 3.0
MODES = (
    "ssgd",
    "ssd(steps=4)",
    "asgd",
    "ssp",
    "local(steps=2)",
    "dpsgd(average_every=6)",
    "adpsgd(average_every=6)",
)


def make(mode: str) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(NUMEL, 1)
    torch.nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    return model, psworker.DistributedOptimizer(inner, model.named_parameters(), mode=mode)


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for value in group["params"]:
            value.grad = torch.ones_like(value)
    optimizer.step()


def saves(me: Station, mode: str, path: str) -> None:
    """Trains and saves its state, as a run before."""
    model, optimizer = make(mode)
    while optimizer.steps < SAVED:
        step(optimizer)
    with optimizer.global_weights():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if me.rank == 0:
            torch.save(state, path)
    psworker.barrier()
    optimizer.close()


def resumes(me: Station, mode: str, path: str, meets: bool, is_again: bool) -> tuple[int, int]:
    """Trains from the state of a file, perhaps with a barrier in between.

    Returns:
        The first and the last step.
    """
    psworker.init()
    if is_again:
        me.tell()
    model, optimizer = make(mode)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = optimizer.steps
    while optimizer.steps < STEPS:
        step(optimizer)
        if optimizer.steps == KILLED and not is_again:
            me.tell()
            me.hear()
        if optimizer.steps == EPOCH and meets:
            psworker.barrier("epoch")
    optimizer.close()
    return first, optimizer.steps


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "meets"), [*((mode, True) for mode in MODES), ("asgd", False)])
def test_a_worker_that_is_started_again_does_not_set_the_others_back(
    mode: str, meets: bool, tmp_path: Path
) -> None:
    """It loaded the file alone, and the job lost its steps since; the others may have ended too."""
    path = str(tmp_path / "state.pt")
    with Shards(2, lease_s=LEASE_S) as shards:
        shards.run(saves, mode, path, num_workers=NUM, job=new_job())
        job = new_job()
        with shards.workers(resumes, mode, path, meets, False, num_workers=NUM, job=job) as workers:
            for worker in workers:
                worker.hear()
            workers[0].kill()
            with shards.workers(
                resumes, mode, path, meets, True, num_workers=NUM, ranks=[0], job=job
            ) as (again,):
                again.hear()
                for worker in workers[1:]:
                    worker.tell()
                (begun, last), *others = results_of([again, *workers[1:]])
                assert "of the job, not from the state of step 6" in again.written()
                assert "worker 0 begins at step" in again.written()
    assert others == [(SAVED, STEPS)] * (NUM - 1)
    assert begun >= KILLED
    assert last == STEPS


def loads_between(me: Station, mode: str, path: str, is_again: bool) -> list[int]:
    """Trains, loads a state at a step, and trains on to the end.

    Returns:
        The steps that this worker has made after it had loaded the state, or had begun late.
    """
    psworker.init()
    if is_again:
        me.tell()
        me.hear()
    model, optimizer = make(mode)
    has_loaded, made = is_again, []
    while optimizer.steps < STEPS:
        step(optimizer)
        made += [optimizer.steps] if has_loaded else []
        if optimizer.steps == KILLED and not has_loaded:
            me.tell()
            me.hear()
        if optimizer.steps == EPOCH and not has_loaded:
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            has_loaded = True
    optimizer.close()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=4)", "local(steps=2)"])
def test_a_worker_that_begins_behind_a_load_joins_again_behind_it(
    mode: str, tmp_path: Path
) -> None:
    """The others waited for it in load_state_dict, and it for their next step."""
    path, job = str(tmp_path / "state.pt"), new_job()
    with Shards(2, lease_s=LEASE_S) as shards:
        shards.run(saves, mode, path, num_workers=NUM, job=new_job())
        with shards.workers(loads_between, mode, path, False, num_workers=NUM, job=job) as workers:
            for worker in workers:
                worker.hear()
            workers[2].kill()
            with shards.workers(
                loads_between, mode, path, True, num_workers=NUM, ranks=[2], job=job
            ) as (again,):
                again.hear()
                for worker in workers[:2]:
                    worker.tell()
                wait_until(lambda: all("has waited" in one.written() for one in workers[:2]))
                again.tell()
                *others, late = results_of([*workers[:2], again])
                assert "counts in 1 of 2 slices" not in again.written()
    assert others == [list(range(SAVED + 1, STEPS + 1))] * 2
    assert late[-1] == STEPS


def changes_mode(me: Station, is_again: bool) -> tuple[int, str]:
    """Trains, and changes the mode at a step; returns the first step, and the last mode."""
    psworker.init()
    if is_again:
        me.tell()
    _, optimizer = make("ssgd")
    first = optimizer.steps
    while optimizer.steps < STEPS:
        if optimizer.steps == SAVED:
            optimizer.set_mode("od(warmup=0)")
        step(optimizer)
        if optimizer.steps == KILLED and not is_again:
            me.tell()
            me.hear()
        if optimizer.steps == EPOCH:
            psworker.barrier("epoch")
    mode = mode_of(optimizer)
    optimizer.close()
    return first, mode


def mode_of(optimizer: Any) -> str:
    """Returns the name of the mode in the optimizer's state."""
    return str(optimizer.state_dict()["paceline"]["mode"]).partition("(")[0]


@pytest.mark.slow
def test_a_script_that_changes_the_mode_is_started_again_with_the_mode_that_it_names_first() -> (
    None
):
    """It was refused at each start: the job had another mode by then."""
    job = new_job()
    with (
        Shards(2, lease_s=LEASE_S) as shards,
        shards.workers(changes_mode, False, num_workers=NUM, job=job) as workers,
    ):
        for worker in workers:
            worker.hear()
        workers[0].kill()
        with shards.workers(changes_mode, True, num_workers=NUM, ranks=[0], job=job) as (again,):
            again.hear()
            for worker in workers[1:]:
                worker.tell()
            (first, mode), *others = results_of([again, *workers[1:]])
    assert (mode, first >= KILLED) == ("od", True)
    assert others == [(0, "od")] * (NUM - 1)
