"""Progress of the workers on one slice, as its journal has it.

The clock of the slice (decisions/slice_clock.py) decides; this is the part of its decisions that is
executed and written down. After a crash the clock resumes from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from pscore.types import Push
from psserver.decisions.progress import Minibatches, Progress
from psserver.slices.journal import SliceJournal


class JournaledProgress:
    """The progress of each worker in the record of a journal; the caller commits what it adds."""

    def __init__(self, journal: SliceJournal) -> None:
        self._journal = journal
        self._workers = {
            rank: Progress(steps.clock, set(steps.ahead), set(steps.late), steps.skipped)
            for rank, steps in journal.record.counted.items()
        }
        known = journal.record.minibatches
        self._minibatches = Minibatches(known.clock, set(known.ahead))

    def copy(self) -> dict[int, Progress]:
        """Returns a copy of each worker's progress, by rank."""
        return deepcopy(self._workers)

    def copy_minibatches(self) -> Minibatches:
        """Returns a copy of the minibatches that are counted."""
        return deepcopy(self._minibatches)

    def add(self, push: Push) -> None:
        """Counts a push and its minibatch; one that was held is counted already."""
        if push.minibatch >= 0 and push.minibatch not in self._minibatches:
            self._minibatches.note(push)
            self._journal.count_minibatches(self._minibatches)
        self._add_step(push)

    def has(self, push: Push) -> bool:
        """Returns whether the step of a push is counted; any thread may ask."""
        return push.worker in self._workers and push.step in self._workers[push.worker]

    def _add_step(self, push: Push) -> None:
        counted = self._workers.setdefault(push.worker, Progress())
        if push.step not in counted:
            counted.add(push.step)
            self._journal.count(push.worker, counted)

    def add_late(self, push: Push) -> None:
        """Counts a push that came too late for its update."""
        self._add_step(push)
        self._workers[push.worker].add_late(push.step)
        self._journal.count(push.worker, self._workers[push.worker])

    def count_before(self, minibatch: int) -> None:
        """Counts all minibatches before one, and commits."""
        self._minibatches.add_before(minibatch)
        self._journal.count_minibatches(self._minibatches)
        self._journal.commit()

    def advance(self, worker: int, clock: int) -> bool:
        """Raises a worker's clock; returns whether it was lower."""
        counted = self._workers.get(worker, Progress())
        if counted.clock >= clock:
            return False
        counted.skip_to(clock)
        self._workers[worker] = counted
        self._journal.count(worker, counted)
        return True

    def begin(self, epoch: int, clocks: Mapping[int, int]) -> None:
        """Restarts each worker at its clock: the mode has changed.

        Args:
            epoch: Changes of the mode so far, with this one.
        """
        self._workers = {rank: Progress(clock=clock) for rank, clock in clocks.items()}
        self._journal.begin(epoch, self._workers)
