"""Local steps and rounds in float64: the common part of local SGD, SlowMo and DiLoCo."""

from collections.abc import Callable

import numpy as np
import torch

from tests.harness import NUMEL, Vector, quadratic
from tests.paper.inner import Inner

Outer = Callable[[int, Vector, Vector], Vector]  # Step, x_old, x_avg: the new weights.
WORKERS = 4


def model(
    inner: Inner, is_round: Callable[[int], bool], outer: Outer, steps: int
) -> tuple[Vector, Vector]:
    """Returns what each worker saw at each step, and the global weights at the end."""
    start = np.zeros(NUMEL)
    local = torch.zeros((WORKERS, NUMEL), dtype=torch.float64)
    seen = np.zeros((WORKERS, steps, NUMEL))
    for step in range(steps):
        seen[:, step] = local.numpy()
        for worker in range(WORKERS):
            grad = quadratic(worker, step, local[worker].numpy())
            inner(worker, step, local[worker], grad)
        if is_round(step):
            start = outer(step, start, local.numpy().mean(axis=0))
            local.copy_(torch.from_numpy(np.tile(start, (WORKERS, 1))))
    return seen, start
