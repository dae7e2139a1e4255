"""Memory for payloads of any length in the arena of a job's journal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from psserver.slices.arena import LINE, Arena
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import ArenaPool, Cell

CELL_MIN = 12  # The smallest cell has 2^12 bytes.
MARK = 0x504C43454C4C0000


class SizedPool(ArenaPool):
    """Cells of 2^k bytes; each says its k, so that a later process knows it."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, 0, 1 << CELL_MIN)
        self._free_of: dict[int, list[Cell]] = {}
        self._nbytes_in_all = 0

    def take_for(self, nbytes: int) -> Cell:
        """Returns a cell of at least `nbytes`, with arbitrary contents.

        Raises:
            OSError: There is no room for it on the disk.
        """
        size = max(CELL_MIN, (max(nbytes, 1) - 1).bit_length())
        free = self._free_of.setdefault(size, [])
        if free:
            return free.pop()
        place = self._arena.allocate(LINE + (1 << size))
        self._arena.integers_at(place, 1)[0] = MARK + size
        self.places.append(place)
        self._nbytes_in_all += 1 << size
        return self.at(place)

    def give(self, cell: Cell) -> None:
        """Returns a cell to the pool."""
        self._free_of.setdefault(len(cell.data).bit_length() - 1, []).append(cell)

    def at(self, place: int) -> Cell:
        """Returns the cell at a place; raises ValueError if there is no such place."""
        size = int(self._arena.integers_at(place, 1)[0]) - MARK
        if not CELL_MIN <= size <= 40:  # noqa: PLR2004
            raise ValueError("the place of a payload of a row slice is damaged")
        return Cell(self._arena.bytes_at(place, LINE + (1 << size))[LINE:], 0, place)

    def adopt(self, places: list[int], used: set[int]) -> None:
        """Restores the cells of a killed process; those in `used` are in use."""
        self.places = places
        cells = [self.at(place) for place in places]
        self._nbytes_in_all = sum(len(cell.data) for cell in cells)
        for cell in cells:
            if cell.place not in used:
                self.give(cell)

    def spans(self, used: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yields place and bytes of the cells in `used`, and of the sizes of the others."""
        for place in self.places:
            yield place, LINE + (len(self.at(place).data) if place in used else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells, in use or free."""
        return self._nbytes_in_all


class RowJournal(SliceJournal):
    """The journal of a row slice: payloads of any length, and rows in files of their own."""

    def __init__(self, arena: Arena, root: int, num_segments: int) -> None:
        """Begins at a root of zeros, or resumes from the records of a killed process.

        Raises:
            ValueError: The root or its record is damaged.
            OSError: There is no room on the disk.
        """
        self.arena = arena
        self._sized = SizedPool(arena)
        super().__init__(arena, root, 0, 0, num_segments, self._sized)

    def take_for(self, nbytes: int) -> Cell:
        """Returns memory for a payload; if the disk is full, on the heap, and the journal ends."""
        if self._takes:
            try:
                return self._sized.take_for(nbytes)
            except OSError as problem:
                self._give_up(problem)
        return Cell(np.empty(nbytes, np.uint8), 0)

    def give(self, cell: Cell) -> None:
        """Returns a cell to its pool."""
        if cell.place:
            self._sized.give(cell)

    def give_up(self, problem: OSError) -> None:
        """Continues without a journal, because there is no room for it."""
        self._give_up(problem)

    def move_all(self, key: int, cells: Sequence[Cell]) -> None:
        """Records that the payloads of an open step, in their order, are elsewhere now."""
        for open_step in self.record.open_steps:
            if open_step.key == key:
                for entry, cell in zip(open_step.added, cells, strict=True):
                    entry.place = cell.place
                open_step.place = cells[-1].place

    def _take_like(self, cell: Cell) -> Cell:
        """Returns memory for as many bytes as a cell has."""
        return self.take_for(cell.data.nbytes)

    def _places(self) -> list[int]:
        """Returns the places of all arrays; each payload of an open step is one."""
        added = (entry.place for step in self.record.open_steps for entry in step.added)
        return [*super()._places(), *added]
