"""Delayed Nesterov: asynchronous rounds whose momentum moves with each N-th arrival only.

Bo Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135,
algorithm 3 (recalled; a public implementation, `DelayedNesterovOptimizer` in a fork of torchft, has
the same step for c = 0).

    worker, each step:       w_i <- inner(w_i, g_i)
    each H-th step:          push D_i = w_ref - w_i;  pull W;  w_ref = w_i = W
    shard, each arrival:     S <- S + D_i
      the N-th since:        V <- m V + S / N;  S <- 0;  W <- W - outer_lr (D_i / N + a m V)
      any other:             W <- W - outer_lr (D_i / N + c m V)          a = 1 - c N + c

A worker waits for its own update only. N arrivals together make one Nesterov step with the mean of
their moves, where asynchronous SGD with momentum would amplify each move on its own: its momentum
would decay N times as fast in time, and count moves from weights that are gone.

Differs from the paper: N may be another number than that of the workers; moves are not weighed.
The paper's dynamic local updates are `steps="speed"` (pscore/rules/speed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from pscore.fragments import Schedule
from pscore.optimizers.delayed_nesterov import EVERY_MAX
from pscore.plugins import require_range
from pscore.rules.base import Plan
from pscore.rules.local import momentum_caution
from pscore.rules.speed import WithSpeed, round_length
from pscore.types import Role


@dataclass(frozen=True)
class DelayedNesterov(WithSpeed):
    """Delayed Nesterov.

    Attributes:
        steps: H, steps from one push to the next, 1 or more.
        every: N, arrivals from one change of the momentum to the next; each moves the weights by
            1/N of its move. 0: the number of workers that the job was made for.
        outer_lr: Learning rate of the rounds, without unit: 1 is the whole way to the mean.
        outer_momentum: m, momentum over N arrivals, 0 to below 1.
        activation: c, part of the momentum's move that each arrival but the N-th makes, 0 to 1/N.
            0: the N-th makes all of it.
        steps_min: Least steps of a round of a worker that is slower than the fastest one: each
            makes as many as its speed allows. 0: each makes `steps`. `steps="speed"` is 1.
    """

    steps: int = round_length(50)
    every: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    activation: float = 0.0
    steps_min: int = 0

    name = "delayed_nesterov"
    source = "Liu et al., arXiv:2401.09135"
    examples = ("(steps=4)",)
    outer_optimizer = "delayed_nesterov"

    def __post_init__(self) -> None:
        self.read_steps()
        require_range(f"{self.name}.every", self.every, 0, EVERY_MAX)
        require_range(f"{self.name}.outer_lr", self.outer_lr, 0.0, 1e6)
        require_range(f"{self.name}.outer_momentum", self.outer_momentum, 0.0, 1.0 - 1e-9)
        require_range(f"{self.name}.activation", self.activation, 0.0, 1.0)
        if self.every:
            self._require_activation(self.every)

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for an activation that is more than 1/N."""
        self._require_activation(self.every or num_workers)

    def _require_activation(self, every: int) -> None:
        if self.activation * every > 1.0 + 1e-9:
            raise ConfigError(
                f"{self.name}.activation is {self.activation:g}, must be at most 1/{every}: the "
                f"{every} arrivals of one step of the momentum would make more than its move"
            )

    @property
    def schedule(self) -> Schedule:
        """One round every H steps, of the whole model."""
        return Schedule(1, self.steps, 0, least=self.steps_min)

    def plan(self, step: int) -> Plan:
        """The user's optimizer at every step; a push and a pull at the end of a round."""
        if (step + 1) % self.steps:
            return Plan(push=None, inner=True, pull=False, block=False, lands=False)
        return Plan(push=Role.DELTA, inner=True)

    def step_after(self, step: int, num_pushes: int) -> int:
        """The step behind so many rounds."""
        return self.schedule.step_of(step, [num_pushes])

    def outer_group(
        self, step: int, group: Mapping[str, Any], num_workers: int
    ) -> Mapping[str, Any]:
        """The outer rate and momentum, and the number of arrivals of one step of the momentum."""
        return {
            "lr": self.outer_lr,
            "momentum": self.outer_momentum,
            "every": self.every or num_workers,
            "activation": self.activation,
        }

    def caution(self, compressor: Compressor) -> str:
        """Error feedback and momentum over the rounds count the same past twice."""
        return momentum_caution(self.name, self.outer_momentum, compressor)
