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
from typing import Any, ClassVar

from pscore.plugins import require_range
from pscore.rules.local import LocalSGD
from pscore.rules.speed import round_length


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """DiLoCo.

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
        outer_lr: Learning rate of the rounds, without unit: 1 is the whole way to the mean.
        outer_momentum: m, momentum over the rounds, 0 to below 1.
        nesterov: Whether that momentum is Nesterov's.
    """

    steps: int = round_length(500)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    name: ClassVar[str] = "diloco"
    source: ClassVar[str] = "Douillard et al., arXiv:2311.08105"

    def __post_init__(self) -> None:
        """Checks every argument.

        Raises:
            ConfigError: One of them is out of its range.
        """
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
