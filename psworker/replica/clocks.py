"""Counts one worker's pushes by slice, for the step of its next push and for its pulls.

In a mode with fragments the slices of one fragment are pushed together, and each fragment has a
count of its own. Else the whole model is one fragment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pscore.local.base import LocalSlice
from pscore.rules.base import Plan, Rule
from pscore.types import Origin


class Clocks:
    """The push counts of a replica's slices.

    Attributes:
        counts: For each slice, one more than the `step` of its last push on the wire: pushes made
            so far, or more where steps have closed without this worker. Replaced or changed only
            by this class.
        fragments: The fragment of each slice.
        limit: The next push of all slices, where several processes are one worker, or once pulls of
            the step under way have begun to be applied; None: not known yet, or not fixed yet.
    """

    def __init__(
        self, rule: Rule, parts: Sequence[LocalSlice], own: Sequence[int] | None = None
    ) -> None:
        """Starts before the first push.

        Args:
            parts: The slices; their versions decide from where a late worker continues.
            own: The slices that this process pushes and pulls; None, or none: all.
        """
        self.rule = rule
        self.counts = [0] * len(parts)
        self.limit: int | None = None
        self._parts = parts
        self._own = list(own or range(len(parts)))
        # Caches in a mode by step, by fragment; empty after a change of a slice.
        self._oldest: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._sent: dict[int, int] = {}  # In a mode by step, by fragment: see `num_sent`.
        self.fragments: list[int]
        self._divide()

    @property
    def num_fragments(self) -> int:
        """Number of fragments of the mode."""
        return len(self._of)

    def plans(self, step: int) -> list[Plan]:
        """Returns the plan of each fragment at a step of this worker."""
        return [self.rule.plan_of(step, fragment) for fragment in range(self.num_fragments)]

    def slices_pushed(self, step: int) -> list[int]:
        """Returns the slices that a step of this worker pushes."""
        plans = self.plans(step)
        return [own for own in self._own if plans[self.fragments[own]].push is not None]

    def count(self, index: int) -> int:
        """Returns the number of this worker's pushes that a pull of a slice has to wait for."""
        if not self.rule.by_step:
            return self.counts[index]
        fragment = self.fragments[index]
        if fragment not in self._oldest:  # Cached: there may be many slices.
            self._oldest[fragment] = min(self.counts[own] for own in self._of[fragment])
        return self._oldest[fragment]

    def num_sent(self, index: int) -> int:
        """Returns one more than the step of the last push that a pull of a slice waits for.

        It differs from `count` in a mode by step where rounds are left out: no push of those comes.
        0: this worker has pushed nothing since it began.
        """
        return self._sent.get(self.fragments[index], 0) if self.rule.by_step else self.count(index)

    def known_count(self, index: int) -> int:
        """Returns `count`, or 0 where only another process of the group knows it."""
        return self.count(index) if self.rule.by_step or index in self._own else 0

    def next_push(self, index: int) -> int:
        """Returns the step of the next push of a slice.

        In a mode by step it is one number for all slices of a fragment: the oldest step that some
        of them still accepts from a late worker (backup workers). With different numbers two
        workers could wait for each other: A for B's push of one slice, B for A's push of another.
        With several fragments a late worker leaves rounds out in their order (`catch_up`).
        """
        if not self.rule.by_step:
            return self.counts[index]
        if self.limit is not None:  # The same step for every process of a group.
            return self.limit
        if self.num_fragments > 1:
            return self.count(index)
        if 0 not in self._next:
            self._next[0] = self._newest(0)
        return self._next[0]

    def next_of_all(self) -> int:
        """Returns the step of the next push of the slice that is furthest behind."""
        if self.limit is not None:
            return self.limit
        return min(self.next_push(own) for own in self._own)

    def first_push(self) -> int:
        """Returns the newest of the steps that the slices expect next, after a first pull."""
        return max(self._expected(self._own))

    def first_step(self, origin: Origin) -> int:
        """Returns the step at which a worker begins that has pulled every slice.

        Args:
            origin: The push and the step from which steps are counted.
        """
        schedule = self.rule.schedule
        assert schedule is not None
        newest = [max(self._expected(slices), default=0) for slices in self._of]
        return schedule.step_of(origin.step, [max(0, it - origin.clock) for it in newest])

    def pushes_at(self, step: int, origin: Origin) -> list[int]:
        """Returns the next push of each slice at a step, in a mode with fragments."""
        schedule = self.rule.schedule
        assert schedule is not None
        made = [
            origin.clock + schedule.num_between(origin.step, step, fragment)
            for fragment in range(self.num_fragments)
        ]
        return [made[fragment] for fragment in self.fragments]

    def step_at(self, origin: Origin, num_inner: Sequence[int]) -> int:
        """Returns the step of a worker with these counts, in a mode with fragments.

        Args:
            origin: The push and the step from which steps are counted.
            num_inner: Steps since the last push, or pull, of each fragment.
        """
        schedule = self.rule.schedule
        assert schedule is not None
        made = [max(0, self.counts[of[0]] - origin.clock) if of else 0 for of in self._of]
        pairs = list(enumerate(made))
        ends = [schedule.step_after(origin.step, num, fragment) for fragment, num in pairs]
        to_come = min(
            schedule.step_after(origin.step, num + 1, q) for q, num in pairs if self._of[q]
        )
        last = max(range(len(ends)), key=lambda fragment: ends[fragment])
        return min(ends[last] + num_inner[last], to_come - 1)

    def catch_up(self, step: int) -> int:
        """Leaves out the rounds of fragments that have ended without a late worker.

        It leaves out as many of each fragment as it knows to have ended of all: so it skips no
        round that may still need it, and keeps the order of the others.

        Returns:
            The step at which it continues: `step`, or a later one.
        """
        schedule = self.rule.schedule
        if schedule is None or self.num_fragments == 1:
            return step
        known = [(slices[0], fragment) for fragment, slices in enumerate(self._of) if slices]
        missed = min(self._newest(fragment) - self.count(index) for index, fragment in known)
        if missed <= 0:
            return step
        self.counts = [count + missed for count in self.counts]
        self._forget()
        return schedule.step_behind(step, missed)

    def oldest_version(self, count: int) -> int:
        """Returns the oldest version that has the first `count` pushes of this worker in it."""
        return self.rule.min_version(count - 1) if count else 0

    def fix(self) -> None:
        """Fixes the step of the next push, in a mode by step, until `pushed` counts it."""
        if self.rule.by_step and self.limit is None:
            self.limit = self.next_of_all()

    def up_to(self, fragments: Sequence[int], step: int) -> Sequence[int]:
        """Returns the fragments whose next rounds end before or with those of some `fragments`.

        A worker pushes all of them, so that it pushes rounds in the order of their ends.

        Args:
            fragments: At least one.
        """
        schedule = self.rule.schedule
        if schedule is None or self.num_fragments == 1:
            return fragments
        ends = [schedule.step_after(step, 1, q) for q in range(self.num_fragments)]
        last = max(ends[fragment] for fragment in fragments)
        return [q for q, end in enumerate(ends) if end <= last]

    def pushed(self, fragments: Collection[int] = (0,)) -> None:
        """Counts one push of every slice of these fragments."""
        pairs = list(enumerate(self.fragments))
        made = [self.next_push(index) + (fragment in fragments) for index, fragment in pairs]
        self.counts = [max(pair) for pair in zip(self.counts, made, strict=True)]
        self._forget()
        if self.rule.by_step:
            pushed = [slices[0] for q, slices in enumerate(self._of) if slices and q in fragments]
            self._sent |= {self.fragments[index]: self.count(index) for index in pushed}

    def pulled(self, index: int, clock: int, version: int) -> None:
        """Records a pull that has landed; call it before the slice gets its new version.

        Args:
            clock: The first step that the slice accepts from a worker that has (re)joined.
        """
        is_first = self._parts[index].version < 0
        if is_first:
            self.counts[index] = max(self.counts[index], clock)
            self._oldest.clear()
        if is_first or version > self.counts[index]:
            self._next.clear()  # Else the cached value is still right.

    def begin_at(self, steps: Sequence[int]) -> None:
        """Sets the count of each slice: the step of this worker's next push of it."""
        self.counts = list(steps)
        self._forget()
        self._sent.clear()

    def restart(self, rule: Rule) -> None:
        """Starts again, maybe under another rule; the next pulls bring the counts."""
        self.rule = rule
        self._divide()
        self.begin_at([0] * len(self.counts))

    def _divide(self) -> None:
        """Divides the slices into the fragments of the mode."""
        schedule = self.rule.schedule
        numels = [len(part.weights) for part in self._parts]
        self.fragments = [0] * len(numels) if schedule is None else schedule.assign(numels)
        self._of = [
            [own for own in self._own if self.fragments[own] == fragment]
            for fragment in range(1 if schedule is None else schedule.number)
        ]

    def _expected(self, indices: Sequence[int]) -> list[int]:
        """Returns the step that each of some slices expects next of this worker."""
        if not self.rule.by_step:
            return [self.counts[index] for index in indices]
        return [max(self.counts[index], self._parts[index].version) for index in indices]

    def _newest(self, fragment: int) -> int:
        """Returns the oldest step that some slice of a fragment still accepts."""
        return min(self._expected(self._of[fragment]))

    def _forget(self) -> None:
        self._oldest.clear()
        self._next.clear()
        self.limit = None
