"""SlowMo: local steps as in local SGD, and a slow momentum in units of gradients on the shards.

Jianyu Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020, arXiv:1910.00643, algorithm 1; defaults as in fairscale's code (repository
facebookresearch/fairscale).

    worker, each step:       w_i <- inner(w_i, g_i)
    each H-th step:          push D_i = w_ref - w_i;  pull W;  w_ref = w_i = W
    shard:                   u <- slow_momentum * u + (1/N) sum_i D_i / lr
                             W <- W - slow_lr * lr * u

lr is the inner learning rate at the end of the round, so that the slow momentum follows a schedule.

Differs from the paper: the base is local SGD with one average per round (fairscale averages more
often by default, at every third step); the inner optimizer keeps its state from round to round.
The warm-up is rounds of one step without slow momentum, the plain mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscore.plugins import require_range
from pscore.rules.local import LocalSGD
from pscore.rules.speed import round_length


@dataclass(frozen=True)
class SlowMo(LocalSGD):
    """SlowMo.

    It has the fields of `LocalSGD`, with 48 steps by default, and those of its outer step.

    Attributes:
        slow_lr: Learning rate of the rounds over the inner one: 1 is the whole way to the mean.
        slow_momentum: Momentum over the rounds, 0 to below 1.
    """

    steps: int = round_length(48)
    slow_lr: float = 1.0
    slow_momentum: float = 0.5

    name = "slowmo"
    source = "Wang et al., arXiv:1910.00643"
    examples = ("(steps=4, warmup=5)",)
    outer_optimizer = "slowmo"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("slowmo.slow_lr", self.slow_lr, 0.0, 1e6)
        require_range("slowmo.slow_momentum", self.slow_momentum, 0.0, 1.0 - 1e-9)

    @property
    def momentum(self) -> float:
        """The slow one."""
        return self.slow_momentum

    def outer_group(
        self, step: int, group: Mapping[str, Any], num_workers: int
    ) -> Mapping[str, Any]:
        """The slow step, at the inner learning rate of now; in the warm-up the mean."""
        is_warm = step >= self.warmup
        return {
            "lr": float(group["lr"]),
            "slow_lr": self.slow_lr if is_warm else 1.0,
            "slow_momentum": self.slow_momentum if is_warm else 0.0,
        }
