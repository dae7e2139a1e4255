"""Counts one worker's pushes by slice, for the step of its next push and for its pulls."""

from __future__ import annotations

from collections.abc import Sequence

from pscore.local.base import LocalSlice
from pscore.rules.base import Rule


class Clocks:
    """The push counts of a replica's slices.

    Attributes:
        rule: The mode.
        counts: For each slice, one more than the `step` of its last push on the wire: pushes made
            so far, or more where steps have closed without this worker. Replaced or changed only
            by this class.
        limit: The next push of all slices, where several processes are one worker, or once pulls of
            the step under way have begun to be applied; None: not known yet, or not fixed yet.
    """

    def __init__(
        self, rule: Rule, parts: Sequence[LocalSlice], own: Sequence[int] | None = None
    ) -> None:
        """Starts before the first push.

        Args:
            rule: The mode.
            parts: The slices; their versions decide from where a late worker continues.
            own: The slices that this process pushes and pulls; None, or none: all.
        """
        self.rule = rule
        self.counts = [0] * len(parts)
        self.limit: int | None = None
        self._parts = parts
        self._own = list(own or range(len(parts)))
        # Caches in a mode by step, for all slices; None after a change of a slice.
        self._oldest: int | None = None
        self._next: int | None = None

    def count(self, index: int) -> int:
        """Returns the number of this worker's pushes that a pull of a slice has to wait for."""
        if not self.rule.by_step:
            return self.counts[index]
        if self._oldest is None:  # Cached: there may be many slices.
            self._oldest = min(self.counts[own] for own in self._own)
        return self._oldest

    def known_count(self, index: int) -> int:
        """Returns `count`, or 0 where only another process of the group knows it."""
        return self.count(index) if self.rule.by_step or index in self._own else 0

    def next_push(self, index: int) -> int:
        """Returns the step of the next push of a slice.

        In a mode by step it is one number for all slices: the oldest step that some slice still
        accepts from a late worker (backup workers). With different numbers two workers could wait
        for each other: A for B's push of one slice, B for A's push of another.
        """
        if not self.rule.by_step:
            return self.counts[index]
        if self.limit is not None:  # Of the same step for every process of a group.
            return self.limit
        if self._next is None:
            self._next = min(max(self.counts[own], self._parts[own].version) for own in self._own)
        return self._next

    def next_of_all(self) -> int:
        """Returns the step of the next push of the slice that is furthest behind."""
        if self.limit is not None:
            return self.limit
        return min(self.next_push(own) for own in self._own)

    def first_push(self) -> int:
        """Returns the newest of the steps that the slices expect next, after a first pull."""
        return max(max(self.counts[own], self._parts[own].version) for own in self._own)

    def oldest_version(self, count: int) -> int:
        """Returns the oldest version that has the first `count` pushes of this worker in it."""
        return self.rule.min_version(count - 1) if count else 0

    def fix(self) -> None:
        """Fixes the step of the next push, in a mode by step, until `pushed` counts it."""
        if self.rule.by_step and self.limit is None:
            self.limit = self.next_of_all()

    def pushed(self) -> None:
        """Counts one push of every slice."""
        made = [self.next_push(index) + 1 for index in range(len(self.counts))]
        self.counts = [max(pair) for pair in zip(self.counts, made, strict=True)]
        self._oldest = self._next = self.limit = None

    def pulled(self, index: int, clock: int, version: int) -> None:
        """Records a pull that has landed; call it before the slice gets its new version.

        Args:
            index: Index of the slice.
            clock: The first step that the slice accepts from a worker that has (re)joined.
            version: The version that was pulled.
        """
        is_first = self._parts[index].version < 0
        if is_first:
            self.counts[index], self._oldest = max(self.counts[index], clock), None
        if is_first or version > self.counts[index]:
            self._next = None  # Else the cached value is still right.

    def begin_at(self, step: int) -> None:
        """Sets every count: this worker's next push is the one of `step`."""
        self.counts = [step] * len(self.counts)
        self._oldest = self._next = self.limit = None

    def restart(self, rule: Rule) -> None:
        """Starts again, maybe under another rule; the next pulls bring the counts."""
        self.rule = rule
        self.begin_at(0)
