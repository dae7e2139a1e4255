"""PULSELoCo: rounds of its compressor, beside the same rounds in float64."""

from typing import Any

import numpy as np
import torch
from torch import nn

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.compressors.pulseloco import PulseLoCo
from pscore.rules import DiLoCo
from pssim.training import TrainingCluster, TrainingJob

WORKERS, STEPS, ROUNDS, LR = 3, 4, 6, 0.1
SHAPE = (90, 100)
NUMEL = SHAPE[0] * SHAPE[1]
RNG = np.random.default_rng(5)
START = RNG.standard_normal(NUMEL, dtype=np.float32)
# A move is about as large as half a rounding step of bfloat16.
TARGETS = START + 0.01 * RNG.standard_normal((WORKERS, NUMEL))


def make_model() -> nn.Module:
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(START.reshape(SHAPE)))
    return model


def gradient(model: nn.Module, rank: int, step: int) -> float:
    weight = next(model.parameters())
    assert weight.grad is not None
    away = weight.detach().double().numpy().ravel() - TARGETS[rank]
    weight.grad.copy_(torch.from_numpy(away.reshape(SHAPE)))
    return 0.0


def make_inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns values as bfloat16."""
    found: np.ndarray = torch.from_numpy(values).float().bfloat16().double().numpy()
    return found


def trained(pulls: Compressor, **changes: Any) -> TrainingCluster:
    job = TrainingJob(
        rule=DiLoCo(steps=STEPS, outer_lr=0.7, outer_momentum=0.9),
        make_model=make_model,
        gradient=gradient,
        group={"lr": LR},
        make_inner=make_inner,
        num_workers=WORKERS,
        num_shards=2,
        steps=STEPS * ROUNDS,
        compressor=PulseLoCo(),
        pull_compressor=pulls,
        **changes,
    )
    return TrainingCluster(job).run()


def test_rounds_follow_the_equations() -> None:
    """e_i = e_i + D_i; q_i = e_i where bf16(W - e_i) is not bf16(W); V = m V + mean q_i."""
    weights, momentum = START.astype(np.float64), np.zeros(NUMEL)
    waits, num_sent = np.zeros((WORKERS, NUMEL)), 0
    for _ in range(ROUNDS):
        waits += (weights - TARGETS) * (1 - (1 - LR) ** STEPS)
        is_shown = rounded(weights - waits) != rounded(weights)
        mean = np.where(is_shown, waits, 0.0).mean(axis=0)
        waits[is_shown] = 0.0
        num_sent += int(is_shown.sum())
        momentum = 0.9 * momentum + mean
        weights = weights - 0.7 * (mean + 0.9 * momentum)
    assert 0.2 < num_sent / (ROUNDS * WORKERS * NUMEL) < 0.8
    cluster = trained(NoCompression())
    away = np.abs(cluster.weights().numpy()[:NUMEL] - weights)
    # A sum at a tie of bfloat16 is sent a round earlier or later than in float64.
    assert (away > 1e-5).mean() < 2e-3
    assert away.max() < 0.02
    pushed = sum(worker.pushed_nbytes for worker in cluster.workers)
    bits = ROUNDS * WORKERS * NUMEL // 8
    assert abs(pushed - 4 * num_sent - bits) < 0.01 * pushed + 64 * 2 * ROUNDS * WORKERS


def test_pulled_weights_are_the_shards_in_bfloat16() -> None:
    seen: list[bool] = []

    def look(cluster: TrainingCluster, rank: int, step: int, loss: float) -> None:
        if rank == 0 and (step + 1) % STEPS == 0:
            held = cluster.workers[0].flat_model.weights.numpy()[:NUMEL]
            weights = cluster.weights().numpy()[:NUMEL]
            assert np.array_equal(rounded(held), rounded(weights))
            seen.append(bool((held != weights).any()))

    trained(PulseLoCo(), on_step=look)
    assert seen == [False] + [True] * (ROUNDS - 1)
