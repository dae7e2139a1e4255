"""Which rows of a table are made and which go: decided at a step, from counts and versions only.

    min_count  a row is made in the step that brings its id's gradients to so many pushes; those of
               the steps before are dropped. An id that waits has a place with its count
    ttl        behind update v the rows go that were last changed at v - ttl or before, and the ids
               that have waited since then
    lru        each bucket of ids (partition.py) has its share of the rows; where a step makes more
               of them, those of the bucket go that were changed the longest ago; of equal ones
               those of the smallest ids. Rows of the step itself stay: they go with a later one

Neither time nor chance plays a part, and a bucket lies in one slice. So a step that is made again
after a kill decides as before, and any number of shards decides the same. An id that has gone
begins again as one that was never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pscore.memory.kernels import read_only
from pscore.rows.hashing import IdArray
from pscore.rows.partition import BUCKETS, buckets_of, shares_of
from pscore.rows.spec import COUNTER, WAITING_MIN, RowTable
from pscore.types import FloatArray, IntArray
from psserver.rows import kernels
from psserver.rows.mapped import Mapped
from psserver.rows.slab import NO_PLACES, Places, Slab, SummedRows

ADDING = np.array([1.0, 0.0, 1.0])  # lr, weight_decay and maximize of the sum of pushes.
SHARE = 8  # A look at all rows finds those of an eighth of the time to live, or of the rows.
NEWEST = int(kernels.NO_VERSION) - 1
ALL_BUCKETS = range(BUCKETS)
NO_IDS: IdArray = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecision:
    """The rows of a step."""

    rows: Places  # Places of the rows that the step changes, and of those that go.
    grads: FloatArray  # `(n * dim,) float32`, their gradients.
    # Places of the ids that wait, and of those that wait no more; None: none wait.
    waiting: Places | None
    times: FloatArray  # `(m,) float32`, the pushes of the step that name each id that waits.
    num_dropped: int  # Gradients of rows that are not made: one of each push.

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
        waiting: The ids that wait, with their counts; None: every id has a row at once.
        removes: Whether rows may go.
    """

    def __init__(
        self,
        table: RowTable,
        slab: Slab,
        waiting: Slab | None = None,
        buckets: range = ALL_BUCKETS,
        room: int = 0,
    ) -> None:
        """Decides as `table` declares.

        Args:
            waiting: The ids that wait; None: none do.
            room: Most ids that wait, in all buckets of all slices.
        """
        self.slab, self.waiting = slab, waiting
        self._min_count, self._ttl, self._has_lru = table.min_count, table.ttl, table.lru > 0
        self.removes = self._ttl > 0 or self._has_lru
        self._shares = shares_of(table.lru, buckets)
        shares = self._shares if self._has_lru else None
        self._oldest = Oldest(slab, table, buckets, shares)
        self._oldest_waiting = None
        if waiting is not None:
            shares = shares_of(room, buckets, WAITING_MIN)
            self._oldest_waiting = Oldest(waiting, table, buckets, shares)

    @property
    def slabs(self) -> list[Slab]:
        """The rows, and the ids that wait if there may be some."""
        return [self.slab] if self.waiting is None else [self.slab, self.waiting]

    def decide(
        self, rows: SummedRows, places: IntArray, version: int, *, at_once: bool = False
    ) -> RowDecision:
        """Returns the rows of a step; nothing is changed yet.

        Args:
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
        removed = NO_PLACES
        if self.removes:
            last = version - self._ttl if self._ttl else -1
            removed = self._oldest.take(last, ids, ids[places < 0])
        return RowDecision(
            rows=self.slab.plan(ids, removed, places),
            grads=grads,
            waiting=waiting,
            times=counted,
            num_dropped=num_dropped,
        )

    def count(self, decision: RowDecision, version: int) -> None:
        """Counts the rows, and the pushes of ids that wait, in a step that has begun."""
        self._oldest.note()
        if self.waiting is not None and decision.waiting is not None:
            assert self._oldest_waiting is not None
            self._oldest_waiting.note()
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
        if (wanted := self.slab.count + sum(map(len, pushes))) <= self.slab.rows_max:
            return wanted
        if not self._has_lru:
            pushes = [ids[self.slab.find(ids) < 0] for ids in pushes]
        ids, times = np.unique(np.concatenate(pushes), return_counts=True)
        made = ids[(self.slab.find(ids) >= 0) | self.admits(ids, times)]
        if not self._has_lru:
            return self.slab.count + len(made)
        return int(np.maximum(self._shares, self._oldest.count(made)).sum())

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
        made, is_fresh = is_made & (places >= 0), ~is_made & (places < 0)
        last = version - self._ttl if self._ttl else -1
        gone = oldest.take(last, ids, ids[is_fresh], ids[made])
        is_waiting = ~is_made
        is_waiting[is_fresh] = ~oldest.leave_out(ids[is_fresh])
        removed = np.concatenate([places[made], gone])
        plan = slab.plan(ids[is_waiting], removed, places[is_waiting])
        return plan, times[is_waiting].astype(np.float32)


def make_waiting(rows_max: int, table: RowTable, memory: Mapped) -> Slab:
    """Returns a slab for the ids of a table that wait for their rows."""
    return Slab(1, rows_max, COUNTER, RowTable(seed=table.seed, init="zeros"), memory)


class Oldest:
    """The rows of a slice by bucket, in the order of their last change, as far as it is known.

    A look at all rows finds more than are needed at once. A row that changes afterwards is no
    longer of the version that was found, so what was found stays right.
    """

    def __init__(
        self, slab: Slab, table: RowTable, buckets: range, shares: IntArray | None
    ) -> None:
        """Knows nothing yet.

        Args:
            table: The declaration: with a time to live rows are needed by their versions.
            shares: `(len(buckets),) int64`, most rows of each bucket; None: there is no bound.
        """
        self._slab, self._shares, self._ahead = slab, shares, table.ttl // SHARE
        self._seed, self._buckets = table.seed, buckets
        self._kept: IntArray = NO_PLACES  # Rows of each bucket after the step that is decided.
        self.forget()

    def forget(self) -> None:
        """Forgets all rows."""
        none = np.zeros(len(self._buckets), np.int64)
        self._found = kernels.OldestRows(none, none, NO_PLACES, NO_PLACES)
        self._until = -1  # Every row of a version up to this one was found.
        self._held: IntArray | None = None  # Rows of each bucket; None: they are not counted.

    def count(self, ids: IdArray) -> IntArray:
        """Returns how many ids each bucket has, `(num_buckets,) int64`."""
        counts: IntArray = np.bincount(self._numbers_of(ids), minlength=len(self._buckets))
        return counts

    def take(self, version: int, ids: IdArray, fresh: IdArray, made: IdArray = NO_IDS) -> IntArray:
        """Returns the places of rows that go, by bucket; then they are no longer known.

        Args:
            version: All rows that were last changed at this one or before go.
            ids: `(n,) uint64`, ascending: the step's, whose rows do not go.
            fresh: Those of which the step makes a row.
            made: Those whose row goes in any case.
        """
        surplus = np.zeros(len(self._buckets), np.int64)
        if self._shares is not None:
            if self._held is None:
                self._held = self.count(self._slab.rows()[0])
            self._kept = self._held - self.count(made) + self.count(fresh)
            surplus = np.maximum(self._kept - self._shares, 0)
        if version > self._until:
            self._look(version + self._ahead)
        found, is_short = self._pop(version, surplus.copy(), ids)
        for count in (2 * int(surplus.sum()) + self._slab.count // SHARE, self._slab.count):
            if is_short:
                self._look(max(version, self._until_of(count)))
                found, is_short = self._pop(version, surplus.copy(), ids)
        if self._shares is not None:
            self._kept -= self.count(self._slab.ids_at(found))
        return found

    def leave_out(self, fresh: IdArray) -> np.ndarray:
        """Returns which of the rows to be made have no room, `(n,) bool`; they are not made.

        Args:
            fresh: `(n,) uint64`, ascending, those of the last `take`; the smallest have room.
        """
        if self._shares is None:
            return np.zeros(len(fresh), np.bool_)
        numbers = self._numbers_of(fresh)
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        rank = np.arange(len(fresh)) - np.searchsorted(ordered, ordered)
        room = (self._shares - self._kept + self.count(fresh))[ordered]
        is_out = np.zeros(len(fresh), np.bool_)
        is_out[order] = rank >= room
        self._kept -= self.count(fresh[is_out])
        return is_out

    def note(self) -> None:
        """Counts the rows of the step that was decided last: it has begun."""
        if self._shares is not None:
            self._held = self._kept

    def _numbers_of(self, ids: IdArray) -> IntArray:
        """Returns the bucket of each id, counted from the slice's first."""
        return buckets_of(ids, self._seed) - self._buckets.start

    def _pop(self, version: int, surplus: IntArray, ids: IdArray) -> tuple[IntArray, bool]:
        """Returns places of rows that go, and whether a bucket may have more to give."""
        out, slab = np.empty(len(self._found.places), np.int64), self._slab.arrays
        count = kernels.take_oldest(slab, self._found, surplus, version, read_only(ids), out)
        return out[:count], bool((surplus > 0).any())

    def _until_of(self, count: int) -> int:
        """Returns the version up to which there are `count` rows."""
        ages = self._slab.ages()
        return int(np.partition(ages, count)[count]) if count < self._slab.count else NEWEST

    def _look(self, until: int) -> None:
        """Finds the rows up to a version."""
        ages = self._slab.ages()
        until = min(until, int(ages[ages < kernels.NO_VERSION].max(initial=-1)))
        places = np.flatnonzero(ages <= until)
        ids = self._slab.ids_at(places)
        numbers = self._numbers_of(ids)
        order = np.lexsort((ids, ages[places], numbers))
        edges = np.searchsorted(numbers[order], np.arange(len(self._buckets) + 1))
        self._found = kernels.OldestRows(
            heads=edges[:-1].copy(),
            stops=edges[1:],
            places=places[order],
            versions=ages[places][order],
        )
        self._until = until  # Rows that change from now on are of later versions.
