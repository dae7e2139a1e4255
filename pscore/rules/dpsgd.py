"""D-PSGD: each worker mixes its model with those of its neighbours at every step.

Xiangru Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
for Decentralized Parallel Stochastic Gradient Descent", NeurIPS 2017, arXiv:1705.09056, algorithm
1; the order "adapt, then combine" as in Cattivelli and Sayed, IEEE Trans. Signal Processing, 2010.

    awc   x_i' = sum_j W_ij x_j - lr v_i        neighbours' models of before this step
    atc   x_i' = sum_j W_ij (x_j - lr v_j)      neighbours' models after their optimizers' step

v_i is the move of the wrapped optimizer at x_i, whichever it is; its state stays on the worker. In
`awc`, the paper's own order, models travel while gradients are computed; in `atc` nothing is hidden
and workers stay closer together. W is given by the graph (pscore/graphs); all its rows and columns
sum to 1, so the mean of the models moves by the mean of the optimizers' moves alone.

Differs from the paper: the graph may change from step to step (by default each worker has one peer
a step, after arXiv:2110.13363), and is rebuilt when workers come or go. With `global_every` all
workers continue from the mean of all models now and then, as in BlueFog (2021).
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.graphs import graph_of, require_joined
from pscore.plugins import require_one_of, require_range
from pscore.rules.decentralised import EVERY_MAX, Warmed

MOMENTA = {"keep": "workers keep them", "drop": "each begins anew"}
ORDERS = {"awc": "adapt while communicating", "atc": "adapt, then combine"}


@dataclass(frozen=True)
class DPSGD(Warmed):
    """D-PSGD.

    Attributes:
        graph: Name of a graph (`complete`, `exp`, `exp_static`, `ring`, `torus`), or its edges:
            `"0-1 1-2"`.
        order: `awc`, mix while the gradient is computed, or `atc`, mix after the optimizer's step.
        global_every: Steps from one global average, from which all continue, to the next; 0: none.
        momenta: Treatment of the optimizers' states there: `keep`, or `drop`, to begin anew.
        average_every: Without `global_every`: steps from one average on the shards, for evaluation
            and checkpoints, to the next.
        warmup: Steps with the mean of all models, which stay equal, before the mode's own begin.
    """

    graph: str = "exp"
    order: str = "awc"
    global_every: int = 0
    momenta: str = "keep"
    average_every: int = 50
    warmup: int = 0

    name = "dpsgd"
    source = "Lian et al., arXiv:1705.09056"
    gossip = "mixing"

    def __post_init__(self) -> None:
        super().__post_init__()
        graph_of(self.graph)
        require_one_of("dpsgd.order", self.order, ORDERS)
        require_range("dpsgd.global_every", self.global_every, 0, EVERY_MAX)
        require_one_of("dpsgd.momenta", self.momenta, MOMENTA)
        if self.momenta != "keep" and not self.global_every:
            raise ConfigError(
                f"dpsgd.momenta is {self.momenta!r}, which has no effect without global_every="
            )

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for edges that leave workers apart that no global average joins."""
        if not self.global_every:
            require_joined(self.graph, num_workers)

    @property
    def period(self) -> int:
        """Steps from one average to the next."""
        return self.global_every or self.average_every

    @property
    def adopts(self) -> bool:
        """Whether all workers continue from the average."""
        return self.global_every > 0

    @property
    def forgets(self) -> bool:
        """Whether the wrapped optimizer's state is dropped where all continue from the average."""
        return self.momenta == "drop"
