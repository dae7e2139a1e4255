"""The rows of one row table in one slice: places in a slab, and the index that finds them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pscore.memory.kernels import read_only
from pscore.rows.hashing import IdArray
from pscore.rows.init import make_init
from pscore.rows.optimizers import FRESH, KNOWN, NEW, USED, RowOptimizer, RowStep
from pscore.rows.spec import FLOAT_NBYTES, RowTable, stride_of
from pscore.types import FloatArray, HyperArray, IntArray
from psserver.rows import kernels
from psserver.rows.mapped import Mapped

INDEX_MIN = 1 << 10
HIGH = 0  # Word of the slab's file: no place from this one on was ever used.
NO_PLACES: IntArray = np.empty(0, np.int64)
BLOCK = 4096  # Rows that are changed at once: their copies for an undo are still in the cache.
NO_PUSH = np.empty(0, np.uint64), np.empty(0, np.float32), 1.0


Keep = Callable[[int, int], None]


def keep_nothing(start: int, stop: int) -> None:
    """Does nothing: no step is undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a step's rows."""

    ids: IdArray  # `(n,) uint64`, ascending.
    places: IntArray  # `(n,) int64`.
    is_new: np.ndarray  # `(n,) bool`.
    removed: IntArray  # Places of the rows that are given up.

    @property
    def before(self) -> IntArray:
        """The places whose rows the step changes or gives up."""
        return np.concatenate([self.places[~self.is_new], self.removed])


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlaces:
    """The places of some ids, as they were found once.

    A row stays at its place until it goes, so they are right as long as none has gone; where an id
    had none it may have one now.
    """

    ids: IdArray  # `(n,) uint64`, ascending.
    places: IntArray  # `(n,) int64`, or -1.
    num_gone: int  # Rows that had gone from the slab.

    def are_of(self, ids: IdArray) -> bool:
        """Returns whether these are the ids."""
        return len(ids) == len(self.ids) and bool((ids == self.ids).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedRows:
    """The rows that pushes name."""

    ids: IdArray  # `(n,) uint64`, ascending.
    values: FloatArray  # `(n * dim,) float32`, the weighted sum of the rows of each.
    times: FloatArray  # `(n,) float32`, the pushes that name each.
    at: Sequence[IntArray | slice]  # By push: the positions of its ids among them.


class Slab:
    """Rows with their state, each at a place of its own.

    Attributes:
        count: Rows.
        num_gone: Rows that have gone since the process began.
    """

    def __init__(
        self, dim: int, rows_max: int, optimizer: RowOptimizer, table: RowTable, memory: Mapped
    ) -> None:
        """Starts with the rows in `memory`.

        Args:
            memory: `rows_max` places.
        """
        self.dim, self.rows_max, self._optimizer = dim, rows_max, optimizer
        self.width = optimizer.width(dim)
        self.stride = stride_of(optimizer, dim) // FLOAT_NBYTES
        self.init = make_init(table.init, table.seed, table.max_norm)
        self.memory = memory
        self.floats: FloatArray = memory.data.view(np.float32)
        self.words = memory.data.view(np.uint32)
        self.longs: IdArray = memory.data.view(np.uint64)
        # Positions in the index depend on a number that nobody else knows, and rows do not: else
        # ids could be chosen that all have one position.
        self._salt = np.uint64(secrets.randbits(64))
        self._keys: IdArray = np.zeros(INDEX_MIN, np.uint64)
        self._places = np.zeros(INDEX_MIN, np.int32)
        # By group of places: the newest version of a row that has changed since the process began.
        self._newest = np.zeros(-(-rows_max // kernels.GROUP), np.uint32)
        self._free: IntArray = NO_PLACES
        self.count = self.num_gone = 0
        self.rebuild()

    @property
    def nbytes(self) -> int:
        """Bytes of the places that were used, of the index, and of the notes of changes."""
        high = int(self.memory.words[HIGH])
        found = self._keys.nbytes + self._places.nbytes + self._newest.nbytes
        return 4 * self.stride * high + found

    @property
    def high(self) -> int:
        """No place from this one on was ever used."""
        return int(self.memory.words[HIGH])

    def rebuild(self) -> None:
        """Makes the index of the headers in the slab."""
        ids, places = self.rows()
        self.count = len(ids)
        is_used = np.zeros(int(self.memory.words[HIGH]), np.bool_)
        is_used[places] = True
        self._free = np.flatnonzero(~is_used)[::-1]
        self._index(ids, places)

    def reserve(self, count: int) -> None:
        """Reserves space for `count` rows; raises OSError if the disk is full."""
        highest = min(max(count, int(self.memory.words[HIGH])), self.rows_max)
        self.memory.reserve(4 * self.stride * highest)

    def find(self, ids: IdArray) -> IntArray:
        """Returns the place of each id, `(n,) int64`, or -1."""
        out = np.empty(len(ids), np.int64)
        keys, places = self._keys, self._places
        kernels.find(keys, places, self._salt, read_only(ids), out)
        return out

    def find_summed(self, rows: SummedRows, found: Sequence[FoundPlaces | None]) -> IntArray:
        """Returns the place of each row that pushes name, `(n,) int64`, or -1.

        Args:
            found: By push: places that were found before, of these ids or others; None: none were.
        """
        places = np.full(len(rows.ids), -1, np.int64)
        for at, known in zip(rows.at, found, strict=False):
            is_right = known is not None and known.num_gone == self.num_gone
            if known is not None and is_right and known.are_of(rows.ids[at]):
                places[at] = np.maximum(places[at], known.places)
        is_open = places < 0
        if is_open.any():
            places[is_open] = self.find(rows.ids[is_open])
        return places

    def plan(
        self, ids: IdArray, removed: IntArray = NO_PLACES, found: IntArray | None = None
    ) -> Places:
        """Returns places for ids; nothing is changed yet.

        Args:
            ids: `(n,) uint64`, ascending.
            removed: Places of rows that are given up before; none is of one of `ids`.
            found: `(n,) int64`, the result of `find` for them; None: they are looked for.
        """
        places = self.find(ids) if found is None else found
        is_new = places < 0
        wanted = int(is_new.sum())
        if wanted:
            free = np.concatenate([self._free, removed[::-1]])
            reused = free[len(free) - min(wanted, len(free)) :][::-1]
            high = int(self.memory.words[HIGH])
            fresh = np.arange(high, high + wanted - len(reused))
            places = places.copy()
            places[is_new] = np.concatenate([reused, fresh])
        return Places(ids=ids, places=places, is_new=is_new, removed=removed)

    def begin(self, plan: Places) -> None:
        """Makes the places of a plan those of its ids; their rows are not written yet."""
        if len(plan.removed):
            gone = self.ids_at(plan.removed)
            kernels.remove(self._keys, self._places, self._salt, gone)
            kernels.vacate(self.words, self.stride, plan.removed)
            self._free = np.concatenate([self._free, plan.removed[::-1]])
            self.num_gone += len(plan.removed)
        new, ids = plan.places[plan.is_new], plan.ids[plan.is_new]
        self.count += len(new) - len(plan.removed)
        if not len(new):
            return
        high = int(self.memory.words[HIGH])
        reused = int((new < high).sum())
        self._free = self._free[: len(self._free) - reused]
        highest = max(high, int(new.max()) + 1)
        self.memory.reserve(4 * self.stride * highest)
        self.memory.words[HIGH] = highest
        kernels.occupy(self.longs, self.words, self.stride, new, ids)
        if 2 * self.count > len(self._keys):
            self._index(*self.rows())
        else:
            kernels.put(self._keys, self._places, self._salt, ids, new)

    def step(
        self,
        plan: Places,
        grads: FloatArray,
        scale: float,
        version: int,
        t: int,
        hyper: HyperArray,
        keep: Keep = keep_nothing,
    ) -> None:
        """Makes a step of the optimizer on the rows of a plan that has begun, block by block.

        Args:
            grads: `(n * dim,) float32`, sums of gradients.
            version: Version of the rows after it.
            t: Steps of the table with this one.
            hyper: `(num_hyper,) float64`.
            keep: Called before each block with the range of its rows among those that were there.
        """
        begins = np.where(plan.is_new, np.uint8(NEW), np.uint8(KNOWN))
        known = np.cumsum(~plan.is_new)
        ids, grads = read_only(plan.ids), read_only(grads)
        first_state = np.float32(self._optimizer.first_state(hyper))
        kept = 0
        for start in range(0, len(plan.places), BLOCK):
            block = slice(start, start + BLOCK)
            places, own = plan.places[block], begins[block]
            stop = int(known[start + len(places) - 1])
            keep(kept, stop)
            kept = stop
            kernels.is_fresh(self.words, self.stride, places, own)
            kernels.note_change(self._newest, places, np.uint32(version))
            step = RowStep(
                floats=self.floats,
                words=self.words,
                stride=self.stride,
                dim=self.dim,
                width=self.width,
                places=places,
                begins=own,
                ids=ids[block],
                grads=grads[start * self.dim : (start + BLOCK) * self.dim],
                scale=np.float32(scale),
                version=np.uint32(version),
                init=self.init,
                first_state=first_state,
            )
            self._optimizer.step(step, t, hyper)

    def load(self, plan: Places, values: FloatArray, width: int, versions: IntArray) -> None:
        """Sets the rows of a plan that has begun: weights, or weights and state.

        Args:
            values: `(n * width,) float32`.
            width: Numbers of a row: `dim` or `self.width`.
            versions: `(n,) int64`, the version of each row.
        """
        flags = USED if width == self.width else USED | FRESH
        kernels.note_change(self._newest, plan.places, np.uint32(versions.max(initial=0)))
        kernels.load(
            self.floats,
            self.words,
            self.stride,
            plan.places,
            read_only(values),
            width,
            read_only(versions),
            np.uint32(flags),
        )

    def read(self, ids: IdArray, places: IntArray, width: int, out: FloatArray) -> None:
        """Writes rows, `(n * width,) float32`; those without a place are as they begin."""
        kernels.gather(
            self.floats, self.stride, self.dim, width, places, read_only(ids), self.init, out
        )

    def versions(self, places: IntArray) -> IntArray:
        """Returns the version of each place, -1 where there is none."""
        out = np.empty(len(places), np.int64)
        kernels.versions_of(self.words, self.stride, places, out)
        return out

    def ages(self) -> IntArray:
        """Returns the version of each place, the largest uint32 for a free one."""
        out = np.empty(int(self.memory.words[HIGH]), np.int64)
        kernels.ages(self.words, self.stride, out)
        return out

    def ids_at(self, places: IntArray) -> IdArray:
        """Returns the id at each place."""
        return self.longs[places * self.stride // 2]

    def rows(self) -> tuple[IdArray, IntArray]:
        """Returns the ids of all rows and their places, in the order of the places."""
        high = int(self.memory.words[HIGH])
        ids, places = np.empty(high, np.uint64), np.empty(high, np.int64)
        if not high:  # A new table, which is made under the lock of all jobs: compiles nothing.
            return ids, places
        found = kernels.scan(self.longs, self.words, self.stride, high, ids, places)
        return ids[:found], places[:found]

    def groups_since(self, version: int) -> IntArray:
        """Returns the groups of places of which a row may have changed after a version.

        Args:
            version: Not before that with which this process began.
        """
        return np.flatnonzero(self._newest > version)

    @property
    def arrays(self) -> kernels.SlabArrays:
        """The memory, as loops take it."""
        return kernels.SlabArrays(self.floats, self.words, self.longs, self.stride)

    def copy_range(self, start: int, stop: int, copied: kernels.CopiedRows) -> None:
        """Copies the rows of places in a range, as `kernels.copy_range`."""
        kernels.copy_range(self.arrays, self._newest, start, stop, copied)

    def check_invariants(self) -> None:
        """Asserts that index and slab are one to one, for tests and the simulator."""
        ids, places = self.rows()
        np.testing.assert_array_equal(self.find(ids), places)
        assert len(ids) == self.count == int((self._places != 0).sum())
        assert len(np.unique(ids)) == len(ids)
        assert self.count <= self.rows_max
        taken = np.concatenate([places, self._free])
        assert sorted(taken.tolist()) == list(range(int(self.memory.words[HIGH])))

    @property
    def probe_max(self) -> int:
        """The longest way to a row in the index, in positions."""
        return int(kernels.probe_max(self._keys, self._places, self._salt))

    def _index(self, ids: IdArray, places: IntArray) -> None:
        size = INDEX_MIN
        while size < 2 * len(ids):
            size *= 2
        keys, taken = np.zeros(size, np.uint64), np.zeros(size, np.int32)
        if len(ids):
            kernels.put(keys, taken, self._salt, ids, places)
        self._keys, self._places = keys, taken


def sum_up(pushes: Sequence[tuple[IdArray, FloatArray, float]], dim: int) -> SummedRows:
    """Returns the rows that pushes name.

    Args:
        pushes: Ids, `(n * dim,) float32` and weight of each push, in the order of the ranks.
    """
    given = [push for push in pushes if len(push[0])] or [NO_PUSH]
    if len(given) == 1 and given[0][2] == 1.0:
        ids, values, _ = given[0]
        at = [slice(None) if len(own) else slice(0) for own, _, _ in pushes]
        return SummedRows(ids=ids, values=values, times=np.ones(len(ids), np.float32), at=at)
    ids = np.concatenate([each for each, _, _ in pushes])
    starts = np.cumsum([0, *(len(each) for each, _, _ in pushes)])
    union, places = np.empty(len(ids), np.uint64), np.empty(len(ids), np.int64)
    count = kernels.merge(ids, starts, union, places)
    out = np.empty(count * dim, np.float32)
    addresses = np.array([values.ctypes.data for _, values, _ in pushes], np.int64)
    scales = np.array([weight for _, _, weight in pushes], np.float32)
    kernels.add_up(addresses, starts, places, scales, dim, out)
    return SummedRows(
        ids=union[:count],
        values=out,
        times=np.bincount(places, minlength=count).astype(np.float32),
        at=[places[start:stop] for start, stop in itertools.pairwise(starts.tolist())],
    )
