"""Parts of every simulated job: shards, a layout, virtual time and a network."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import structlog

from pscore import partition
from pscore.optimizers import OPTIMIZERS
from pscore.partition import make_layout
from pscore.table_spec import TableSpec
from pscore.types import FloatArray
from pssim.network import Loop, Network
from pssim.shard import SendLater, ShardObserver, SimulatedShard


@contextmanager
def small_slices(numel: int, alignment: int = partition.ALIGNMENT) -> Iterator[None]:
    """Cuts slices of `numel` elements, so that a tiny model has several of them on each shard."""
    kept = partition.SLICE_NUMEL_MIN, partition.SLICE_NUMEL_MAX, partition.ALIGNMENT
    partition.SLICE_NUMEL_MIN = partition.SLICE_NUMEL_MAX = numel
    partition.ALIGNMENT = alignment
    try:
        yield
    finally:
        partition.SLICE_NUMEL_MIN, partition.SLICE_NUMEL_MAX, partition.ALIGNMENT = kept


@contextmanager
def quiet() -> Iterator[None]:
    """Drops log lines of shards and workers below errors: a simulation would print thousands."""
    worker_log = logging.getLogger("paceline")
    level = worker_log.level
    worker_log.setLevel(logging.ERROR)
    was_configured, kept = structlog.is_configured(), structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        worker_log.setLevel(level)
        if was_configured:
            structlog.configure(**kept)
        else:
            structlog.reset_defaults()


class Cluster:
    """The shards of one job with one table, and their connections to workers."""

    def __init__(
        self,
        spec: TableSpec,
        loop: Loop,
        network: Network,
        *,
        lease_s: float,
        observers: Sequence[ShardObserver] = (),
        send_later: SendLater | None = None,
        folder: Path | None = None,
    ) -> None:
        """Starts the shards.

        Args:
            lease_s: Seconds of silence after which a worker is lost.
            send_later: Delays answers that lie in leased weights; None: they are sent at once.
            folder: Folder of the journals; None: nothing survives a crash.
        """
        self.spec = spec
        self.layout = make_layout(spec.tensors, spec.num_shards)
        self.optimizer = OPTIMIZERS[spec.optimizer]()
        self.loop = loop
        self.network = network
        self.shards = [
            SimulatedShard(
                index,
                spec.num_shards,
                now=self.now,
                lease_s=lease_s,
                observers=observers,
                send_later=send_later,
                folder=None if folder is None else folder / str(index),
            )
            for index in range(spec.num_shards)
        ]

    def now(self) -> float:
        """Returns the virtual time in seconds."""
        return self.loop.now_s

    def flat_weights(self) -> FloatArray:
        """Returns a copy of the newest weights of all shards, `(layout.numel,) float32`."""
        weights = np.zeros(self.layout.numel, dtype=np.float32)
        for shard in self.shards:
            for index, _, _, store in shard.slices():
                part = self.layout.slices[index]
                weights[part.start : part.stop] = store.weights
        return weights

    def close(self) -> None:
        """Closes the journals."""
        for shard in self.shards:
            shard.close()
