"""Clipping by the norm of the workers' mean gradient, held to plain torch in one process."""

import math

import numpy as np
import pytest
import torch

import psworker
from tests.inside import forget_worker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import (
    backward,
    batch,
    make_model,
    relative_error,
    same,
    sgd,
    weights_of,
)

STEPS = 6
MAX_NORM = 0.3
Weights = dict[str, np.ndarray]


def train(me: Station, mode: str) -> tuple[Weights, list[float]]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, samples=1.0 + 2 * me.rank
    )
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        norms.append(psworker.clip_grad_norm_(optimizer, MAX_NORM).item())
        optimizer.step()
    optimizer.close()
    return weights_of(model), norms


def together() -> tuple[Weights, list[float]]:
    """Trains on both workers' batches, the second of which weighs three times as much."""
    model, norms = make_model(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, weight in enumerate((0.25, 0.75)):
            inputs, classes = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            torch.autograd.backward(weight * loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return weights_of(model), norms


def test_the_mean_is_clipped_as_one_process_clips_it(shards: Shards) -> None:
    plain, norms = together()
    assert min(norms) > MAX_NORM
    first, second = shards.run(train, "ssgd")
    assert same(first[0], second[0])
    assert first[1] == second[1]
    np.testing.assert_allclose(first[1], norms, rtol=1e-5)
    for name, weight in plain.items():
        assert relative_error(first[0][name], weight) <= 2e-6, name


def test_a_delayed_mode_clips_by_one_norm_too(shards: Shards) -> None:
    first, second = shards.run(train, "ssd(steps=2, warmup=2)")
    assert same(first[0], second[0])
    assert first[1] == second[1]


def refuse(me: Station, job: str) -> list[str]:
    """Returns what is refused, and the norm where one worker's gradient is not finite."""
    told = []
    for mode in ("asgd", "local(steps=2)", "ssgd(backup=1)"):
        psworker.shutdown()
        psworker.init(job=f"{job}-{mode}")
        model = make_model()
        optimizer = psworker.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), mode=mode
        )
        with pytest.raises(psworker.ConfigError) as caught:
            psworker.clip_grad_norm_(optimizer, 1.0)
        told.append(str(caught.value))
    psworker.shutdown()
    psworker.init(job=f"{job}-inf")
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    backward(model, *batch(me.rank, 0))
    grad = model.get_parameter("0.bias").grad
    assert grad is not None
    if me.rank == 1:
        grad[3] = math.inf
    before = grad.clone()
    told.append(str(psworker.clip_grad_norm_(optimizer, 1e-3).item()))
    assert torch.equal(grad, before)
    optimizer.skip_step()
    return told


def test_it_is_refused_where_no_update_is_the_mean_of_a_step(shards: Shards) -> None:
    for *told, norm in shards.run(refuse, new_job()):
        for mode, message in zip(("asgd", "local", "ssgd"), told, strict=True):
            assert message.startswith(f"in mode {mode} the mean")
            assert "torch.nn.utils.clip_grad_norm_" in message
        assert norm == "inf"


ELASTIC = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
JOINS = 3  # The step with which the second worker begins.
COMES_BACK = JOINS + 2


def clip_in_turns(me: Station, pauses: bool) -> tuple[dict[int, float], Weights]:
    """Trains with clipping; the first worker stops before and behind the clipping of one step."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    me.tell(optimizer.steps)
    norms = {}
    while (step := optimizer.steps) < STEPS:
        if pauses and step == JOINS:
            me.tell("there")
            me.hear()
        optimizer.zero_grad()
        backward(model, *batch(psworker.rank(), step))
        norms[step] = psworker.clip_grad_norm_(optimizer, MAX_NORM).item()
        if pauses and step == JOINS:
            me.tell("clipped")
            me.hear()
        optimizer.step()
    return norms, weights_of(model)


@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_worker_that_joins_before_a_step_clips_as_the_others_have(
    shards: Shards, is_clipped: bool
) -> None:
    """The others have clipped the step without it, before or after it began with that step."""
    job = new_job()
    with shards.workers(clip_in_turns, True, num_workers=1, job=job, env=ELASTIC) as (first,):
        assert [first.hear(), first.hear()] == [0, "there"]
        if is_clipped:
            first.tell()
            assert first.hear() == "clipped"
        with shards.workers(clip_in_turns, False, num_workers=1, job=job, env=ELASTIC) as (second,):
            assert second.hear() == JOINS
            if not is_clipped:
                first.tell()
                assert first.hear() == "clipped"
            first.tell()
            (norms, weights), (later, same_weights) = (w.result() for w in (first, second))
    assert list(later) == list(range(JOINS, STEPS))
    assert later.items() <= norms.items()
    assert same(weights, same_weights)


def clip_and_return(me: Station) -> tuple[dict[int, float], float]:
    """Worker 1 loses its place behind the clipping of a step, and comes back two steps later.

    Returns the norms by step, and this worker's own in the last step.
    """
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    norms, own = {}, math.nan
    while (step := optimizer.steps) < COMES_BACK + 3:
        if (me.rank, step) == (0, COMES_BACK):
            me.tell()
            me.hear()
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        grads = [one.grad.reshape(-1) for one in model.parameters() if one.grad is not None]
        own = torch.linalg.vector_norm(torch.cat(grads)).item()
        norms[step] = psworker.clip_grad_norm_(optimizer, MAX_NORM).item()
        if (me.rank, step) == (1, JOINS):
            forget_worker(optimizer)
            me.hear()
            optimizer.step()
            me.tell()
        else:
            optimizer.step()
    return norms, own


def test_a_worker_that_comes_back_clips_by_the_norms_of_its_steps(shards: Shards) -> None:
    with shards.workers(clip_and_return) as (first, second):
        first.hear()  # It has made the steps without the second.
        second.tell()
        second.hear()
        first.tell()
        (norms, own), (later, their_own) = first.result(), second.result()
    assert list(norms) == list(range(COMES_BACK + 3))
    assert list(later) == [*range(JOINS + 1), *range(COMES_BACK, COMES_BACK + 3)]
    assert later.items() <= norms.items()
    assert list(norms.values())[-1] not in (own, their_own)  # It is that of the mean of both.


def clip_or_skip(me: Station) -> tuple[list[float], Weights]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        if me.rank == 1 and step in (2, 3):
            optimizer.skip_step()
            continue
        norms.append(psworker.clip_grad_norm_(optimizer, MAX_NORM).item())
        optimizer.step()
    return norms, weights_of(model)


def test_a_worker_may_skip_a_step_that_the_others_clip(shards: Shards) -> None:
    (norms, weights), (fewer, others) = shards.run(clip_or_skip)
    assert fewer == [*norms[:2], *norms[4:]]
    assert same(weights, others)
