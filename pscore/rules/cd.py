"""CD-SGD: one-step delay with compressed gradients, and an uncompressed one at each k-th step.

Enda Yu et al., "CD-SGD: Distributed Stochastic Gradient Descent with Compression and Delay
Compensation", ICPP 2021, arXiv:2106.10796; as in the authors' code (repository Tugraph/CD-SGD,
kvstore_dist.h).

    worker, step t after the warm-up, with r_i the residual of error feedback:
        w_i^{t+1} = LU(W^t, g_i^t)                          as in OD-SGD, from the uncompressed g_i
        k-1 of k steps:       r_i = r_i + g_i;  q = Q(r_i);  r_i = r_i - q;  push q
        each k-th, raw:       push g_i                      r_i stays
        each k-th, flush:     push g_i + r_i;  r_i = 0
    shard: as in SSGD, on the decoded gradients

Q is the job's `compression`: 2-bit in the paper. Without one this is OD-SGD. The warm-up is
synchronous and uncompressed.

Differs from the paper, of which only the abstract and the code were read: `flush` is ours (the code
is `raw`, which sends the residual later, if at all), the warm-up is counted in steps that the
caller sets (the code has 1000 fixed), the correction is the last of each k steps after the warm-up
(the code counts from the first step of all), and the threshold of a quantizer is in units of mean
gradients, where the code's 0.5 is for sums over a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.plugins import require_one_of, require_range
from pscore.rules.base import Plan
from pscore.rules.od import OD

CORRECTIONS = {"raw": None, "flush": None}


@dataclass(frozen=True)
class CD(OD):
    """One-step delay with compression and k-step correction.

    Attributes:
        warmup: Steps of plain synchronous, uncompressed SGD before the delay starts.
        local: Local update, from the uncompressed gradient: `sgd`, `dc`, `dc_adaptive`, `glu`,
            `secant`, `mirror`, or `none`.
        steps: k, steps from one uncompressed push to the next, 1..1024; 1 never compresses.
        correction: The payload of a correction: `raw` the gradient, `flush` also the residual.
        lr_scale: `sgd`, `dc`, `dc_adaptive`, `glu`, `secant`: learning rate of the local update
            over the optimizer's.
        variance_control: `dc`: lambda, 0 or more, without unit.
        adaptive_control: `dc_adaptive`: lambda_0, 0 or more, in units of the gradient.
        decay: `dc_adaptive`: how much of the mean square is kept from one step to the next.
    """

    warmup: int = 1000
    local: str = "sgd"
    steps: int = 5
    correction: str = "raw"

    name = "cd"
    source = "Yu et al., arXiv:2106.10796"
    examples = ("(steps=3, warmup=5)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("cd.steps", self.steps, 1, 1024)
        require_one_of("cd.correction", self.correction, CORRECTIONS)

    def plan(self, step: int) -> Plan:
        """As OD-SGD, with each k-th push uncompressed."""
        if step < self.warmup:
            return Plan(compress=False)
        is_correction = (step - self.warmup) % self.steps == self.steps - 1
        return Plan(
            compress=not is_correction,
            flush=is_correction and self.correction == "flush",
            local=True,
            block=False,
        )
