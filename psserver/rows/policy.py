"""Which rows of a table are made and which go: decided at a step, from counts and versions only.

    min_count  a row is made in the step that brings its id's gradients to so many pushes; those of
               the steps before are dropped. An id that waits has a place with its count
    ttl        behind update v the rows go that were last changed at v - ttl or before, and the ids
               that have waited since then
    lru        if a step makes more rows than there is room for, those go that were changed the
               longest ago; of equal ones those of the smallest ids

Neither time nor chance plays a part. So a step that is made again after a kill decides as before,
and with `min_count` and `ttl` any number of shards decides the same. An id that has gone begins
again as one that was never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pscore.rows.hashing import IdArray
from pscore.rows.spec import COUNTER, RowTable
from pscore.types import FloatArray, IntArray
from psserver.rows.mapped import Mapped
from psserver.rows.slab import NO_PLACES, Places, Slab, SummedRows

ADDING = np.array([1.0, 0.0, 1.0])  # lr, weight_decay and maximize of the sum of pushes.
CHUNK = 1024
SHARE = 8  # A look at all rows finds those of an eighth of the time to live, or of the rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecision:
    """The rows of a step.

    Attributes:
        rows: Places of the rows that the step changes, and of those that go.
        grads: `(n * dim,) float32`, their gradients.
        waiting: Places of the ids that wait, and of those that wait no more; None: none wait.
        times: `(m,) float32`, the pushes of the step that name each id that waits.
        num_dropped: Gradients of rows that are not made: one of each push.
    """

    rows: Places
    grads: FloatArray
    waiting: Places | None
    times: FloatArray
    num_dropped: int

    @property
    def plans(self) -> list[Places]:
        """The places in each of the slabs of the policy."""
        return [self.rows] if self.waiting is None else [self.rows, self.waiting]

    @property
    def num_removed(self) -> int:
        """Rows that go."""
        return len(self.rows.removed)


class RowPolicy:
    """Decides which rows of one table are made in a slice, and which go.

    Attributes:
        slab: The rows.
        waiting: The ids that wait, with their counts; None: every id has a row at once.
        removes: Whether rows may go.
    """

    def __init__(self, table: RowTable, slab: Slab, waiting: Slab | None = None) -> None:
        """Decides as `table` declares."""
        self.slab, self.waiting = slab, waiting
        self._min_count, self._ttl, self._has_lru = table.min_count, table.ttl, table.lru > 0
        self.removes = self._ttl > 0 or self._has_lru
        self._oldest = Oldest(slab, table.ttl)
        self._oldest_waiting = None if waiting is None else Oldest(waiting, table.ttl)

    @property
    def slabs(self) -> list[Slab]:
        """The rows, and the ids that wait if there may be some."""
        return [self.slab] if self.waiting is None else [self.slab, self.waiting]

    def decide(
        self, rows: SummedRows, places: IntArray, version: int, *, at_once: bool = False
    ) -> RowDecision:
        """Returns the rows of a step; nothing is changed yet.

        Args:
            rows: The rows that its pushes name.
            places: `(n,) int64`, the place of each, or -1.
            version: That of the rows after the step.
            at_once: Whether all rows are made.
        """
        ids, grads = rows.ids, rows.values
        waiting, counted, num_dropped = None, np.zeros(0, np.float32), 0
        if self.waiting is not None:
            is_absent = places < 0
            absent = ids[is_absent]
            given = np.full(len(absent), self._min_count) if at_once else rows.times[is_absent]
            is_made = self.admits(absent, given)
            waiting, counted = self._wait(absent, given, is_made, version)
            num_dropped = int(given[~is_made].sum())
            if not is_made.all():
                is_kept = ~is_absent
                is_kept[is_absent] = is_made
                ids, places = ids[is_kept], places[is_kept]
                grads = grads.reshape(-1, self.slab.dim)[is_kept].reshape(-1)
        surplus = self.slab.count + int((places < 0).sum()) - self.slab.rows_max
        removed = NO_PLACES
        if self.removes:
            last = version - self._ttl if self._ttl else -1
            removed = self._oldest.take(last, max(0, surplus), ids)
        return RowDecision(
            rows=self.slab.plan(ids, removed, places),
            grads=grads,
            waiting=waiting,
            times=counted,
            num_dropped=num_dropped,
        )

    def count(self, decision: RowDecision, version: int) -> None:
        """Counts the pushes of ids that wait, in a step that has begun."""
        if self.waiting is not None and decision.waiting is not None:
            self.waiting.step(decision.waiting, decision.times, 1.0, version, 1, ADDING)

    def admits(self, ids: IdArray, times: FloatArray | IntArray) -> np.ndarray:
        """Returns whether so many more pushes make the row of each id, `(n,) bool`.

        Args:
            ids: `(n,) uint64`, which have no row.
            times: `(n,)`, pushes.
        """
        if self.waiting is None:
            return np.ones(len(ids), np.bool_)
        counts = np.empty(len(ids), np.float32)
        self.waiting.read(ids, self.waiting.find(ids), 1, counts)
        is_made: np.ndarray = counts + times >= self._min_count
        return is_made

    def room_for(self, pushes: Sequence[IdArray]) -> int:
        """Returns how many rows there may be after pushes, at the most.

        Args:
            pushes: The ids of each, ascending.
        """
        held = 0 if self._has_lru else self.slab.count
        if (wanted := held + sum(map(len, pushes))) <= self.slab.rows_max:
            return wanted
        if not self._has_lru:
            pushes = [ids[self.slab.find(ids) < 0] for ids in pushes]
        ids, times = np.unique(np.concatenate(pushes), return_counts=True)
        is_there = self.slab.find(ids) >= 0
        return held + int((is_there | self.admits(ids, times)).sum())

    def reserve(self, rows: int, ids: int) -> None:
        """Makes sure that there is space for some rows in all, and for more ids that wait.

        Raises:
            OSError: The disk is full.
        """
        self.slab.reserve(rows)
        if self.waiting is not None:
            self.waiting.reserve(self.waiting.count + ids)

    def forget(self) -> None:
        """Forgets which rows are the oldest: others have been loaded."""
        self._oldest.forget()
        if self._oldest_waiting is not None:
            self._oldest_waiting.forget()

    def _wait(
        self, ids: IdArray, times: FloatArray, is_made: np.ndarray, version: int
    ) -> tuple[Places, FloatArray]:
        """Returns the places of the ids that wait behind a step, and their pushes of it.

        If there are too many, those go that were not named for the longest time.
        """
        slab, oldest = self.waiting, self._oldest_waiting
        assert slab is not None
        assert oldest is not None
        places = slab.find(ids)
        made = places[is_made]
        made = made[made >= 0]
        fresh = np.flatnonzero(~is_made & (places < 0))
        surplus = slab.count - len(made) + len(fresh) - slab.rows_max
        last = version - self._ttl if self._ttl else -1
        gone = oldest.take(last, max(0, surplus), ids)
        is_waiting = ~is_made
        is_waiting[fresh[len(fresh) - max(0, surplus - len(gone)) :]] = False
        plan = slab.plan(ids[is_waiting], np.concatenate([made, gone]), places[is_waiting])
        return plan, times[is_waiting].astype(np.float32)


def make_waiting(rows_max: int, table: RowTable, memory: Mapped) -> Slab:
    """Returns a slab for the ids of a table that wait for their rows."""
    return Slab(1, rows_max, COUNTER, RowTable(seed=table.seed, init="zeros"), memory)


class Oldest:
    """The rows of a slab in the order of their last change, as far as it is known.

    A look at all rows finds more than are needed at once. A row that changes afterwards is no
    longer of the version that was found, so what was found stays right.
    """

    def __init__(self, slab: Slab, ttl: int) -> None:
        """Knows nothing yet of `slab`; with a time to live rows are needed by their versions."""
        self._slab, self._ahead = slab, ttl // SHARE
        self.forget()

    def forget(self) -> None:
        """Forgets all rows."""
        self._places = self._versions = NO_PLACES
        self._until = -1  # Every row of a version up to this one was found.

    def take(self, version: int, count: int, ids: IdArray) -> IntArray:
        """Returns the places of the oldest rows, which then are no longer known.

        Args:
            version: All rows that were last changed at this one or before are wanted.
            count: So many rows at least, if there are so many.
            ids: `(n,) uint64`, ascending: those of rows that are not wanted.
        """
        if version > self._until:
            self._look(version + self._ahead, 0)
        stop = int(np.searchsorted(self._versions, version, "right"))
        chosen = self._good(0, stop, ids)
        least, has_looked = max(len(chosen), count), False
        while len(chosen) < least:
            if stop == len(self._places):
                if has_looked:
                    break
                self._look(version, count + len(ids))
                chosen, stop, has_looked = NO_PLACES, 0, True
            end = min(len(self._places), stop + max(CHUNK, least - len(chosen)))
            chosen = np.concatenate([chosen, self._good(stop, end, ids)])
            stop = end
        if len(chosen) > least:
            chosen = chosen[:least]
            stop = int(chosen[-1]) + 1
        places = self._places[chosen]
        self._places, self._versions = self._places[stop:], self._versions[stop:]
        return places

    def _good(self, start: int, stop: int, ids: IdArray) -> IntArray:
        """Returns the positions of found rows that have not changed and are none of `ids`."""
        places = self._places[start:stop]
        is_good = self._slab.versions(places) == self._versions[start:stop]
        if len(ids):
            own = self._slab.ids_at(places)
            at = np.minimum(np.searchsorted(ids, own), len(ids) - 1)
            is_good &= ids[at] != own
        return start + np.flatnonzero(is_good)

    def _look(self, version: int, count: int) -> None:
        """Finds the rows up to a version, and at least `count`."""
        ages = self._slab.ages()
        until = version
        count = min(self._slab.count, count + self._slab.count // SHARE) if count else 0
        if count:
            until = max(version, int(np.partition(ages, count - 1)[count - 1]))
        places = np.flatnonzero(ages <= until)
        order = np.lexsort((self._slab.ids_at(places), ages[places]))
        self._places, self._versions = places[order], ages[places][order]
        self._until = until
