"""The published table of a relay: versions of its reader, byte for byte, for other readers.

A relay has as many shards as it reads from, with the same slices, numbers, lineages and
fingerprints, so a reader does not see whether it reads from a relay or from the shards.

Within a lineage each slice goes on as soon as it has come, so the link to the shards and those to
readers are busy at the same time: readers ask for the version when its first slice is here, and an
answer waits for the next slice. A version of a new lineage is shown when the relay has all of it,
on all of its shards at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pscore.net.shared_rate import SharedRate
from pscore.pb.ps.v1 import data_pb2
from pscore.publish.codec import BitArray, Delta, Form, form_of
from pscore.subscription.assembly import EMPTY
from pscore.subscription.reader import Source
from pscore.subscription.weights import PublishedWeights
from pscore.table_spec import TableSpec
from pscore.types import ByteArray
from psserver.publish.ring import FoundVersion, PublishedVersion, VersionRing
from psserver.publish.tables import Published, PublishedTables

COMING_S = 1.0  # The longest wait of an answer for a slice; then the reader asks again.


class RelayedTable:
    """The slices of one shard of a table that is relayed.

    Attributes:
        every: Updates from one version to the next; seconds in an asynchronous mode.
        exact: Whether all slices of a version are of one step.
        newest: The newest version that a slice has, and all others are about to have.
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
    def has_slices(self) -> bool:
        """Whether slices of the table are on this shard."""
        return bool(self.rings)

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
    """One shard of a relay."""

    def __init__(
        self, coming: threading.Condition, now: Callable[[], float], index: int, rate: SharedRate
    ) -> None:
        """Starts without a table.

        Args:
            coming: Guards the shard, and is notified of each slice that has come.
            now: Returns the time in seconds, of any beginning.
            rate: The rate that readers on other hosts share.
        """
        super().__init__(coming, now, index, rate)
        # The table that it relays; None: there is no version yet.
        self.table: RelayedTable | None = None
        self.trouble = "the relay has just begun"  # The reason for that.
        self._coming = coming
        self._num_landed = 0

    def show(self, job: str, name: str, table: RelayedTable) -> None:
        """Relays a table; called under the lock."""
        if self.table is not table:
            self.table = table
            self._published[job, name] = Published(table)

    def land(self) -> None:
        """Wakes the readers that wait for a slice; called under the lock."""
        self._num_landed += 1
        self._coming.notify_all()

    def fetch(self, header: data_pb2.FetchHeader) -> tuple[data_pb2.FetchReply, list[ByteArray]]:
        """Returns the answer to a reader, as `PublishedTables.fetch`; waits for a first slice."""
        end_s = self.now() + COMING_S
        while True:
            before = self._num_landed
            reply, arrays = super().fetch(header)
            with self._coming:
                if reply.slices or not self._is_coming(header) or self.now() >= end_s:
                    return reply, arrays
                if self._num_landed == before:
                    self._coming.wait(end_s - self.now())

    def _is_coming(self, header: data_pb2.FetchHeader) -> bool:
        found = self._published.get((header.job, header.table))
        newest = None if found is None else found.publication.newest
        if found is None or newest is None:
            return False
        return found.publication.lineage == header.lineage and newest.number >= header.target

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
            rate: Most bytes per second to all readers on other hosts; 0: no limit.
        """
        self._job, self._table = job, table
        # Guards all shards: each shows a version at once.
        self._lock = threading.Condition(threading.RLock())
        shared = SharedRate(rate)
        self.shards = [RelayShard(self._lock, now, index, shared) for index in range(num_shards)]
        self._lineages: Sequence[int] = ()  # Those of the last version that was taken.
        self._spec: TableSpec | None = None
        self._shard_of: dict[int, RelayShard] = {}  # By slice.
        # Since the last version that was taken: slices that are shown, and the newest entry of
        # those that are not, with its deltas; None: it came whole.
        self._passed: set[int] = set()
        self._landed: dict[int, tuple[data_pb2.FetchedSlice, list[Delta] | None]] = {}

    def landed(
        self, entry: data_pb2.FetchedSlice, payload: ByteArray, lineages: Sequence[int]
    ) -> None:
        """Keeps the bytes that lead to a version of one slice, and shows them within a lineage."""
        _, deltas = self._landed.get(entry.slice, (entry, []))
        if entry.base == EMPTY:
            deltas = None
        elif deltas is not None:
            begin = 0
            for delta in entry.deltas:
                part = payload[begin : begin + delta.nbytes].copy()  # Without the whole answer.
                deltas.append(Delta(form=form_of(delta.form), payload=part))
                begin += delta.nbytes
        self._landed[entry.slice] = entry, deltas
        if tuple(lineages) == self._lineages:
            self._pass_on(entry, deltas, payload)

    def _pass_on(
        self, entry: data_pb2.FetchedSlice, deltas: list[Delta] | None, payload: ByteArray
    ) -> None:
        """Shows a slice of a version that is on its way."""
        bits: BitArray | None = None
        if deltas is None:
            bits = payload.view("<u2")
        elif deltas and deltas[-1].form is Form.DENSE:
            bits = deltas[-1].payload.view("<u2")
        shard = self._shard_of[entry.slice]
        table, version = shard.table, _version(entry)
        assert table is not None
        with self._lock:
            table.rings[entry.slice].adopt(table.lineage, version, bits, deltas)
            is_newer = table.newest is None or version.number > table.newest.number
            if is_newer:
                table.newest = version
            shard.land()
        del self._landed[entry.slice]
        self._passed.add(entry.slice)
        if is_newer:
            shard.on_version()

    def taken(self, weights: PublishedWeights, source: Source) -> None:
        """Shows a version on all shards."""
        with self._lock:
            if source.spec is not self._spec:
                self._spec = source.spec
                for index, shard in enumerate(self.shards):
                    table = RelayedTable(source.spec, index)
                    shard.show(self._job, self._table, table)
                    self._shard_of |= dict.fromkeys(table.rings, shard)
            for shard, lineage in zip(self.shards, source.lineages, strict=True):
                assert shard.table is not None
                self._show(shard.table, lineage, weights, source)
                shard.land()
            self._landed.clear()
            self._passed.clear()
            self._lineages = tuple(source.lineages)
        for shard in self.shards:
            shard.on_version()

    def _show(
        self, table: RelayedTable, lineage: int, weights: PublishedWeights, source: Source
    ) -> None:
        slices = weights.layout.slices
        table.lineage, table.every, table.exact = lineage, source.every, weights.exact
        for index, ring in table.rings.items():
            bits = weights.bits[slices[index].start : slices[index].stop]
            if index in self._landed:  # Else it has had this version before.
                entry, deltas = self._landed[index]
                table.newest = _version(entry)
                ring.adopt(lineage, table.newest, bits, deltas)
            elif index in self._passed:
                ring.fill(bits)

    def say(self, trouble: str) -> None:
        """Sets the reason that readers get while there is no version."""
        with self._lock:
            for shard in self.shards:
                shard.trouble = trouble


def _version(entry: data_pb2.FetchedSlice) -> PublishedVersion:
    return PublishedVersion(number=entry.number, step=entry.step, fingerprint=entry.fingerprint)
