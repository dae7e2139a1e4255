"""Clipping by the norm of the workers' mean gradient, held to plain torch in one process."""

import math

import numpy as np
import pytest
import torch

import psworker
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
        for mode, message in zip(("asgd", "local(steps=2", "ssgd(backup=1"), told, strict=True):
            assert message.startswith(f"in mode {mode}")
            assert "torch.nn.utils.clip_grad_norm_" in message
        assert norm == "inf"
