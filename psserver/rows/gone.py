"""The ids that have gone from the slabs of a slice, for copies that hold changes only."""

from __future__ import annotations

from collections import deque

import numpy as np

from pscore.rows.hashing import IdArray

IDS_MAX = 1 << 20
NO_IDS: IdArray = np.zeros(0, np.uint64)


class GoneIds:
    """The ids that have gone with the newest updates, in a list of bounded length."""

    def __init__(self, first: int = 0) -> None:
        """Starts with none; the ids that went with updates up to `first` are not known."""
        self._first = first
        self._noted: deque[tuple[int, int, IdArray]] = deque()  # Version, slab and ids.
        self._num_ids = 0

    def note(self, version: int, slab: int, ids: IdArray) -> None:
        """Notes ids that go from a slab; forgets the oldest ones if there are too many."""
        if not len(ids):
            return
        self._noted.append((version, slab, ids))
        self._num_ids += len(ids)
        while self._num_ids > IDS_MAX:
            self._first, _, gone = self._noted.popleft()
            self._num_ids -= len(gone)

    def has_all_since(self, version: int) -> bool:
        """Returns whether all ids are known that went with updates after a version."""
        return version >= self._first

    def since(self, version: int, num_slabs: int) -> list[IdArray]:
        """Returns the ids that went after a version, by slab; some may be back."""
        found: list[list[IdArray]] = [[NO_IDS] for _ in range(num_slabs)]
        for noted, slab, ids in self._noted:
            if noted > version:
                found[slab].append(ids)
        return [np.concatenate(of_slab) for of_slab in found]
