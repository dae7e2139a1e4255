"""`prefetch`: pulls the rows of the next batch while a training loop computes the present one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from psworker.rows.modules import EmbeddingTable
from psworker.rows.row_tables import RowTables, ShardRows

B = TypeVar("B")
Ids = Mapping[EmbeddingTable, torch.Tensor | Sequence[torch.Tensor]]


def prefetch(loader: Iterable[B], model: torch.nn.Module, ids: Callable[[B], Ids]) -> Iterator[B]:
    """Yields the batches of a loader; the rows of the next one are pulled meanwhile.

    Training has the same bits as without it: rows that change until they are used are pulled again.
    A lookup of ids that were not named here is as without it.

    Args:
        loader: The batches.
        model: The model, whose row tables are on the shards already.
        ids: Returns the ids that the model will look up in a batch: of each row table a tensor, or
            several.

    Raises:
        IndexError: An id is not one of a row.
        PacelineError: A shard refused something, or does not answer.
    """
    tables = [table for table in model.modules() if isinstance(table, EmbeddingTable)]
    batches = iter(loader)
    present: list[B] = []  # One, once the loader has given one.
    for batch in batches:
        if present:
            _start(tables, ids(batch))
            yield present.pop()
        present.append(batch)
    yield from present


def _start(tables: Sequence[EmbeddingTable], ids: Ids) -> None:
    """Requests the rows of a batch, of all tables of each optimizer at once."""
    wanted: dict[RowTables, dict[int, torch.Tensor]] = {}
    for table in tables:
        given = ids.get(table)
        if given is None or not isinstance(table.source, ShardRows):
            continue
        parts = [given] if isinstance(given, torch.Tensor) else given
        whole = torch.cat([table.check(part).reshape(-1) for part in parts])
        wanted.setdefault(table.source.tables, {})[table.source.index] = whole
    for row_tables, batches in wanted.items():
        row_tables.prefetch(batches)
