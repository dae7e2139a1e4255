"""All-reduce: synchronous SGD without a server; the mean gradient is made by the workers.

Pitch Patarasu and Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
Journal of Parallel and Distributed Computing, 2009; as in torch's DistributedDataParallel.

    worker i:   g = (1/N) sum_j g_j          by a ring of reduce-scatter and all-gather
                x <- opt(x, g)               the wrapped torch optimizer, the same on every worker

Each worker sends and receives 2 (N - 1)/N models a step. All get the same bits, so the models stay
equal. With `order="ranks"` the gradients are added in the order of the ranks, as shards add them.

Differs from the usual: a worker that dies in a round costs that round only. The others give it up,
agree on the members left, and make it again with the gradients that they still have; where one of
them had its result already, the result stands. Gradients are weighed by `samples`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.plugins import require_one_of
from pscore.rules.decentralised import Decentralised

ORDERS = {"ring": "around the ring", "ranks": "in the order of the ranks"}
BACKENDS = {
    "frames": "over the connections of the workers",
    "gloo": "torch.distributed, over TCP",
    "nccl": "torch.distributed, between GPUs",
}


@dataclass(frozen=True)
class AllReduce(Decentralised):
    """All-reduce.

    Attributes:
        order: The order in which gradients are added: `ring` or `ranks`.
        backend: Adds the gradients: `frames`, or torch.distributed with `gloo` or `nccl`.
        average_every: Steps from one copy of the model on the shards to the next, 1 or more.
    """

    order: str = "ring"
    backend: str = "frames"
    average_every: int = 50

    name = "allreduce"
    source = "Patarasu and Yuan, 2009"
    gossip = "ring"
    alike = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("allreduce.order", self.order, ORDERS)
        require_one_of("allreduce.backend", self.backend, BACKENDS)
        if self.backend != "frames" and self.order != "ring":
            raise ConfigError(
                f"allreduce(backend={self.backend!r}) adds in torch.distributed's order: leave out "
                f"order={self.order!r}"
            )

    @property
    def exchange_name(self) -> str:
        """The workers' exchange with each other (psworker/gossip) under these arguments."""
        return self.gossip if self.backend == "frames" else "collective"
