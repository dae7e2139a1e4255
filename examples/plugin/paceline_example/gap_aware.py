"""Gap-aware ASGD: a gradient shrinks by how far the weights have moved since its worker's pull.

Saar Barkai, Ido Hakimi and Assaf Schuster, "Gap Aware Mitigation of Gradient Staleness", ICLR 2020,
arXiv:1909.10802.

    C <- decay * C + (1 - decay) * |W' - W|       after each update from W to W'
    g~ = g / (1 + |W - W_bak[m]| / C)             W <- opt(W, g~)

W_bak[m] are the weights from which worker m computed g. A gap of one average update halves an
element of the gradient.

Differs from the paper: C is the mean size of the updates, where the paper has the learning rate
times the mean size of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscore.plugins import require_range
from pscore.rules.base import Memory, Rule
from pscore.types import FloatArray


@dataclass(frozen=True)
class GapAware(Rule):
    """Gap-aware asynchronous SGD.

    Attributes:
        decay: How much of the mean size is kept from one update to the next, 0 to below 1.
    """

    decay: float = 0.99

    name: ClassVar[str] = "gap_aware"
    source: ClassVar[str] = "Barkai et al., arXiv:1909.10802"
    compensates: ClassVar[bool] = True
    remembers_pulls: ClassVar[bool] = True
    remembers_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the argument; raises a `ConfigError` if it is out of its range."""
        require_range("gap_aware.decay", self.decay, 0.0, 1.0 - 1e-9)

    def on_pull(self, worker: int, memory: Memory) -> None:
        """Keeps W_bak[worker]."""
        memory.state[f"weights_backup.{worker}"] = memory.weights.copy()

    def on_update(self, weights: FloatArray, memory: Memory) -> None:
        """Moves the mean size of the updates by the size of this one."""
        size = np.abs(weights - memory.weights)
        mean = memory.state.setdefault("mean_size", np.zeros_like(weights))
        mean *= np.float32(self.decay)
        mean += np.float32(1.0 - self.decay) * size

    def compensate(self, grad: FloatArray, worker: int, memory: Memory) -> None:
        """Makes g~ of g, in place; before the first update there is no gap."""
        backup = memory.state.get(f"weights_backup.{worker}", memory.weights)
        mean = memory.state.get("mean_size")
        if mean is not None:
            gap = np.abs(memory.weights - backup)
            grad /= 1.0 + np.divide(gap, mean, out=np.zeros_like(gap), where=mean > 0.0)
