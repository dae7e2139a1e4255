"""Rows as they were before a step that may not have ended: a killed process leaves whole steps.

A slab is written in place. Before a step the rows that it changes are copied one behind the other,
then a word says under which record of the journal the step began. The record that the step ends
with has another number, so what was copied counts only if the record that counts is still the one
at which the step began.

The rows that a step of the optimizer changes are copied in blocks, each just before its change: so
they come from memory once. Another word says how many of them are not copied yet.

    for each slab    number of rows that are new, and of those that were there, int64; places of
                     both, int64; the rows that were there. If some are copied later, the second
                     number is -1 - n, and a third one says how many, the first of them
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pscore.types import IntArray
from psserver.rows import kernels
from psserver.rows.kernels import WordArray
from psserver.rows.mapped import Mapped
from psserver.rows.slab import Places, Slab

UNDER = 0  # Word: number of the journal's record at which the step began, and 2; 0: none.
OFFSET = 2  # The first number is -1.
OPEN = 1  # Word: rows that are not copied yet, the last ones of those that are copied later.
LONG = 8


class Undo:
    """The rows before a step, of all slabs of one slice."""

    def __init__(self, memory: Mapped) -> None:
        self._memory = memory
        self._nbytes = 0  # Bytes of the last step.
        # Of slabs whose rows are copied later: the slab, their places, and the room for them.
        self._later: dict[int, tuple[Slab, IntArray, WordArray]] = {}

    def reserve(self) -> None:
        """Reserves room for a step like the last one; raises OSError if there is none."""
        self._memory.reserve(self._nbytes)

    def save(
        self, plans: Sequence[tuple[Slab, Places]], number: int, later: Collection[int] = ()
    ) -> None:
        """Keeps the rows that a step changes, before it begins.

        Args:
            plans: The places of the step, of each slab.
            number: Number of the journal's record that counts.
            later: Numbers of the slabs whose rows that stay `keep` copies, in their order.

        Raises:
            OSError: There is no room for them.
        """
        words = self._memory.words
        words[UNDER] = 0
        firsts = [
            len(plan.before) - len(plan.removed) if index in later else 0
            for index, (_, plan) in enumerate(plans)
        ]
        self._nbytes = sum(
            LONG * (2 + (first > 0) + len(plan.places) + len(plan.removed))
            + 4 * slab.stride * len(plan.before)
            for (slab, plan), first in zip(plans, firsts, strict=True)
        )
        self.reserve()
        offset, self._later, words[OPEN] = 0, {}, 0
        for index, ((slab, plan), first) in enumerate(zip(plans, firsts, strict=True)):
            new, before = plan.places[plan.is_new], plan.before
            counts = [len(new), -1 - len(before), first] if first else [len(new), len(before)]
            head = np.concatenate([np.array(counts), new, before])
            stop = offset + head.nbytes
            self._memory.data[offset:stop].view(np.int64)[:] = head
            offset = stop + 4 * slab.stride * len(before)
            saved = self._memory.data[stop:offset].view(np.uint32)
            kernels.save(slab.words, slab.stride, before[first:], saved[first * slab.stride :])
            if first:
                self._later[index] = slab, before[:first], saved
                words[OPEN] += first
        words[UNDER] = number + OFFSET

    def keep(self, index: int, start: int, stop: int) -> None:
        """Copies rows of a slab that stay, from the `start`-th to before the `stop`-th."""
        if index in self._later:
            slab, places, saved = self._later[index]
            part = saved[start * slab.stride : stop * slab.stride]
            kernels.save(slab.words, slab.stride, places[start:stop], part)
            self._memory.words[OPEN] -= stop - start

    def end(self) -> None:
        """Drops the rows: the step has ended."""
        self._memory.words[UNDER] = 0

    def roll_back(self, slabs: Sequence[Slab], number: int) -> bool:
        """Undoes a step that has not ended; returns whether there was one.

        Args:
            number: Number of the journal's record that counts.
        """
        if self._memory.words[UNDER] != number + OFFSET:
            return False
        offset = 0
        found: list[tuple[Slab, IntArray, IntArray, WordArray, int]] = []
        for slab in slabs:
            counts = self._memory.data[offset : offset + 3 * LONG].view(np.int64).tolist()
            is_later = counts[1] < 0
            num_new, num_before = counts[0], -1 - counts[1] if is_later else counts[1]
            begin = offset + LONG * (3 if is_later else 2)
            stop = begin + LONG * (num_new + num_before)
            places = self._memory.data[begin:stop].view(np.int64)
            offset = stop + 4 * slab.stride * num_before
            saved = self._memory.data[stop:offset].view(np.uint32)
            first = counts[2] if is_later else 0
            found.append((slab, places[:num_new], places[num_new:], saved, first))
        left = sum(first for *_, first in found) - int(self._memory.words[OPEN])
        for slab, new, before, saved, first in found:
            kept, left = min(first, left), max(0, left - first)
            kernels.vacate(slab.words, slab.stride, new)
            kernels.bring_back(slab.words, slab.stride, before[:kept], saved)
            kernels.bring_back(
                slab.words, slab.stride, before[first:], saved[first * slab.stride :]
            )
            slab.rebuild()
        self.end()
        return True
