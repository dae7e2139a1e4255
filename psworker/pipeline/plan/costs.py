"""The time that a stage takes for a minibatch: computing, and the bytes over its link.

A cost is a pure function of a stage's load. `Shards` is the cost of a pipeline whose replicated
stages live on shards, `Ring` the one that PipeDream's released partitioner uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The work of a stage for one minibatch, and its links."""

    inner_s: float  # Forward and backward on one replica.
    parameter_nbytes: float
    input_nbytes: float  # Activations received, as many bytes of gradients sent; first stage: 0.
    output_nbytes: float  # The same behind it; last stage: 0.
    replicas: int
    bandwidth: float  # Bandwidth of a replica's link, in bytes per second and direction.
    update_s: float = 0.0  # The optimizer's step on a worker.


class Cost(Protocol):
    """Seconds and bytes of a stage."""

    def stage_s(self, load: StageLoad) -> float:
        """Returns the seconds between two minibatches that leave the stage."""

    def sync_nbytes(self, load: StageLoad) -> float:
        """Returns the bytes that the replicas of the stage send and receive for a minibatch."""

    def hidden(self) -> Cost:
        """Returns the cost with all traffic behind computing, as far as the link allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsCost:
    """Replicas push gradients to shards and pull weights; links carry both directions at once.

    Activations pass on threads of their own, so they cost time only where the link is slower than
    the computing. A stage of one replica pushes nothing: its optimizer runs on the worker, which
    computes nothing else meanwhile.
    """

    # Bytes pushed per byte of parameters, as a mean over the steps of the mode.
    pushed: float = 1.0
    pulled: float = 1.0  # The same, pulled.
    hides: bool = True  # Whether the mode computes while it pushes and pulls.
    num_shards: int  # Shards, each behind a link as fast as a worker's.
    on_workers: bool = False  # Whether shard i is on the host of worker i, behind its link.

    def stage_s(self, load: StageLoad) -> float:
        """Returns the seconds between two minibatches that leave the stage."""
        moved = load.input_nbytes + load.output_nbytes
        up, down = self._synced(load)
        if self.on_workers:
            link_s, waits_s = self._at_workers(load, moved, up, down)
        else:
            # All replicas push at once, and meet at the links of the shards.
            at_shards = load.bandwidth * min(1.0, self.num_shards / load.replicas)
            link_s = max((moved + max(up, down)) / load.bandwidth, max(up, down) / at_shards)
            waits_s = (up + down) / at_shards
        own_s = load.inner_s + (load.update_s if load.replicas == 1 else 0.0)
        busy_s = own_s if self.hides else own_s + waits_s
        return max(busy_s, link_s) / load.replicas

    def _at_workers(
        self, load: StageLoad, moved: float, up: float, down: float
    ) -> tuple[float, float]:
        """Returns the seconds of a worker's link, and those of a push and a pull alone.

        A worker sends to the other hosts' shards, and its own shard to the other replicas.
        """
        away = (self.num_shards - 1) / self.num_shards
        served = (load.replicas - 1) / self.num_shards
        both = max(up * away + down * served, down * away + up * served)
        return (moved + both) / load.bandwidth, max(both, (up + down) * away) / load.bandwidth

    def sync_nbytes(self, load: StageLoad) -> float:
        """Returns the bytes that the replicas of the stage send and receive for a minibatch."""
        return sum(self._synced(load))

    def hidden(self) -> ShardsCost:
        """Returns the cost of a mode that moves as much, and computes meanwhile."""
        return replace(self, hides=True)

    def _synced(self, load: StageLoad) -> tuple[float, float]:
        """Returns the bytes of one replica's push and pull."""
        if load.replicas == 1:
            return 0.0, 0.0
        return load.parameter_nbytes * self.pushed, load.parameter_nbytes * self.pulled


@dataclass(frozen=True, slots=True)
class RingCost:
    """The cost in PipeDream's released partitioner: a ring of replicas.

    `optimizer/optimizer_graph_hierarchical.py` of github.com/msr-fiddle/pipedream, commit 11c40c0,
    with the transfers of activations counted. The paper (SOSP 2019, section 3.1) takes the larger
    of computing and exchange, the code their sum. Differs from the code: the output of the first
    stage is counted as that of any other, and the first stage of an inner level exchanges its
    parameters over one link.

    Attributes:
        hides: Whether it exchanges while it computes; the released partitioner counts without.
    """

    hides: bool = False

    def stage_s(self, load: StageLoad) -> float:
        """Returns the seconds between two minibatches that leave the stage."""
        exchange_s = 2 * self.sync_nbytes(load) / load.bandwidth
        transfer_s = 2 * max(load.input_nbytes, load.output_nbytes) / load.bandwidth
        busy_s = max(load.inner_s, exchange_s) if self.hides else load.inner_s + exchange_s
        return max(busy_s, transfer_s) / load.replicas

    def hidden(self) -> RingCost:
        """Returns the cost of a ring that exchanges while it computes."""
        return RingCost(hides=True)

    def sync_nbytes(self, load: StageLoad) -> float:
        """Returns the bytes that the replicas of the stage send for a minibatch: 2 (m - 1) / m."""
        return 2 * load.parameter_nbytes * (load.replicas - 1) / load.replicas
