"""Stores of parts of a flat vector (psserver/slices)."""

from __future__ import annotations

from pscore.content import Stepping
from pscore.optimizers import Optimizer, warm_up
from pscore.timing.memory import num_changing
from pscore.types import SliceSpec
from psserver.decisions.table import Table
from psserver.slices.arena import Arena
from psserver.slices.base import Observer, Store
from psserver.slices.journal import SliceJournal
from psserver.slices.store import SliceStore
from psserver.stores.base import RECORDS_NBYTES, SliceMemory, StoreKind


class FlatKind(StoreKind):
    """Weights, optimizer state and sums as whole arrays."""

    name = "flat"

    def arena_nbytes(self, table: Table) -> int:
        """Returns the bytes of optimizer state, sums and records."""
        num_state = len(table.optimizer.state_names)
        arrays = num_changing(table.spec.rule, num_state, is_kept=True) * table.nbytes
        return arrays + len(table.specs) * RECORDS_NBYTES

    def open_journal(self, arena: Arena, root: int, table: Table, part: SliceSpec) -> SliceJournal:
        """Returns a journal whose arrays are as long as the slice, or as its longest payload."""
        longest = table.spec.compressor.payload_nbytes_max(part.numel)
        return SliceJournal(arena, root, part.numel, longest, len(part.segments))

    def make(self, table: Table, part: SliceSpec, memory: SliceMemory, observer: Observer) -> Store:
        """Returns a store of arrays."""
        assert isinstance(table.optimizer, Optimizer)
        return SliceStore(
            part,
            table.spec.rule,
            table.optimizer,
            memory.buffers,
            memory.versions,
            memory.journal,
            memory.stamps,
            observer,
        )

    def warm_up(self, optimizer: Stepping) -> None:
        """Makes one step of one element."""
        assert isinstance(optimizer, Optimizer)
        warm_up(optimizer)
