"""SparseLoCo: rounds of its compressor both ways, beside the same rounds in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.compressors.sparseloco import CHUNK, SparseLoCo
from pscore.rules import DiLoCo
from pssim.training import TrainingCluster, TrainingJob

WORKERS, STEPS, ROUNDS, LR, K = 3, 4, 6, 0.1, 40
SHAPE = (90, 100)  # Three chunks, the last one short.
NUMEL = SHAPE[0] * SHAPE[1]
Vector = np.ndarray


def targets() -> Vector:
    """Returns the minimum of each worker's quadratic, with magnitudes that are far apart."""
    rng = np.random.default_rng(5)
    return rng.standard_normal((WORKERS, NUMEL)) * np.exp(rng.standard_normal(NUMEL))


TARGETS = targets()


def make_model() -> nn.Module:
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model


def gradient(model: nn.Module, rank: int, step: int) -> float:
    weight = next(model.parameters())
    assert weight.grad is not None
    away = weight.detach().double().numpy().ravel() - TARGETS[rank]
    weight.grad.copy_(torch.from_numpy(away.reshape(SHAPE)))
    return 0.0


def make_inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def sparse(values: Vector) -> Vector:
    """Returns Q of the k largest of each chunk."""
    sent = np.zeros_like(values)
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK]
        chosen = np.argsort(-np.abs(part), kind="stable")[:K]
        sizes = np.abs(part[chosen])
        is_high = sizes >= sizes.mean()
        levels = np.where(is_high, sizes[is_high].mean(), sizes[~is_high].mean())
        sent[start + chosen] = np.sign(part[chosen]) * levels
    return sent


def make_job(pulls: Compressor, decay: float, outer_lr: float, **changes: Any) -> TrainingJob:
    return TrainingJob(
        rule=DiLoCo(steps=STEPS, outer_lr=outer_lr, outer_momentum=0.0),
        make_model=make_model,
        gradient=gradient,
        group={"lr": LR},
        make_inner=make_inner,
        num_workers=WORKERS,
        num_shards=1,
        steps=STEPS * ROUNDS,
        compressor=SparseLoCo(k=K, decay=decay),
        pull_compressor=pulls,
        **changes,
    )


@pytest.mark.parametrize(("decay", "outer_lr"), [(0.95, 1.0), (0.5, 0.6)])
def test_rounds_follow_the_equations(decay: float, outer_lr: float) -> None:
    """e_i = b e_i + D_i; q_i = Q(e_i); e_i = e_i - q_i; W = W - a mean q_i."""
    weights, waits = np.zeros(NUMEL), np.zeros((WORKERS, NUMEL))
    for _ in range(ROUNDS):
        waits = decay * waits + (weights - TARGETS) * (1 - (1 - LR) ** STEPS)
        sent = np.array([sparse(part) for part in waits])
        waits -= sent
        weights = weights - outer_lr * sent.mean(axis=0)
    cluster = TrainingCluster(make_job(NoCompression(), decay, outer_lr)).run()
    assert np.abs(cluster.weights().numpy()[:NUMEL] - weights).max() < 1e-5
    for worker in cluster.workers:
        assert worker.pushed_nbytes < ROUNDS * 4 * NUMEL / 50


def test_answers_are_as_small_as_pushes() -> None:
    """X = X + Q(W - X) in every round but the first, whose answer is W; workers go on from X."""
    shown: list[tuple[Vector, Vector]] = []

    def look(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        if rank == 0 and (step + 1) % STEPS == 0:
            held = cluster.workers[0].flat_model.weights.numpy()
            shown.append((cluster.weights().numpy()[:NUMEL], held[:NUMEL].copy()))

    job = make_job(SparseLoCo(k=K, decay=1.0), 0.95, 1.0, on_step=look)
    cluster = TrainingCluster(job).run()
    assert np.array_equal(*shown[0])
    for (_, before), (weights, estimate) in pairwise(shown):
        residual = (weights - before).astype(np.float64)
        assert np.abs(estimate - (before + sparse(residual))).max() < 1e-5
        assert (estimate != weights).any()
    payload = SparseLoCo(k=K).payload_nbytes_max(NUMEL)
    for worker in cluster.workers:
        assert np.array_equal(worker.flat_model.weights.numpy()[:NUMEL], shown[-1][1])
        # The weights twice: at the start, and as the first answer; and a header for each message.
        whole = 4 * cluster.layout.numel
        assert worker.pushed_nbytes <= ROUNDS * (payload + 64) + 4096
        assert 0 <= worker.pulled_nbytes - 2 * whole <= (ROUNDS - 1) * (payload + 64) + 4096
