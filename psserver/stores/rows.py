"""Stores of row slices (psserver/rows): slabs in files beside the arena of the job's journal."""

from __future__ import annotations

from pathlib import Path

from pscore.content import Stepping
from pscore.rows.optimizers import RowOptimizer
from pscore.rows.spec import COUNTER, Rows, stride_of
from pscore.types import SliceSpec
from psserver.decisions.table import Table
from psserver.rows.cells import RowJournal
from psserver.rows.mapped import Mapped
from psserver.rows.policy import RowPolicy, make_waiting
from psserver.rows.slab import Slab
from psserver.rows.store import RowStore
from psserver.rows.undo import LONG, Undo
from psserver.rows.warm import warm_up
from psserver.slices.arena import Arena
from psserver.slices.base import Observer, Store
from psserver.slices.journal import SliceJournal
from psserver.stores.base import RECORDS_NBYTES, SliceMemory, StoreKind


class RowKind(StoreKind):
    """Rows by id, with their state."""

    name = "rows"

    def arena_nbytes(self, table: Table) -> int:
        """Returns the bytes of the records; rows lie in files of their own."""
        return len(table.specs) * RECORDS_NBYTES

    def open_journal(self, arena: Arena, root: int, table: Table, part: SliceSpec) -> SliceJournal:
        """Returns a journal that keeps payloads of any length."""
        return RowJournal(arena, root, len(part.segments))

    def make(self, table: Table, part: SliceSpec, memory: SliceMemory, observer: Observer) -> Store:
        """Returns a store of slabs."""
        content, optimizer = table.spec.content, table.optimizer
        assert isinstance(content, Rows)
        assert isinstance(optimizer, RowOptimizer)
        journal = memory.journal
        assert journal is None or isinstance(journal, RowJournal)
        policies: list[RowPolicy] = []
        for number, tensor in enumerate(table.layout.tensors):
            dim, rows_max = tensor.shape[1], content.rows_max(number, tensor, part)
            mapped = _mapped(
                journal, stride_of(optimizer, dim) * rows_max, table, part, f"{number}.rows"
            )
            row_table, waiting = content.tables[number], None
            if waiting_max := content.waiting_max(number, tensor, part):
                nbytes = stride_of(COUNTER, 1) * waiting_max
                memory_of = _mapped(journal, nbytes, table, part, f"{number}.waiting")
                waiting = make_waiting(waiting_max, row_table, memory_of)
            slab = Slab(dim, rows_max, optimizer, row_table, mapped)
            buckets, room = range(part.start, part.stop), content.room(number, tensor)
            policies.append(RowPolicy(row_table, slab, waiting, buckets, room))
        undo = None
        if journal is not None:
            slabs = [slab for policy in policies for slab in policy.slabs]
            longest = sum(len(slab.memory.data) + 2 * LONG * (1 + slab.rows_max) for slab in slabs)
            undo = Undo(_mapped(journal, longest, table, part, "undo"))
        return RowStore(
            content.owned(part, table.layout),
            policies,
            [segment.group for segment in part.segments],
            table.spec.rule,
            optimizer,
            journal,
            undo,
            [words for words in (memory.versions, memory.stamps) if words is not None],
            observer,
        )

    def count_held(self, store: Store) -> dict[str, int]:
        """Returns the numbers of rows, and of pushes that were refused for lack of room."""
        assert isinstance(store, RowStore)
        return store.count_held()

    def warm_up(self, optimizer: Stepping) -> None:
        """Walks one row through all loops."""
        assert isinstance(optimizer, RowOptimizer)
        warm_up(optimizer)


def _mapped(
    journal: RowJournal | None, nbytes: int, table: Table, part: SliceSpec, name: str
) -> Mapped:
    """Returns memory of a slice: in a file beside the arena, or on the heap."""
    if journal is None:
        return Mapped(nbytes)
    folder: Path = journal.arena.path.parent
    path = folder / f"{table.index}.{part.index}.{name}"
    return Mapped(nbytes, path, journal.arena.seal, is_new=journal.is_new)
