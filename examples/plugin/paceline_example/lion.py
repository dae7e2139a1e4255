"""Lion on the shards: steps of one size, in the direction of a sign.

Xiangning Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
arXiv:2302.06675, algorithm 2.

    c = beta1 * m + (1 - beta1) * g
    w = w - lr * (sign(c) + weight_decay * w)
    m = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from pscore.optimizers.base import Optimizer, SliceStep


class Lion(Optimizer):
    """The shards' counterpart of `torch_lion.Lion`."""

    name: ClassVar[str] = "lion"
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {
        "paceline_example.torch_lion.Lion": frozenset()
    }
    hyper_names: ClassVar[tuple[str, ...]] = ("lr", "beta1", "beta2", "weight_decay")
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def step(self, step: SliceStep) -> None:
        """Makes one step; NumPy holds the GIL between its loops, a Numba kernel would not."""
        (before,), (after,) = step.state, step.state_out or step.state
        for source, target in ((step.weights, step.out), (before, after)):
            if source is not target:
                np.copyto(target, source)
        for index in np.flatnonzero(step.active):
            part = slice(*step.segments.bounds[index])
            lr, beta1, beta2, decay = step.hyper[step.segments.groups[index]].astype(np.float32)
            grad = step.grad[part] * np.float32(step.scale)
            weights, mean = step.out[part], after[part]
            direction = np.sign(beta1 * mean + (1 - beta1) * grad)
            weights -= lr * (direction + decay * weights)
            mean += (1 - beta2) * (grad - mean)
            step.counts[index] += 1
