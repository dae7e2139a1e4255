"""SGP: stochastic gradient push, which averages models over graphs whose edges go one way.

Mahmoud Assran, Nicolas Loizou, Nicolas Ballas and Michael Rabbat, "Stochastic Gradient Push for
Distributed Deep Learning", ICML 2019, arXiv:1811.10792, algorithm 1; push-sum: David Kempe, Alin
Dobra and Johannes Gehrke, FOCS 2003.

    worker i:   x_i <- x_i - lr v_i                        v_i from the gradient at z_i = x_i / w_i
                send P_ji (x_i, w_i) to each taker j;      P_ii = 1 - sum_j P_ji
                (x_j, w_j) <- sum_i P_ji (x_i, w_i);       z_j = x_j / w_j

The columns of P sum to 1, so the sums of all x and of all w stay; its rows need not. w is 1 at the
start. Where the rows sum to 1 too, w stays 1, and sgp is `dpsgd` with the order "adapt, then
combine".

With `late=1` (overlap SGP there, messages at most one step late) shares travel while the next
gradient is computed:

                (x_j, w_j) <- P_jj (x_j, w_j) + sum_i P_ji (x_i, w_i) of the step before

Differs from the paper: with `late=1` every message is one step late, also where it has come in
time, so the result does not depend on the network. The graph is made anew when workers come or go.
Any optimizer makes the move v_i at z_i.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.graphs import directed_graph_of, require_joined
from pscore.plugins import require_range
from pscore.rules.decentralised import Warmed


@dataclass(frozen=True)
class SGP(Warmed):
    """Stochastic gradient push.

    Attributes:
        graph: Name of a graph, as in `dpsgd`, or edges of one way: `"0>1 1>2 2>0"`, each from the
            sender to the receiver.
        late: Steps from sending a share to adding it, 0 or 1.
        average_every: Steps from one average on the shards to the next.
        warmup: Steps with the mean of all models, which stay equal, before the mode's own begin.
    """

    graph: str = "exp"
    late: int = 0
    average_every: int = 50
    warmup: int = 0

    name = "sgp"
    source = "Assran et al., arXiv:1811.10792"
    gossip = "push_sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        directed_graph_of(self.graph)
        require_range("sgp.late", self.late, 0, 1)

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for edges that leave some workers apart."""
        require_joined(self.graph, num_workers)
