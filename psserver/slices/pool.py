"""Reusable arrays of one slice's size: on the heap, or in an arena that outlives the process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from pscore.types import ByteArray, FloatArray
from psserver.slices.arena import Arena

NUMBERS = (1, 2)  # Numbers of the buffers of a slice in the segment that workers map.


class Cell:
    """Memory for one array of a slice."""

    __slots__ = ("array", "data", "place")

    def __init__(self, data: ByteArray, numel: int, place: int = 0) -> None:
        """Wraps `data`, of at least `4 * numel` bytes."""
        self.data = data  # `(nbytes,) uint8`.
        # `(numel,) float32`, the beginning of it.
        self.array: FloatArray = data[: 4 * numel].view(np.float32)
        self.place = place  # In the arena; 0 on the heap.


class Buffer:
    """One copy of the weights, and how many readers still send from it."""

    __slots__ = ("array", "cell", "leases", "number")

    def __init__(self, array: FloatArray, number: int, cell: Cell | None = None) -> None:
        """Wraps an array; `number` is 1 or 2 in the table's segment, 0 outside."""
        self.array = array
        self.leases = 0
        self.number = number
        self.cell = cell

    @property
    def place(self) -> int:
        """Its name in the journal."""
        return self.number or (0 if self.cell is None else self.cell.place)


class Pool:
    """Cells of one size that are given and taken; on the heap."""

    def __init__(self, numel: int, nbytes: int) -> None:
        """Makes cells of `nbytes`, for arrays of `numel`."""
        self.cell_nbytes = max(nbytes, 4 * numel)  # Bytes of one cell.
        self.places: list[int] = []  # Places of all cells, in use or free; each 0 on the heap.
        self._numel = numel
        self._free: list[Cell] = []

    def take(self) -> Cell:
        """Returns the cell that came back last, or a new one of zeros.

        Raises:
            OSError: There is no room for it on the disk.
        """
        if not self._free:
            self.grow(len(self.places) + 1)
        return self._free.pop()

    def grow(self, count: int) -> None:
        """Makes cells until there are `count`; raises an `OSError` if there is no room for them."""
        while len(self.places) < count:
            cell = self._make()
            self.places.append(cell.place)
            self._free.append(cell)

    def give(self, cell: Cell) -> None:
        """Returns a cell to the pool."""
        self._free.append(cell)

    @property
    def num_used(self) -> int:
        """Number of cells in use."""
        return len(self.places) - len(self._free)

    def poison_free(self) -> None:
        """Fills free cells with NaN, for tests and the simulator."""
        for cell in self._free:
            cell.array.fill(np.nan)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells, in use or free."""
        return len(self.places) * self.cell_nbytes

    def _make(self) -> Cell:
        return Cell(np.zeros(self.cell_nbytes, dtype=np.uint8), self._numel)


class CellSource(Protocol):
    """A pool, or a journal whose cells outlive the process."""

    def give(self, cell: Cell) -> None:
        """Returns a cell to the pool."""


def give(source: CellSource, *cells: Cell | None) -> None:
    """Returns cells to their pool; None is skipped."""
    for cell in cells:
        if cell is not None:
            source.give(cell)


class Scratch:
    """Arrays for short use: the one that was returned last is most likely in the cache."""

    def __init__(self) -> None:
        self._free: list[FloatArray] = []

    @contextmanager
    def borrow(self, numel: int) -> Iterator[FloatArray]:
        """Yields `(numel,) float32` with arbitrary contents; may be called from any thread."""
        try:
            array = self._free.pop()
        except IndexError:
            array = np.empty(numel, np.float32)
        if len(array) < numel:
            array = np.empty(numel, np.float32)
        try:
            yield array[:numel]
        finally:
            self._free.append(array)


class ArenaPool(Pool):
    """Cells in an arena, which a later process finds again."""

    def __init__(self, arena: Arena, numel: int, nbytes: int) -> None:
        """Makes cells of `nbytes`, for arrays of `numel`."""
        super().__init__(numel, nbytes)
        self._arena = arena

    def at(self, place: int) -> Cell:
        """Returns the cell at a place; raises ValueError if there is no such place."""
        return Cell(self._arena.bytes_at(place, self.cell_nbytes), self._numel, place)

    def adopt(self, places: list[int], used: set[int]) -> None:
        """Restores the cells of a killed process; those in `used` are in use."""
        self.places = places
        self._free = [self.at(place) for place in places if place not in used]

    def spans(self, used: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yields place and bytes of all that a later process needs, if it uses those in `used`."""
        for place in used:
            yield place, self.cell_nbytes

    def _make(self) -> Cell:
        return self.at(self._arena.allocate(self.cell_nbytes))
