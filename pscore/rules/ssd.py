"""Several-steps-delay SGD: push at every step, pull at every k-th, and a local update in between.

Yemao Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training",
arXiv:2012.05396; schedule as in the authors' code (repository main-520/SSD-SGD, kvstore_dist.h).

    shard:                       W^{t+1} = opt(W^t, (1/N) sum_i g_i^t)               as in SSGD
    worker, warm-up:             w_i^{t+1} = W^{t+1}                                 as in SSGD
    worker, steps-delay stage:   w_i^{t+1} = LU(b_i, g_i^t)
                                 b_i = W^{t+1} after each k-th step, else w_i^{t+1}

The weights pulled after step t become the base of the local update of step t+1, so a pull has a
whole forward and backward pass to hide behind. k=1 is OD-SGD (arXiv:2005.06728).

That step has to hide the bytes of k, and twice or three times those where the optimizer's state
comes along. `spread=p` pulls over the last p steps of the k, a p-th of the slices in each. For the
s-th slice of its shard, after the warm-up,

    b_i = W^{t+1} after the steps t with (t - warmup) mod k = k - 1 - (s mod p)

p=1 is the paper's; p > 1 is Paceline's own. To one slice it is the same but for which of its steps
is the k-th; a worker computes with slices whose last pulls are up to p - 1 steps apart.

Differs from the paper: the warm-up is counted in steps that the caller sets (the authors' code has
500 fixed), the step number travels with every message instead of being counted from calls, a push
is acknowledged on receipt, so that a fast worker may run k steps ahead, and the local update is a
choice (`glu` is what the authors have released).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pscore.local import LOCAL_UPDATES, make_local_update
from pscore.plugins import require_one_of, require_range
from pscore.rules.base import Plan
from pscore.rules.ssgd import Synchronous


@dataclass(frozen=True)
class SSD(Synchronous):
    """Several-steps-delay SGD.

    Attributes:
        steps: k, steps from one pull to the next, 1..1024. More hides a slower network and lets
            the workers' weights drift further apart.
        warmup: Steps of plain synchronous SGD before the delay starts.
        local: Local update between pulls: `mirror`, `glu`, `secant`, `sgd`, `dc`,
            `dc_adaptive` or `none`.
        lr_scale: Learning rate of the local update over the optimizer's.
        alpha: `glu`, `secant`: factor of the worker's own gradient.
        beta: `glu`, `secant`: factor of the estimate of the global gradient.
        local_warmup: `glu`, `secant`: local steps over which their rate rises to its full size.
        divisor: `glu`: D, of its global gradient; 8 as released, for the authors' rates. 0 is k
            times the largest local rate so far.
        mirror: `exact` (the shard's optimizer state travels with each pull) or `kept`.
        spread: p, over how many of the k steps the pulls are spread, 1..k. A worker may run
            k - p + 1 steps ahead. 0 is as many as keep the bytes of a step below those of its
            push, with SGD on the shards: 2 with an exact mirror, else 1.
    """

    steps: int = 5
    warmup: int = 500
    local: str = "mirror"
    lr_scale: float = 1.0
    alpha: float = 2.0
    beta: float = 0.5
    local_warmup: int = 0
    divisor: float = 0.0
    mirror: str = "exact"
    spread: int = 0

    name = "ssd"
    source = "Xu et al., arXiv:2012.05396"
    examples = (
        "(steps=3, warmup=5)",
        "(steps=4, warmup=5, local=glu)",
        "(steps=4, warmup=5, spread=2)",
    )

    def __post_init__(self) -> None:
        require_range("ssd.steps", self.steps, 1, 1024)
        require_range("ssd.warmup", self.warmup, 0, 1 << 40)
        require_range("ssd.local_warmup", self.local_warmup, 0, 1 << 40)
        require_range("ssd.lr_scale", self.lr_scale, 0.0, 1e6)
        require_range("ssd.spread", self.spread, 0, self.steps)
        require_one_of("ssd.local", self.local, LOCAL_UPDATES)
        self.local_update()

    def steps_open(self) -> int:
        """A worker may be k steps ahead of the slowest: then its pull has to land."""
        return self.steps

    def plan(self, step: int) -> Plan:
        """Blocks in the warm-up; later pulls each k-th step, and lets that land one step later."""
        if step < self.warmup:
            return Plan()
        turn = self.steps - 1 - (step - self.warmup) % self.steps
        turns = self.turns
        return Plan(local=True, pull=turn < turns, block=False, turn=turn, turns=turns)

    @cached_property
    def turns(self) -> int:
        """Over how many steps the pulls are spread, with `spread` of 0 resolved."""
        brings_state = self.local_update().wants_state(last_of_warmup=False)
        return self.spread or min(self.steps, 2 if brings_state else 1)

    def local_update(self) -> Any:
        """Returns the local update with this rule's arguments."""
        return make_local_update(self.local, self.arguments())
