"""Stale synchronous parallel: asynchronous, but no worker reads weights older than a bound.

Qirong Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NeurIPS 2013; the read condition also as in the code of Bosen (repository sailing-pmls/bosen,
ssp_consistency_controller.cpp).

    write at clock c:   W <- opt(W, g_i)                                  on arrival
    read at clock c:    waits until every worker has finished c - s steps

So a read holds every update of a step before c - s, all the reader's own, and perhaps newer ones:
the fastest worker is at most s steps ahead of the slowest. s=0 is bulk synchronous, by definition
here synchronous SGD: one update of the mean. From s=1 on, and without a bound (asynchronous SGD),
each gradient is an update of its own, so that N workers make N updates of the full learning rate
per step: divide it by about N when the bound is raised from 0.

Differs from the paper: a worker requests the newest weights at every step instead of keeping those
that are fresh enough, as in ESSP (Dai et al., arXiv:1410.8043): fresher weights for more bytes. The
paper adds updates; here the user's optimizer makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.plugins import require_range
from pscore.rules.base import Rule, SliceClocks
from pscore.rules.ssgd import SSGD

NO_BOUND = -1


@dataclass(frozen=True)
class SSP(Rule):
    """Stale synchronous parallel.

    Attributes:
        bound: s, steps that the fastest worker may be ahead of the slowest, 0 or more; -1 is no
            bound at all. 1 to 8 are usual.
    """

    bound: int = 3

    name = "ssp"
    source = "Ho et al., NeurIPS 2013"
    examples = ("(bound=2)", "(bound=0)")

    def __post_init__(self) -> None:
        require_range("ssp.bound", self.bound, NO_BOUND, 1 << 40)

    @property
    def by_step(self) -> bool:
        """Bulk synchronous if no worker may be ahead."""
        return self.bound == 0

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        """One, or all workers if none may be ahead."""
        return num_expected if self.by_step else 1

    def steps_open(self) -> int:
        """Reads wait, so that writes need not."""
        return SSGD().steps_open() if self.by_step else super().steps_open()

    def readable(self, clocks: SliceClocks, worker: int, clock: int, min_version: int) -> bool:
        """The slowest worker is at most `bound` steps behind, and the reader's own are in."""
        if self.by_step:
            return SSGD().readable(clocks, worker, clock, min_version)
        is_fresh = self.bound == NO_BOUND or clocks.clock_min() >= clock - self.bound
        return is_fresh and super().readable(clocks, worker, clock, min_version)
