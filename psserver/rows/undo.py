"""Rows as they were before a step that may not have ended: a killed process leaves whole steps.

A slab is written in place. Before a step the rows that it changes are copied one behind the other,
then a word says under which record of the journal the step began. The record that the step ends
with has another number, so what was copied counts only if the record that counts is still the one
at which the step began.

    for each slab    number of rows that are new, and of those that were there, int64; places of
                     both, int64; the rows that were there
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psserver.rows import kernels
from psserver.rows.mapped import Mapped
from psserver.rows.slab import Places, Slab

UNDER = 0  # Word: number of the journal's record at which the step began, and 2; 0: none.
OFFSET = 2  # The first number is -1.
LONG = 8


class Undo:
    """The rows before a step, of all slabs of one slice."""

    def __init__(self, memory: Mapped) -> None:
        """Keeps the rows in `memory`."""
        self._memory = memory
        self._nbytes = 0  # Bytes of the last step.

    def reserve(self) -> None:
        """Makes sure that there is room for a step like the last one.

        Raises:
            OSError: There is none.
        """
        self._memory.reserve(self._nbytes)

    def save(self, plans: Sequence[tuple[Slab, Places]], number: int) -> None:
        """Keeps the rows that a step changes, before it begins.

        Args:
            plans: The places of the step, of each slab.
            number: Number of the journal's record that counts.

        Raises:
            OSError: There is no room for them.
        """
        words = self._memory.words
        words[UNDER] = 0
        self._nbytes = sum(
            LONG * (2 + len(plan.places) + len(plan.removed)) + 4 * slab.stride * len(plan.before)
            for slab, plan in plans
        )
        self.reserve()
        offset = 0
        for slab, plan in plans:
            new, before = plan.places[plan.is_new], plan.before
            head = np.concatenate([np.array([len(new), len(before)]), new, before])
            stop = offset + head.nbytes
            self._memory.data[offset:stop].view(np.int64)[:] = head
            offset = stop + 4 * slab.stride * len(before)
            saved = self._memory.data[stop:offset].view(np.uint32)
            kernels.save(slab.words, slab.stride, before, saved)
        words[UNDER] = number + OFFSET

    def end(self) -> None:
        """Drops the rows: the step has ended."""
        self._memory.words[UNDER] = 0

    def roll_back(self, slabs: Sequence[Slab], number: int) -> bool:
        """Undoes a step that has not ended; returns whether there was one.

        Args:
            slabs: All slabs of the slice.
            number: Number of the journal's record that counts.
        """
        if self._memory.words[UNDER] != number + OFFSET:
            return False
        offset = 0
        for slab in slabs:
            counts = self._memory.data[offset : offset + 2 * LONG].view(np.int64).tolist()
            stop = offset + LONG * (2 + sum(counts))
            places = self._memory.data[offset + 2 * LONG : stop].view(np.int64)
            offset = stop + 4 * slab.stride * counts[1]
            saved = self._memory.data[stop:offset].view(np.uint32)
            kernels.vacate(slab.words, slab.stride, places[: counts[0]])
            kernels.bring_back(slab.words, slab.stride, places[counts[0] :], saved)
            slab.rebuild()
        self.end()
        return True
