"""DiLoCo: local steps as in local SGD, and Nesterov momentum over the rounds on the shards.

Arthur Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1; also as in the code of OpenDiLoCo (repository
PrimeIntellect-ai/OpenDiloco).

    worker, each step:       w_i <- inner(w_i, g_i)                          AdamW in the paper
    each H-th step:          push D_i = w_ref - w_i;  pull W;  w_ref = w_i = W
    shard:                   D = (1/N) sum_i D_i
                             V <- m * V + D;   W <- W - outer_lr * (D + m * V)

The inner optimizer is the wrapped torch optimizer, and its state stays on the worker.

Differs from the paper: Nesterov momentum is that of torch, which is what the reference code uses.
The warm-up is rounds of one step without outer momentum, the plain mean; the paper starts from a
model that was trained before. Rounds are weighed by `samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscore.plugins import require_range
from pscore.rules.local import LocalSGD
from pscore.rules.speed import round_length


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """DiLoCo.

    It has the fields of `LocalSGD`, with 500 steps by default, and those of its outer step.

    Attributes:
        outer_lr: Learning rate of the rounds, without unit: 1 is the whole way to the mean.
        outer_momentum: m, momentum over the rounds, 0 to below 1.
        nesterov: Whether that momentum is Nesterov's.
    """

    steps: int = round_length(500)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    name = "diloco"
    source = "Douillard et al., arXiv:2311.08105"
    examples = ("(steps=4, warmup=5)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("diloco.outer_lr", self.outer_lr, 0.0, 1e6)
        require_range("diloco.outer_momentum", self.outer_momentum, 0.0, 1.0 - 1e-9)

    @property
    def momentum(self) -> float:
        """That of the outer optimizer."""
        return self.outer_momentum

    def outer_group(
        self, step: int, group: Mapping[str, Any], num_workers: int
    ) -> Mapping[str, Any]:
        """SGD with Nesterov momentum after the warm-up."""
        mean = super().outer_group(step, group, num_workers)
        if step < self.warmup:
            return mean
        return {
            **mean,
            "lr": self.outer_lr,
            "momentum": self.outer_momentum,
            "nesterov": self.nesterov and self.outer_momentum > 0,
        }
