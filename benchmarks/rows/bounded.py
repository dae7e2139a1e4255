"""Many more ids than a table has room for: its memory beside the declared one, and two equal runs.

Distinct ids pass through a table with `min_count=2` and an `lru` of a tenth of them: each is pushed
in two steps one behind the other. Then lookups of ids that have no row: they must make none.
`is_equal`: whether a second run ends with the same rows, bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import many
from pscore.rows.spec import RowTable
from psserver.remote import ask

FULL, QUICK = 20_000_000, 400_000  # Ids.
LOOKUPS = 1_000_000
BEYOND = 1 << 40  # An id that nobody pushes.


def _held(addresses: list[str]) -> dict[str, int]:
    (status,) = ask.statuses(addresses)
    (table,) = (table for job in status.jobs for table in job.tables if table.held)
    return dict(table.held)


def _run(folder: Path, num_ids: int) -> dict[str, Any]:
    """Returns the table's counts at the end, and a hash of the rows."""
    table = RowTable(seed=many.SEED, init="uniform(0.01)", lru=num_ids // 10, min_count=2)
    with many.shards_of(folder, 1) as shards, many.running(shards, table) as job:
        job.ask("pass_through", num_ids)
        held = _held(shards.addresses)
        job.ask("look", LOOKUPS, BEYOND)
        made = _held(shards.addresses)["rows"] - held["rows"]
        return {**held, "made_by_lookups": made, "digest": job.ask("look", num_ids)}


def measure(quick: bool) -> dict[str, Any]:
    """Returns counts, and the bytes of rows and indices over those that were declared.

    Args:
        quick: Whether there are few ids.
    """
    num_ids = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        first, second = (_run(Path(name) / turn, num_ids) for turn in ("first", "second"))
    table = RowTable(seed=many.SEED, lru=num_ids // 10, min_count=2)
    spec = many.spec_of(table, 1)
    layout, optimizer = spec.layout(), spec.content.optimizer(spec.optimizer)
    declared = spec.content.memory_nbytes(layout.slices, layout, optimizer, 1)
    return {
        "ids": num_ids,
        "rows": first["rows"],
        "rows_removed": first["rows_removed"],
        "bytes_of_declared": first["rows_nbytes"] / declared,
        "made_by_lookups": first["made_by_lookups"],
        "is_equal": first == second,
    }
