"""Interface of a kind of stores: the memory of a slice, its journal and its numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pscore.content import Stepping
from pscore.types import FloatArray, IntArray, SliceSpec
from psserver.decisions.table import Table
from psserver.slices.arena import Arena
from psserver.slices.base import Observer, Store
from psserver.slices.journal import SliceJournal

RECORDS_NBYTES = 8192  # For the two records of a slice, with some workers.


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMemory:
    """The memory of one slice."""

    buffers: Sequence[FloatArray]  # Two arrays for weights that workers can map.
    versions: IntArray  # `(2,) int64`, where the versions of these buffers are published.
    # The same again at the end of their file; None: it does not outlive the process.
    stamps: IntArray | None = None
    journal: SliceJournal | None = None  # Where every change is recorded; None: likewise.


class StoreKind(ABC):
    """One kind of stores."""

    name: ClassVar[str]  # Name of the content whose stores it makes.

    @abstractmethod
    def arena_nbytes(self, table: Table) -> int:
        """Returns the bytes of a table that are reserved in the arena of its job's journal."""

    @abstractmethod
    def open_journal(self, arena: Arena, root: int, table: Table, part: SliceSpec) -> SliceJournal:
        """Returns the journal of a slice: a new one, or that of a killed process.

        Raises:
            ValueError: Its root, its record or a file of the slice is damaged.
            OSError: There is no room on the disk.
        """

    @abstractmethod
    def make(self, table: Table, part: SliceSpec, memory: SliceMemory, observer: Observer) -> Store:
        """Returns the store of a slice, with the contents of its journal if there are any."""

    def count_held(self, store: Store) -> Mapping[str, int]:
        """Returns counts of the things that a store holds beside weights, by name; any thread."""
        return {}

    @abstractmethod
    def warm_up(self, optimizer: Stepping) -> None:
        """Makes a small step, so that the loops are compiled before the first push; any thread."""
