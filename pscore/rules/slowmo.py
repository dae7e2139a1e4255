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
from typing import Any, ClassVar

from pscore.plugins import require_range
from pscore.rules.local import LocalSGD
from pscore.rules.speed import round_length


@dataclass(frozen=True)
class SlowMo(LocalSGD):
    """SlowMo.

    Attributes:
        steps: H, steps from one round to the next, 1 or more.
        warmup: Steps that are rounds of their own, of which the shards take the plain mean,
            before rounds of H steps begin.
        backup: b, workers that a round need not wait for, 0 to the number of workers less one.
        overlap: The start of a round without the answer to the one before: `mirror`, `blend`,
            `eager`, `late`; `none` waits for it.
        delay: Steps of the next round after which that answer lands, 0..H: a worker then waits for
            it if it has not come. 0 waits at the end of the round; -1 is a fifth of H, 1 or more.
        mix: `blend`: weight of the worker's own weights when the answer lands, 0 to 1.
        control: `mirror`: part of the lasting difference between a worker's moves and their mean
            that is taken out of its guess, 0 to 1; for unlike data.
        quorum: K, workers with which a round may close once its window is over; a later move
            enters the next round. 0: a round waits for all of them.
        window: Seconds that a round with its quorum waits for the others; -1 follows the spread
            of their arrivals, up to a quarter of a round.
        fragments: p, parts of the model whose rounds end in turn, 1 to `steps`; 1: all at once.
        pattern: The division into fragments: `sequential`, neighbouring layers with about as many
            bytes each; `strided`, each p-th slice.
        steps_min: Least steps of a round of a worker that is slower than the fastest one: each
            makes as many as its speed allows. 0: each makes `steps`. `steps="speed"` is 1.
        slow_lr: Learning rate of the rounds over the inner one: 1 is the whole way to the mean.
        slow_momentum: Momentum over the rounds, 0 to below 1.
    """

    steps: int = round_length(48)
    slow_lr: float = 1.0
    slow_momentum: float = 0.5

    name: ClassVar[str] = "slowmo"
    source: ClassVar[str] = "Wang et al., arXiv:1910.00643"
    outer_optimizer: ClassVar[str] = "slowmo"

    def __post_init__(self) -> None:
        """Checks every argument.

        Raises:
            ConfigError: One of them is out of its range.
        """
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
