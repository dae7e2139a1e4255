"""A worker's cache of rows: a row that was pulled is used for some steps without asking again.

Every push goes to the shards at once; only reads may be old. A row that a step uses holds every
push of this worker except those of its last `staleness` steps, and of the others what the mode
promises, less these steps: in `ssp(bound=b)` the total staleness is b + `staleness` steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pscore.errors import ConfigError
from pscore.types import FloatArray, IntArray
from psworker.rows.lookups import IdArray

Pull = Callable[[IdArray, FloatArray], None]


class RowCache:
    """Rows of one table, with the step at which each was pulled.

    Attributes:
        staleness: Steps for which a row is used after the one that has pulled it, 1 or more.
        num_hits: Rows that were used without a pull.
        num_misses: Rows that were pulled.
    """

    def __init__(self, rows: int, staleness: int) -> None:
        """Makes an empty cache.

        Args:
            rows: Most rows in it; those used longest ago make room.

        Raises:
            ConfigError: An argument is less than 1.
        """
        if rows < 1 or staleness < 1:
            raise ConfigError(f"RowCache has rows={rows}, staleness={staleness}, must be 1 or more")
        self.staleness = staleness
        self.num_hits = self.num_misses = 0
        self._size = rows
        self.clear()

    def __len__(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        """Forgets all rows."""
        self._ids: IdArray = np.zeros(0, np.uint64)  # Ascending.
        self._pulled: IntArray = np.zeros(0, np.int64)  # Step at which each was pulled.
        self._used: IntArray = np.zeros(0, np.int64)  # Step at which each was used last.
        self._rows: FloatArray | None = None

    def read(self, ids: IdArray, out: FloatArray, step: int, pull: Pull) -> None:
        """Copies rows into `out`; pulls those that are not here, or too old.

        Args:
            ids: `(u,) uint64`, distinct.
            out: `(u, dim) float32`.
            step: Steps of this worker so far.
            pull: Copies the rows of some ids, in the order of `ids`, into an array.
        """
        places = np.searchsorted(self._ids, ids)
        inside = places < len(self._ids)
        is_here = np.zeros(len(ids), np.bool_)
        is_here[inside] = self._ids[places[inside]] == ids[inside]
        is_here[is_here] = step - self._pulled[places[is_here]] <= self.staleness
        missing = np.flatnonzero(~is_here)
        self.num_hits += len(ids) - len(missing)
        self.num_misses += len(missing)
        if self._rows is not None:
            hits = places[is_here]
            out[is_here] = self._rows[hits]
            self._used[hits] = step
        if len(missing):
            pulled = np.empty((len(missing), out.shape[1]), np.float32)
            pull(ids[missing], pulled)
            out[missing] = pulled
            self._keep(ids[missing], pulled, step)

    def _keep(self, ids: IdArray, rows: FloatArray, step: int) -> None:
        """Puts rows in the place of older ones of the same ids, and of those used longest ago."""
        stays = ~np.isin(self._ids, ids)
        all_ids = np.concatenate([self._ids[stays], ids])
        former = np.zeros((0, rows.shape[1]), np.float32) if self._rows is None else self._rows
        steps = np.full(len(ids), step)
        used = np.concatenate([self._used[stays], steps])
        kept = np.argsort(-used, kind="stable")[: self._size]
        kept = kept[np.argsort(all_ids[kept])]
        self._ids, self._used = all_ids[kept], used[kept]
        self._pulled = np.concatenate([self._pulled[stays], steps])[kept]
        self._rows = np.concatenate([former[stays], rows])[kept]
