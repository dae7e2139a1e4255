"""Published tables, as readers see them: the newest version, and the bytes that lead to it.

A shard publishes the tables that it trains (publications.py), a relay the one that it reads
(relayed.py). Readers find both alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from pscore.errors import LimitError
from pscore.net.budget import Budget
from pscore.net.shared_rate import SharedRate
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import ByteArray
from psserver.publish.ring import FoundVersion, PublishedVersion

READERS_MAX = 1024
SILENT_S_MAX = 30.0  # Then a reader without a connection for weights is forgotten.
REPLY_NBYTES = 4 << 20  # An answer is ended by the slice with which it is as long.
ANSWERS_NBYTES_MAX = 2 << 30  # Of versions that slow readers keep from being freed.
REPLY_DELTAS = 1 << 15  # Likewise: the header of a frame is limited too.
WHOLE = "whole"  # Form of a version that is sent whole, for counts of bytes.


class PublishedTable(Protocol):
    """The versions of one table on one shard."""

    @property
    def lineage(self) -> int:
        """Number of the lineage."""

    @property
    def every(self) -> int:
        """Updates from one version to the next; seconds in an asynchronous mode."""

    @property
    def exact(self) -> bool:
        """Whether all slices of a version are of one step."""

    @property
    def spec(self) -> TableSpec:
        """The declaration of the table."""

    @property
    def newest(self) -> PublishedVersion | None:
        """The newest version that all slices have; its fingerprint is that of one slice."""

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that are kept."""

    @property
    def has_slices(self) -> bool:
        """Whether slices of the table are on this shard: else it never has a version."""

    def find(
        self, index: int, lineage: int, target: int, held: int, known: int
    ) -> FoundVersion | None:
        """Returns a version of a slice for a reader (`VersionRing.find`); None: there is none yet.

        Args:
            held: Number of the version that the reader holds; -1: none.
        """


P = TypeVar("P", bound=PublishedTable)
Tell = Callable[[str], None]  # Called under the lock with an address.


@dataclass(slots=True, kw_only=True)
class ReaderState:
    """A process that reads published weights, as it has described itself."""

    host: str
    pid: int
    heard_s: float
    lineage: int = 0
    number: int = -1  # The version that it uses; -1: none yet.
    resyncs: int = 0
    relays: bool = False
    behind_s: float | None = None  # Since when there is a version that it does not use.


