"""Where the numbers of a slice lie in the files of its journal, and pieces read from there.

Files are mapped, so what a queue has written is what a read of the file finds. Of a slice only that
is read which the record that counts needs: free arrays and the other copy of the weights are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pscore.memory.segment import WeightsMap
from psserver.durability.journal_dir import ARENA
from psserver.durability.sealed import tail_spans
from psserver.slices.arena import HEAD_NBYTES
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import NUMBERS

PIECE_NBYTES = 1 << 20
BLOCK_NBYTES = 512  # Unit of `st_blocks`, on every file system.
HEADER_NBYTES = 4096  # Of a file of one slice's own (psserver/rows/mapped.py).
SCRATCH = ".undo"  # End of the name of a file whose content counts only within an order.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a file below the folder of the journals."""

    path: str  # JOB/NAME.
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPiece:
    """The content of a span, or the news that a file or a job is gone."""

    path: str
    offset: int = 0
    data: bytes = b""
    size: int = 0  # Bytes of the whole file.
    reserved: int = 0  # Bytes from the start of the file that have room on the disk.
    is_gone: bool = False


class SliceSpans:
    """The spans of one slice.

    Attributes:
        job: Name of its job's folder.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        table: int,
        index: int,
        layout: WeightsMap,
        journal: SliceJournal,
    ) -> None:
        """Reads nothing yet.

        Args:
            job: Name of the job's folder in it.
            layout: Places of the slices in the table's weights.
        """
        self._folder, self.job, self._table, self._index = folder, job, table, index
        self._layout, self.journal = layout, journal

    def find(self) -> Iterator[Span]:
        """Yields what the slice needs; nothing may change it meanwhile."""
        weights = f"{self.job}/{self._table}.weights"
        record = self.journal.record
        if record.version >= 0 and record.weights in NUMBERS:
            yield _span(weights, self._layout.buffer_span(self._index, record.weights - 1))
        yield _span(weights, self._layout.versions_span(self._index))
        for found in tail_spans(self._layout, self._index):
            yield _span(weights, found)
        for path in sorted((self._folder / self.job).glob(f"{self._table}.{self._index}.*")):
            used = HEADER_NBYTES if path.name.endswith(SCRATCH) else _reserved(path.stat())
            yield _span(f"{self.job}/{path.name}", (0, used))
        yield arena_head(self.job)
        for found in self.journal.spans():
            yield _span(f"{self.job}/{ARENA}", found)


class SpanReader:
    """Reads spans, and remembers what it has read."""

    def __init__(self, folder: Path) -> None:
        """Starts without a reading of files below `folder`."""
        self._folder = folder
        self._read: dict[tuple[str, int, int], int] = {}  # XXH3 of each piece.

    def changed(self, spans: Iterable[Span]) -> Iterator[JournalPiece]:
        """Yields the pieces of spans that differ from the last reading.

        Raises:
            OSError: A file cannot be read.
        """
        for span in spans:
            with (self._folder / span.path).open("rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                for offset in range(span.offset, span.offset + span.nbytes, PIECE_NBYTES):
                    nbytes = min(PIECE_NBYTES, span.offset + span.nbytes - offset)
                    data = os.pread(file.fileno(), nbytes, offset)
                    digest, key = xxhash.xxh3_64_intdigest(data), (span.path, offset, nbytes)
                    if self._read.get(key) != digest:
                        self._read[key] = digest
                        yield JournalPiece(
                            path=span.path,
                            offset=offset,
                            data=data,
                            size=found.st_size,
                            reserved=_reserved(found),
                        )


def arena_head(job: str) -> Span:
    """Returns the start of a job's arena, which a shard without a slice of the job has too."""
    return _span(f"{job}/{ARENA}", (0, HEAD_NBYTES))


def read_small(folder: Path, path: Path) -> JournalPiece | None:
    """Returns a whole small file; None: it is a folder.

    Raises:
        OSError: It cannot be read.
    """
    name = path.relative_to(folder).as_posix()
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        return None
    except FileNotFoundError:
        return JournalPiece(path=name, is_gone=True)
    return JournalPiece(path=name, data=data, size=len(data), reserved=len(data))


def digest_of_span(folder: Path, span: Span) -> int:
    """Returns the XXH3 of the content of a span; raises OSError if it cannot be read."""
    total = xxhash.xxh3_64()
    with (folder / span.path).open("rb", buffering=0) as file:
        for offset in range(span.offset, span.offset + span.nbytes, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, span.offset + span.nbytes - offset)
            total.update(os.pread(file.fileno(), nbytes, offset))
    return total.intdigest()


def _reserved(found: os.stat_result) -> int:
    return min(found.st_size, found.st_blocks * BLOCK_NBYTES)


def _span(path: str, place: tuple[int, int]) -> Span:
    return Span(path=path, offset=place[0], nbytes=place[1])
