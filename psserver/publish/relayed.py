"""The published table of a relay: versions of its reader, byte for byte, for other readers.

A relay has as many shards as it reads from, with the same slices, numbers, lineages and
fingerprints, so a reader does not see whether it reads from a relay or from the shards. It shows a
version when it has all of it, on all of its shards at once: a relay that is killed leaves no reader
with a version that it could not complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pscore.pb.ps.v1 import data_pb2
from pscore.publish.codec import Delta, form_of
from pscore.subscription.assembly import EMPTY
from pscore.subscription.reader import Source
from pscore.subscription.weights import PublishedWeights
from pscore.table_spec import TableSpec
from pscore.types import ByteArray
from psserver.publish.ring import FoundVersion, PublishedVersion, VersionRing
from psserver.publish.tables import Published, PublishedTables


class RelayedTable:
    """The slices of one shard of a table that is relayed.

    Attributes:
        every: Updates from one version to the next; seconds in an asynchronous mode.
        exact: Whether all slices of a version are of one step.
        newest: The newest version that all slices have.
        rings: The versions of each slice.
    """

    def __init__(self, spec: TableSpec, shard: int) -> None:
        """Starts without a version of the slices of `shard`."""
        self.spec = spec
        self.lineage, self.every, self.exact = 0, 0, True
        self.newest: PublishedVersion | None = None
        slices = spec.layout().slices
        self.rings = {part.index: VersionRing() for part in slices if part.shard == shard}

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that are kept."""
        return sum(ring.nbytes for ring in self.rings.values())

    def find(
        self, index: int, lineage: int, target: int, held: int, known: int
    ) -> FoundVersion | None:
        """Returns a version of a slice for a reader, as `VersionRing.find` describes."""
        ring = self.rings.get(index)
        return None if ring is None else ring.find(lineage, target, held, known)


class RelayShard(PublishedTables[RelayedTable]):
    """One shard of a relay.

    Attributes:
        table: The table that it relays; None: there is no version yet.
        trouble: The reason for that.
    """

    def __init__(
        self, lock: threading.RLock, now: Callable[[], float], index: int, rate: int
    ) -> None:
        """Starts without a table; arguments are those of `PublishedTables`."""
        super().__init__(lock, now, index, rate)
        self.table: RelayedTable | None = None
        self.trouble = "the relay has just begun"

    def show(self, job: str, name: str, table: RelayedTable) -> None:
        """Relays a table; called under the lock."""
        if self.table is not table:
            self.table = table
            self._published[job, name] = Published(table)

    def _why_none(self, job: str, table: str) -> str:
        return f"{super()._why_none(job, table)} of the relay: {self.trouble}"


class RelayedVersions:
    """The follower of a relay's reader (`pscore.subscription.reader.ReaderFollower`).

    Attributes:
        shards: The shards that readers find, one on each port.
    """

    def __init__(
        self, job: str, table: str, num_shards: int, now: Callable[[], float], rate: int = 0
    ) -> None:
        """Starts without a version.

        Args:
            now: Returns the time in seconds, of any beginning.
            rate: Most bytes per second to a reader on another host; 0: no limit.
        """
        self._job, self._table = job, table
        self._lock = threading.RLock()  # Guards all shards: each shows a version at once.
        self.shards = [RelayShard(self._lock, now, index, rate) for index in range(num_shards)]
        self._spec: TableSpec | None = None
        # Since the last version that was taken, by slice: its newest entry, and deltas; None: it
        # came whole.
        self._landed: dict[int, tuple[data_pb2.FetchedSlice, list[Delta] | None]] = {}

    def landed(self, entry: data_pb2.FetchedSlice, payload: ByteArray) -> None:
        """Keeps the bytes that lead to a version of one slice."""
        if entry.base == EMPTY:
            self._landed[entry.slice] = entry, None
            return
        _, deltas = self._landed.get(entry.slice, (entry, []))
        if deltas is not None:
            begin = 0
            for delta in entry.deltas:
                part = payload[begin : begin + delta.nbytes].copy()  # Without the whole answer.
                deltas.append(Delta(form=form_of(delta.form), payload=part))
                begin += delta.nbytes
        self._landed[entry.slice] = entry, deltas

    def taken(self, weights: PublishedWeights, source: Source) -> None:
        """Shows a version on all shards."""
        with self._lock:
            if source.spec is not self._spec:
                self._spec = source.spec
                for index, shard in enumerate(self.shards):
                    shard.show(self._job, self._table, RelayedTable(source.spec, index))
            for shard, lineage in zip(self.shards, source.lineages, strict=True):
                assert shard.table is not None
                self._show(shard.table, lineage, weights, source)
            self._landed.clear()
        for shard in self.shards:
            shard.on_version()

    def _show(
        self, table: RelayedTable, lineage: int, weights: PublishedWeights, source: Source
    ) -> None:
        slices = weights.layout.slices
        table.lineage, table.every, table.exact = lineage, source.every, weights.exact
        for index, ring in table.rings.items():
            if index not in self._landed:  # It has had this version before.
                continue
            entry, deltas = self._landed[index]
            version = PublishedVersion(
                number=entry.number, step=entry.step, fingerprint=entry.fingerprint
            )
            bits = weights.bits[slices[index].start : slices[index].stop]
            ring.adopt(lineage, version, bits, deltas)
            table.newest = version

    def say(self, trouble: str) -> None:
        """Sets the reason that readers get while there is no version."""
        with self._lock:
            for shard in self.shards:
                shard.trouble = trouble
