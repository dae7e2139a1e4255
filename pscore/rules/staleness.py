"""Staleness-aware asynchronous SGD (n-softsync): an old gradient counts for less.

Wei Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016,
arXiv:1511.05950.

    c = floor(N / n)                                    gradients that make one update
    W <- opt(W, (1/c) sum_{l=1..c} g_l / max(1, tau_l))   tau_l = version now - version of g_l

n=1 waits for about one gradient of each worker, from any of them; n=N is asynchronous SGD
with a learning rate divided by the staleness. A worker waits for its own push only, not for the
update that it goes into. A gradient is scaled before it enters the momentum.

Differs from the paper: the paper scales the learning rate of plain SGD, which is the same as
scaling the gradient; with momentum, Adam or weight decay on the shards it is not. Adam divides a
gradient by its own size, so that scaling does little there. If fewer workers are left than c, an
update takes as many gradients as there are workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.plugins import require_range
from pscore.rules.base import Rule


@dataclass(frozen=True)
class Staleness(Rule):
    """Staleness-aware asynchronous SGD.

    Attributes:
        splits: n, updates made from as many gradients as there are workers, 1 to their number.
            The mean staleness is about n updates.
    """

    splits: int = 1

    name = "staleness"
    source = "Zhang et al., arXiv:1511.05950"
    examples = ("(splits=2)",)

    def __post_init__(self) -> None:
        require_range("staleness.splits", self.splits, 1, 4096)

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for more updates than there are gradients."""
        if self.splits > num_workers:
            raise ConfigError(
                f"staleness.splits is {self.splits}, must be at most the {num_workers} workers"
            )

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        """Returns floor(N / n), or everybody if fewer are left."""
        return min(num_expected, max(1, num_workers // self.splits))

    def scale(self, staleness: int) -> float:
        """Returns 1/tau; a gradient of the newest weights counts in full."""
        return 1.0 / max(1, staleness)
