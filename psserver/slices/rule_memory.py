"""The memory of a rule for one slice between pushes: backups of weights, running means."""

from __future__ import annotations

import numpy as np

from pscore.rules.base import Memory
from pscore.types import FloatArray
from psserver.slices.journal import SliceJournal
from psserver.slices.pool import Pool


class RuleMemory:
    """The memory of a slice's rule; empty until the rule asks for it."""

    def __init__(self, pool: Pool | SliceJournal) -> None:
        """Starts empty.

        Args:
            pool: A journal if the memory outlives the process.
        """
        self._pool = pool
        self._memory: Memory | None = None

    @property
    def arrays(self) -> dict[str, FloatArray]:
        """The remembered arrays, by name."""
        return {} if self._memory is None else self._memory.state

    def at(self, weights: FloatArray) -> Memory:
        """Returns the memory, to be used with `weights`, `(numel,) float32`."""
        if self._memory is None:
            self._memory = Memory(weights=weights)
        self._memory.weights = weights
        return self._memory

    def write(self) -> None:
        """Moves new arrays to where they outlive the process, if there is a journal.

        From then on they are changed in place: a kill in the middle leaves a part changed. An array
        is a backup of weights, copied again when the worker asks again, or a running mean.
        """
        if not isinstance(self._pool, SliceJournal) or self._memory is None:
            return
        for name, array in self._memory.state.items():
            if name not in self._pool.record.memory:
                self._move(self._pool, name, array)

    def move(self, journal: SliceJournal) -> None:
        """Moves the arrays that lie on the heap into the arena, where there is room again."""
        for name, array in self.arrays.items():
            if not journal.record.memory[name]:
                self._move(journal, name, array)

    def _move(self, journal: SliceJournal, name: str, array: FloatArray) -> None:
        cell = journal.take()
        np.copyto(cell.array, array)
        self.arrays[name] = cell.array
        journal.record.memory[name] = cell.place

    def recover(self, weights: FloatArray) -> None:
        """Restores the arrays that the journal names."""
        assert isinstance(self._pool, SliceJournal)
        if self._pool.record.memory:
            memory = self.at(weights)
            for name, place in self._pool.record.memory.items():
                memory.state[name] = self._pool.pool.at(place).array

    def clear(self) -> None:
        """Forgets everything: the rule has changed."""
        self._memory = None
