"""Memory for a table's gradients that the shards of this host read directly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from pscore.errors import PacelineError
from pscore.memory.segment import Segment
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.types import FloatArray
from psworker.connection.membership.session import Session
from psworker.model.device import is_on_device
from psworker.transports.shared_memory import SharedMemoryTransport

log = logging.getLogger("paceline")


class SharedGrads:
    """The gradients of one table in one array, in shared memory if a shard can map it.

    Attributes:
        array: `(layout.numel,) float32` on the host.
    """

    def __init__(
        self, session: Session, layout: Layout, sender: Callable[[], data_pb2.Sender]
    ) -> None:
        """Allocates the array and passes it to the shards of this host.

        Args:
            sender: Returns the table and this worker as they stand in messages.
        """
        self._session = session
        self._layout = layout
        self._sender = sender
        self._shards: set[int] = set()  # Shards that have mapped the array.
        self._segment = self._allocate()
        if self._segment is None:
            self.array: FloatArray = np.zeros(layout.numel, dtype=np.float32)
        else:
            self.array = self._segment.floats(0, layout.numel)
            self.attach()
        self._home = self.array.ctypes.data

    def _allocate(self) -> Segment | None:
        # A shard knows one memory of a worker, and the processes of a group have one each.
        is_alone, links = self._session.group.is_alone, self._session.links
        if not (is_alone and any(link.transport.shares_memory for link in links)):
            return None
        nbytes = 4 * self._layout.numel
        try:
            return Segment.create(nbytes)
        except OSError as problem:
            log.warning("no shared memory for %d bytes of gradients: %s", nbytes, problem)
            return None

    def part(self, index: int) -> FloatArray:
        """Returns the memory of a slice's gradient, `(numel,) float32`."""
        spec = self._layout.slices[index]
        return self.array[spec.start : spec.stop]

    def attach(self, only: int | None = None) -> None:
        """Passes the memory to each shard that can map it.

        Args:
            only: Index of one shard, which is another process now; None: to all.
        """
        if self._segment is None:
            return
        for shard, link in enumerate(self._session.links):
            if only not in (None, shard):
                continue
            self._shards.discard(shard)
            transport = link.transport
            if isinstance(transport, SharedMemoryTransport):
                try:
                    specs = self._layout.of_shard(shard)
                    transport.attach(self._sender(), self._segment, specs)
                    self._shards.add(shard)
                except PacelineError as problem:
                    log.warning("no shared memory with %s: %s", link.address, problem)

    def is_mapped(self, index: int) -> bool:
        """Returns whether the shard of a slice has mapped the array."""
        return self._layout.slices[index].shard in self._shards

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Returns whether a slice's gradient is, or will be, in memory that its shard can read."""
        if not self.is_mapped(index):
            return False
        home = self._home + 4 * self._layout.slices[index].start
        return grad.data_ptr() == home or is_on_device(grad)
