"""The workers of one slice: how far each has come, and which of them a step waits for."""

from __future__ import annotations

from collections.abc import Mapping

from pscore.rules.base import Rule
from psserver.decisions.newcomers import Newcomers
from psserver.decisions.participants import Participants
from psserver.decisions.progress import Progress


class SliceWorkers:
    """Progress of each worker on one slice, and the ranks that its steps expect."""

    def __init__(self, participants: Participants) -> None:
        self.participants = participants  # The workers that take part in the table.
        self.newcomers = Newcomers()  # Those of them that have not reached their first step.
        # By rank. Invariant: contains every push of an open step, and no parked one.
        self.counted: dict[int, Progress] = {}
        self.anew: set[int] = set()  # Ranks that have pushed nothing in the job's present life.
        self._first_clock = 0  # Largest clock when the job began, or its present life.

    @property
    def is_short(self) -> bool:
        """Whether there are fewer workers than the job needs: nothing is counted meanwhile."""
        least = self.participants.least()
        return least > 0 and len(self.participants.ranks()) < least

    def expected(self, step: int) -> list[int]:
        """Returns the ranks that a step waits for, in order; in an asynchronous mode any step."""
        ranks, newcomers = self.participants.ranks(), self.newcomers
        return newcomers.expected(ranks, step) if newcomers.starts else ranks

    def fan_in(self, rule: Rule, num_expected: int) -> int:
        """Returns how many pushes make one update; an elastic job is as large as it is now."""
        num_expected = max(1, num_expected)
        everyone = self.participants
        return rule.fan_in(
            num_expected, num_expected if everyone.is_elastic else everyone.num_workers
        )

    def least(self, rule: Rule, num_expected: int) -> int:
        """Returns how many workers have to be in before a step's window begins."""
        num_expected = max(1, num_expected)
        everyone = self.participants
        return rule.least(
            num_expected, num_expected if everyone.is_elastic else everyone.num_workers
        )

    # ----- progress

    def clock(self, worker: int) -> int:
        """Returns the number of steps received from `worker` without a gap."""
        counted = self.counted.get(worker)
        return 0 if counted is None else counted.clock

    def has(self, worker: int, step: int) -> bool:
        """Returns whether a step of `worker` was received."""
        counted = self.counted.get(worker)
        return counted is not None and step in counted

    def progress(self, worker: int) -> Progress:
        """Returns the progress of `worker`, to be changed."""
        return self.counted.get(worker) or self.counted.setdefault(worker, Progress())

    def num_counted(self, worker: int) -> int:
        """Returns one more than the last step received from `worker`; 0: none was."""
        counted = self.counted.get(worker)
        return 0 if counted is None else counted.num_counted

    def clock_max(self) -> int:
        """Returns the largest clock of any worker, lost ones included."""
        return max((counted.clock for counted in self.counted.values()), default=0)

    def next_step(self, worker: int, version: int, *, by_step: bool) -> int:
        """Returns a worker's next step that is not in: its previous process may have sent some.

        In a mode by step, workers may have left out steps that have closed. In a new life of the
        job all begin with the step that is open, so that none waits for another one's push before
        it makes a step; a push that is in from the former life counts, and is not counted again.
        """
        step = self.clock(worker)
        if by_step and worker in self.anew:
            return version
        if by_step:
            step = max(step, version)
            while self.has(worker, step):
                step += 1
        return step

    # ----- changes

    def start(self, worker: int, version: int, *, by_step: bool) -> None:
        """Expects pushes from a returning worker, from its next step on.

        In an asynchronous mode its clock becomes that of the slowest other worker.

        Args:
            version: The version that the worker is about to receive.
        """
        if by_step:
            self.newcomers.start(worker, self.next_step(worker, version, by_step=True))
            return
        self.newcomers.start_now(worker)
        counted = self.progress(worker)
        others = [self.clock(rank) for rank in self.expected(0) if rank != worker]
        counted.skip_to(min(others, default=self._first_clock))

    def begin_again(self, *, by_step: bool) -> None:
        """Begins another life of the job, whose workers were all lost.

        Args:
            by_step: Whether all workers begin at the newest version.
        """
        self.newcomers.clear()
        self._first_clock = self.clock_max()
        if by_step:
            self.anew = set(range(self.participants.num_workers))
            for rank in self.anew:
                self.counted.setdefault(rank, Progress())

    def restart(self, clock: int) -> None:
        """Sets every worker's clock: the mode has changed."""
        self.newcomers.clear()
        self.anew.clear()
        for rank in {*self.participants.ranks(), *self.counted}:
            self.counted[rank] = Progress(clock=clock)

    def resume(self, counted: Mapping[int, Progress]) -> None:
        """Restores the progress that a journal holds, by rank."""
        self.counted = dict(counted)

    def check_invariants(self) -> None:
        """Asserts the invariants of each worker's progress, for tests and the simulator."""
        for counted in self.counted.values():
            counted.check_invariants()
