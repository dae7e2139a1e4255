"""A noisy quadratic with several workers: the setting in which local updates are told apart.

Four workers, mean gradients, momentum SGD on the shard, condition number 100. Warm-up steps pull
and block. After that a pull of W^{t+1} at each k-th step becomes the base of the local update of
step t+1. Not a result of any paper: a regression test of the equations.
"""

import numpy as np
import torch

from pscore.local import LocalSlice, LocalUpdate
from pscore.optimizers.base import SliceStep
from pscore.optimizers.sgd import SGD
from pscore.types import SegmentTable

NUMEL, WORKERS, STEPS, LR, NOISE, WARMUP = 50, 4, 400, 0.05, 0.3, 20
CURVATURE = np.logspace(-2, 0, NUMEL)


def make_part(hyper: list[float], numel: int) -> LocalSlice:
    """Returns a slice of one segment, all zeros, with the shard's momentum SGD."""
    return LocalSlice(
        weights=torch.zeros(numel),
        segments=SegmentTable(bounds=np.array([[0, numel]]), groups=np.zeros(1, np.int64)),
        optimizer=SGD(),
        hyper=np.array([hyper]),
        active=np.ones(1, np.int64),
        counts=np.zeros(1, np.int64),
    )


def rebase(local: LocalUpdate, part: LocalSlice, weights: list[float], version: int) -> None:
    """Lands a pull without optimizer state."""
    local.rebase(part, torch.tensor(weights), [], version)
    part.version = version


def objective(seed: int, steps: int, momentum: float, local: LocalUpdate | None) -> float:
    """Returns the loss of the shard's weights after the run; no local update is SSGD."""
    rng = np.random.default_rng(seed)
    shard = make_part([LR, momentum, 0.0, 0.0, 0.0, 0.0], NUMEL)
    shard.weights.fill_(3.0)
    velocity = torch.zeros(NUMEL)
    parts = [make_part(shard.hyper[0].tolist(), NUMEL) for _ in range(WORKERS)]

    def land(version: int) -> None:
        for part in parts:
            if local is None:
                part.weights.copy_(shard.weights)
                continue
            with_state = local.wants_state(last_of_warmup=version == WARMUP)
            local.rebase(part, shard.weights, [velocity] if with_state else [], version)
            part.version = version
            part.counts[:] = shard.counts

    land(0)
    for step in range(STEPS):
        grads = [
            CURVATURE * part.weights.numpy() + NOISE * rng.standard_normal(NUMEL) for part in parts
        ]
        if local is not None and step >= WARMUP:
            if step > WARMUP and (step - WARMUP) % steps == 0:
                land(step)
            for part, grad in zip(parts, grads, strict=True):
                local.update(part, torch.from_numpy(grad.astype(np.float32)))
        weights = shard.weights.numpy()
        total = np.sum(grads, axis=0).astype(np.float32)
        shard.optimizer.step(
            SliceStep(
                weights,
                weights,
                total,
                1 / WORKERS,
                [velocity.numpy()],
                shard.segments,
                shard.counts,
                shard.active,
                shard.hyper,
            )
        )
        if local is None or step < WARMUP:
            land(step + 1)
    return 0.5 * float(np.sum(CURVATURE * shard.weights.numpy().astype(np.float64) ** 2))


def median_objective(steps: int, momentum: float, local: LocalUpdate | None) -> float:
    """Returns the median loss of seven seeds."""
    return float(np.median([objective(seed, steps, momentum, local) for seed in range(7)]))
