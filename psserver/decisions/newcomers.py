"""The steps at which workers start that join a job under way.

The open steps of slices and shards differ, and a step of a worker counts in all slices or in none.
So a worker that joins pulls each slice, takes the newest of the steps that the answers name, and
says so with a second pull (`Pull.begins`). Until its first pull no step waits for it; from then on
the steps do that come after the one in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pscore.rules.base import UNBOUNDED


class Newcomers:
    """The workers that have joined a job under way and have not reached their first step."""

    def __init__(self) -> None:
        # By rank: the first step that waits for it, or `UNBOUNDED` until its first pull.
        # Invariant: every rank that is not here has started.
        self.starts: dict[int, int] = {}

    def join(self, worker: int) -> None:
        """Records that a worker has joined: no step waits for it."""
        self.starts[worker] = UNBOUNDED

    def has_not_pulled(self, worker: int) -> bool:
        """Returns whether a worker has joined and not pulled yet."""
        return self.starts.get(worker) == UNBOUNDED

    def start(self, worker: int, step: int) -> None:
        """Makes steps wait for a worker from `step` on; a later start replaces an earlier one."""
        known = self.starts.get(worker, 0)
        self.starts[worker] = step if known == UNBOUNDED else max(known, step)

    def start_now(self, worker: int) -> None:
        """Makes every step wait for a worker."""
        del self.starts[worker]

    def reach(self, version: int) -> None:
        """Makes every step wait for the workers whose start is not after `version`."""
        if self.starts:
            self.starts = {rank: step for rank, step in self.starts.items() if step > version}

    def clear(self) -> None:
        """Makes every step wait for every worker."""
        self.starts.clear()

    def expected(self, ranks: list[int], step: int) -> list[int]:
        """Returns those of `ranks` that `step` waits for, in order."""
        return [rank for rank in ranks if self.starts.get(rank, 0) <= step]

    def steps_to_come(self, ranks: Sequence[int]) -> list[int]:
        """Returns the start of each of `ranks` that has pulled; 0 for all that have started."""
        starts = [self.starts.get(rank, 0) for rank in ranks]
        return [step for step in starts if step < UNBOUNDED]
