"""The shards' half of decentralised modes: models are on the workers, their mean on the shards.

After Xiangru Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
arXiv:1705.09056: each worker keeps a model of its own, runs the wrapped optimizer on it, and
exchanges numbers with other workers, as the worker's part of the mode says (`gossip`).

    worker, each step:               the mode's exchange, and x_i <- opt(x_i, g_i)
    each `average_every`-th step:    push x_i
    shard:                           W <- (1/N) sum_i x_i, added in the order of the ranks

Differs from the papers: the shards keep the mean of the models for evaluation, checkpoints, export
and workers that come in new. No worker waits for it or trains on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.plugins import require_range
from pscore.rules.base import Plan
from pscore.rules.ssgd import Synchronous
from pscore.types import Role

EVERY_MAX = 1_000_000


@dataclass(frozen=True)
class Decentralised(Synchronous):
    """The shards' half of a mode whose workers exchange models or gradients with each other.

    Attributes:
        average_every: Steps from one push of the model to the next, 1 or more.
    """

    average_every: int = 50

    outer_optimizer = "assign"
    round_role = Role.MODEL

    def __post_init__(self) -> None:
        require_range(f"{self.name}.average_every", self.average_every, 1, EVERY_MAX)

    @property
    def exchange_name(self) -> str:
        """The workers' exchange with each other (psworker/gossip) under these arguments."""
        return self.gossip

    @property
    def period(self) -> int:
        """Steps from one average to the next."""
        return self.average_every

    @property
    def adopts(self) -> bool:
        """Whether all workers continue from the average."""
        return False

    @property
    def forgets(self) -> bool:
        """Whether the wrapped optimizer's state is dropped where all continue from the average."""
        return False

    def plan(self, step: int) -> Plan:
        """The user's optimizer at every step; the model is pushed at the end of a period."""
        if step % self.period == self.period - 1:
            adopts = self.adopts
            return Plan(push=Role.MODEL, compress=False, inner=True, pull=adopts, block=adopts)
        return Plan(push=None, inner=True, pull=False, block=False)

    def step_after(self, step: int, num_pushes: int) -> int:
        """The step behind the last of so many averages."""
        return step if num_pushes == 0 else (step // self.period + num_pushes) * self.period


@dataclass(frozen=True)
class Warmed(Decentralised):
    """A mode whose workers may begin with the mean of all models in every step.

    Attributes:
        warmup: Steps of that, before the mode's own begin.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(f"{self.name}.warmup", self.warmup, 0, 1 << 40)
