"""AD-PSGD: pairs of workers average their models at any time, and nobody waits for a slow one.

Xiangru Lian, Wei Zhang, Ce Zhang and Ji Liu, "Asynchronous Decentralized Parallel Stochastic
Gradient Descent", ICML 2018, arXiv:1710.06952, algorithm 1.

    read    xh_i <- x_i                              before the forward pass
    mix     x_i, x_j <- (x_i + x_j) / 2              a pair, while gradients are computed
    write   x_i <- x_i - lr v_i                      v_i from the gradient at xh_i

Differs from the paper: a pair averages by differences and not atomically, unless `exchange` says
so. Worker i sends a snapshot
s_i and continues; worker j adds (s_i - s_j) / 2 to its model and answers with its snapshot s_j; i
adds (s_j - s_i) / 2 when the answer comes. The sum of both models is the same as after an atomic
average, no worker holds a lock while another waits, so none can deadlock and the graph need not be
bipartite. Where i has made no step meanwhile both get the bits of the atomic average. v_i is the
move of the wrapped optimizer at xh_i, weight decay included. Large models are exchanged in parts of
4 MiB, each by itself. The average on the shards is that of the newest pushes, one for each worker
in number; a slow worker's may be missing in it.

With `exchange="atomic"`, as published, the graph must be bipartite. Workers of one side begin
exchanges, behind their gradients, and wait for the answers; those of the other side only answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.graphs import graph_of, require_joined
from pscore.graphs.sides import sides_of
from pscore.plugins import require_one_of, require_range
from pscore.rules.base import UNBOUNDED, Rule, SliceClocks
from pscore.rules.decentralised import EVERY_MAX, Warmed

EXCHANGES = {"differences": "pairs", "atomic": "atomic"}  # Gossips by the argument.


@dataclass(frozen=True)
class ADPSGD(Warmed):
    """AD-PSGD.

    Attributes:
        graph: As in `dpsgd`: each worker begins exchanges with the workers that it takes from.
        exchange: `differences`, or `atomic`; then `exp` stands for `exp_bipartite`.
        every: Steps from one exchange that a worker begins to the next, 1 or more.
        max_behind: Steps that a worker makes without the answer to its exchange; then it waits for
            it. 0: it never waits.
        average_every: Steps from one push of the model, for the average on the shards, to the next.
        warmup: Steps with the mean of all models, which stay equal, before the mode's own begin.
    """

    graph: str = "exp"
    exchange: str = "differences"
    every: int = 1
    max_behind: int = 0
    average_every: int = 50
    warmup: int = 0

    name = "adpsgd"
    source = "Lian et al., arXiv:1710.06952"
    gossip = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("adpsgd.exchange", self.exchange, EXCHANGES)
        if self.exchange == "atomic":
            if self.graph == "exp":
                object.__setattr__(self, "graph", "exp_bipartite")
            if self.max_behind:
                raise ConfigError(
                    f"adpsgd.max_behind is {self.max_behind}, must be 0 with exchange='atomic', "
                    "whose workers wait for every answer"
                )
        graph_of(self.graph)
        require_range("adpsgd.every", self.every, 1, EVERY_MAX)
        require_range("adpsgd.max_behind", self.max_behind, 0, EVERY_MAX)

    @property
    def exchange_name(self) -> str:
        """The exchange of pairs by differences, or the atomic one."""
        return EXCHANGES[self.exchange]

    def require_workers(self, num_workers: int) -> None:
        """Refuses edges that leave some workers apart, or for atomic exchanges have no two sides.

        Raises:
            ConfigError: They do; for atomic exchanges the number of workers is odd and not 1, or
                the graph is not bipartite.
        """
        require_joined(self.graph, num_workers)
        if self.exchange != "atomic" or num_workers == 1:
            return
        if num_workers % 2:
            raise ConfigError(
                f"adpsgd.exchange is 'atomic', which needs an even number of workers, not "
                f"{num_workers}: one more or one fewer, or exchange='differences'"
            )
        if not sides_of(graph_of(self.graph), range(num_workers)).is_bipartite:
            raise ConfigError(
                f"adpsgd.graph is {self.graph!r}, which is not bipartite with {num_workers} "
                "workers, as exchange='atomic' needs: use exp_bipartite or ring"
            )

    @property
    def by_step(self) -> bool:
        """An average takes as many pushes as there are workers, of whichever step."""
        return False

    def steps_open(self) -> int:
        """No worker waits for another."""
        return UNBOUNDED

    def readable(self, clocks: SliceClocks, worker: int, clock: int, min_version: int) -> bool:
        """Once the worker's own pushes are counted."""
        return Rule.readable(self, clocks, worker, clock, min_version)