@dataclass(slots=True, eq=False)
class Published(Generic[P]):
    """A publication with its readers."""

    publication: P
    readers: dict[int, ReaderState] = field(default_factory=dict)
    nbytes: Counter[str] = field(default_factory=Counter)  # Sent, by form.


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The newest version of a table on this shard."""

    lineage: int = 0
    newest: int = -1
    every: int = 0
    exact: bool = True
    spec: TableSpec | None = None
    waiting_for: str = ""

    def is_newer(self, lineage: int, number: int) -> bool:
        """Returns whether it is newer than a version of a lineage."""
        return self.newest >= 0 and (self.lineage, self.newest) > (lineage, number)


class PublishedTables(Generic[P]):
    """The published tables of one shard, and their readers.

    Attributes:
        now: Returns the time in seconds, of any beginning.
        rate: The rate that readers on other hosts share.
        answers: Bytes of answers that may be under way, apart from those of workers.
        on_version: Called from any thread when a table has a new version.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        now: Callable[[], float],
        index: int,
        rate: SharedRate | None = None,
    ) -> None:
        """Starts without a table.

        Args:
            lock: Guards all of it, and may be taken again by its owner.
            now: Returns the time in seconds, of any beginning.
            rate: The rate that readers on other hosts share; None: no limit.
        """
        self.now, self.rate = now, SharedRate(0) if rate is None else rate
        self.answers = Budget(ANSWERS_NBYTES_MAX, "")
        self.on_version: Callable[[], None] = lambda: None
        self._tables_lock, self._index = lock, index
        self._published: dict[tuple[str, str], Published[P]] = {}  # By job and table.
        self._connected: dict[int, list[Tell]] = {}  # Connections for weights, by reader.

    def watch(
        self, job: str, table: str, number: int = 0, reader: ReaderState | None = None
    ) -> View:
        """Returns the newest version of a table.

        Args:
            number: Random number of the reader; 0: none.

        Raises:
            LimitError: There are too many readers.
        """
        with self._tables_lock:
            found = self._get(job, table)
            if found is None:
                return View(waiting_for=self._why_none(job, table))
            publication = found.publication
            newest = publication.newest
            if number and reader is not None:
                self._note(found, number, reader, newest)
            return View(
                lineage=publication.lineage,
                newest=-1 if newest is None else newest.number,
                every=publication.every,
                exact=publication.exact,
                spec=publication.spec,
                waiting_for="" if newest is not None else self._next_one(publication),
            )

    def _get(self, job: str, table: str) -> Published[P] | None:
        """Returns a table that is published here; called under the lock."""
        return self._published.get((job, table))

    def _why_none(self, job: str, table: str) -> str:
        """Returns the reason that a table is not published here; called under the lock."""
        return f"table {table!r} of job {job!r} is not published on shard {self._index}"

    def _next_one(self, publication: P) -> str:
        unit = "updates" if publication.exact else "s"
        return (
            f"table {publication.spec.name!r} has no version on shard {self._index} yet: one is "
            f"published every {publication.every} {unit}"
        )

    def _note(
        self, found: Published[P], number: int, reader: ReaderState, newest: PublishedVersion | None
    ) -> None:
        before = found.readers.get(number)
        if before is None and len(found.readers) >= READERS_MAX:
            raise LimitError(
                f"{READERS_MAX} readers on shard {self._index}, the most for a table; let the "
                "others read from relays (psserver relay)"
            )
        is_behind = newest is not None and reader.number < newest.number
        if is_behind:
            since = None if before is None else before.behind_s
            reader.behind_s = self.now() if since is None else since
        for other in self._published.values():  # It may have read a table that has grown since.
            other.readers.pop(number, None)
        found.readers[number] = reader

    def forget(self, job: str, table: str, number: int) -> None:
        """Forgets a reader that has ended."""
        with self._tables_lock:
            found = self._get(job, table)
            if found is not None:
                found.readers.pop(number, None)

    def connect(self, number: int, tell: Tell) -> None:
        """Notes that a reader has one more connection for weights."""
        with self._tables_lock:
            self._connected.setdefault(number, []).append(tell)

    def announce(self, address: str) -> None:
        """Sends connected readers the address where the shard will soon be; empty: it stays."""
        with self._tables_lock:
            for connections in self._connected.values():
                for tell in connections:
                    tell(address)

    def disconnect(self, number: int, tell: Tell) -> None:
        """Notes that a connection for weights has ended.

        A reader whose last connection has ended is forgotten until it asks again.
        """
        with self._tables_lock:
            self._connected[number].remove(tell)
            if not self._connected[number]:
                del self._connected[number]
                for found in self._published.values():
                    found.readers.pop(number, None)

    def forget_silent(self) -> None:
        """Forgets readers that have been silent for `SILENT_S_MAX`, and have no connection.

        One that has may be busy with the version that it holds, and is behind.
        """
        with self._tables_lock:
            before = self.now() - SILENT_S_MAX
            for found in self._published.values():
                for number, reader in list(found.readers.items()):
                    if reader.heard_s < before and number not in self._connected:
                        del found.readers[number]

    def fetch(self, header: data_pb2.FetchHeader) -> tuple[data_pb2.FetchReply, list[ByteArray]]:
        """Returns the answer to a reader: the slices that have the version, as many as fit.

        The arrays are not changed any more.
        """
        with self._tables_lock:
            found = self._get(header.job, header.table)
            if found is None:
                return data_pb2.FetchReply(), []
        publication = found.publication
        reply = data_pb2.FetchReply(lineage=header.lineage)
        arrays: list[ByteArray] = []
        sent: Counter[str] = Counter()
        num_deltas = 0
        for held in header.slices:
            version = publication.find(
                held.slice, header.lineage, header.target, held.number, held.fingerprint
            )
            if version is not None:
                arrays += _describe(version, held, reply, sent)
                num_deltas += len(version.deltas)
            if sum(sent.values()) >= REPLY_NBYTES or num_deltas >= REPLY_DELTAS:
                break
        with self._tables_lock:
            found.nbytes += sent
        return reply, arrays

    def listed(self) -> list[tuple[str, str, Published[P]]]:
        """Returns job and table of each publication, with a copy of its counts and readers.

        A table of which this shard has no slice is left out.
        """
        with self._tables_lock:
            return [
                (*key, replace(found, readers=dict(found.readers), nbytes=Counter(found.nbytes)))
                for key, found in sorted(self._published.items())
                if found.publication.has_slices
            ]


def _describe(
    found: FoundVersion, held: data_pb2.HeldSlice, reply: data_pb2.FetchReply, sent: Counter[str]
) -> Sequence[ByteArray]:
    """Adds a slice to an answer, and returns its payload."""
    version = found.version
    entry = reply.slices.add(
        slice=held.slice,
        number=version.number,
        fingerprint=version.fingerprint,
        step=version.step,
        base=-1 if found.whole is not None else held.number,
    )
    if found.whole is not None:
        sent[WHOLE] += found.whole.nbytes
        return [found.whole.view(np.uint8)]
    for delta in found.deltas:
        entry.deltas.add(form=int(delta.form), nbytes=delta.payload.nbytes)
        sent[delta.form.name.lower()] += delta.payload.nbytes
    return [delta.payload for delta in found.deltas]
