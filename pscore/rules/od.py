"""One-step-delay SGD: the pull of a step hides behind the whole of the next one.

Yemao Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training",
arXiv:2005.06728; schedule and local updates as in the authors' code (repository
CynthiaProtector/OD-SGD, kvstore_dist.h and optimizer.py).

    shard:              W^{t+1} = opt(W^t, (1/N) sum_i g_i^t)                  as in SSGD
    worker, warm-up:    w_i^{t+1} = W^{t+1}                                    as in SSGD
    worker, later:      w_i^{t+1} = LU(W^t, g_i^t)                             used once
                      = W^t - lr * (g_i + wd * W^t + L * g_i * g_i * (W^t - W^{t-1}))
    sgd: L = 0          dc: L = lambda          dc_adaptive: L = lambda_0 / sqrt(MS_i)

The weights pulled after step t-1 are the base of the local update of step t, so that a worker never
misses its own newest gradient and misses those of others by one step.

Differs from the paper, of which only the abstract and the code were read: the warm-up is counted in
steps that the caller sets (the code has 200 fixed). Gradients are means, and the local learning
rate is `lr_scale` times the optimizer's: the authors' scripts come to 0.4 to 0.6 in these units. A
push is acknowledged on receipt. `none` (continue from the pulled weights as they are), `glu`,
`secant` and `mirror` are choices that the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pscore.local import LOCAL_UPDATES, make_local_update
from pscore.plugins import require_one_of, require_range
from pscore.rules.base import Plan
from pscore.rules.ssgd import Synchronous


@dataclass(frozen=True)
class OD(Synchronous):
    """One-step-delay SGD.

    Attributes:
        warmup: Steps of plain synchronous SGD before the delay starts.
        local: Local update: `dc`, `dc_adaptive`, `sgd`, `glu`, `secant`, `mirror`, or `none`.
        lr_scale: `dc`, `dc_adaptive`, `sgd`, `glu`, `secant`: learning rate of the local update
            over the optimizer's.
        variance_control: `dc`: lambda, 0 or more, without unit.
        adaptive_control: `dc_adaptive`: lambda_0, 0 or more, in units of the gradient.
        decay: `dc_adaptive`: how much of the mean square is kept from one step to the next.
    """

    warmup: int = 200
    local: str = "dc"
    lr_scale: float = 1.0
    variance_control: float = 0.04
    adaptive_control: float = 2.0
    decay: float = 0.0

    name = "od"
    source = "Xu et al., arXiv:2005.06728"
    examples: ClassVar[tuple[str, ...]] = (
        "(warmup=5)",
        "(warmup=5, local=none)",
        "(warmup=5, local=mirror)",
    )

    def __post_init__(self) -> None:
        require_range(f"{self.name}.warmup", self.warmup, 0, 1 << 40)
        require_one_of(f"{self.name}.local", self.local, LOCAL_UPDATES)
        self.local_update()

    def plan(self, step: int) -> Plan:
        """Blocks in the warm-up; later each pull lands one step later."""
        if step < self.warmup:
            return Plan()
        return Plan(local=True, block=False)

    def local_update(self) -> Any:
        """Returns the local update with this rule's arguments."""
        return make_local_update(self.local, {**self.arguments(), "steps": 1})  # One for each pull.
