"""A copy of the rows of a slice at one version, made in portions while training goes on.

The copy walks through the places from the first to the last, some megabytes at a time, between two
orders. Before a step changes or gives up a row that the walk has not reached, the row is copied as
it was; a place that gets a row meanwhile is left out. So the copy has each row of its version once,
in no order, and takes no memory beside its arrays but a byte for each place.
"""

from __future__ import annotations

import numpy as np

from psserver.rows import kernels
from psserver.rows.slab import Places, Slab

PORTION_NBYTES = 2 << 20  # Bytes of a slab; a step waits for no more than one portion.


class SlabCopy:
    """The copy of one slab."""

    def __init__(self, slab: Slab, since: int) -> None:
        """Begins with the rows as they are now.

        Args:
            since: Only rows of a later version are copied; -1: all.
        """
        self._slab = slab
        self._high, most = slab.high, slab.count
        if since >= 0:
            most = min(most, kernels.GROUP * len(slab.groups_since(since)))
        self._copied = kernels.CopiedRows(
            since=since,
            is_copied=np.zeros(self._high, np.uint8),
            ids=np.empty(most, np.uint64),
            values=np.empty(most * slab.width, np.float32),
            versions=np.empty(most, np.int64),
            num_rows=np.zeros(1, np.int64),
        )
        self._at = 0
        self.is_whole = not self._high  # Whether the walk is over.

    def advance(self) -> None:
        """Copies the next portion of the walk."""
        stop = min(self._high, self._at + max(1, PORTION_NBYTES // (4 * self._slab.stride)))
        self._slab.copy_range(self._at, stop, self._copied)
        self._at = stop
        self.is_whole = stop == self._high

    def keep(self, plan: Places) -> None:
        """Copies the rows that a step changes or removes, before it begins."""
        if self.is_whole:
            return
        kernels.copy_places(self._slab.arrays, plan.before, self._at, self._copied)
        new = plan.places[plan.is_new]
        self._copied.is_copied[new[new < self._high]] = 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids, rows with their state, and versions."""
        copied, count = self._copied, int(self._copied.num_rows[0])
        values = copied.values[: count * self._slab.width]
        return copied.ids[:count], values, copied.versions[:count]
