"""Counters of one shard since its process began: plain numbers, read by the metrics page."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from pscore.types import Verdict

APPLY_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
KEPT_MAX = 1 << 16  # Times kept between two ticks; the newest.


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Counts nothing yet; `bounds` are increasing, and inclusive."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # The last: above all bounds.
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Returns the counts as they are now."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = list(self.counts), self.total
        return copied


@dataclass(slots=True)
class JobShare:
    """The share of one job in a shard's counters."""

    pushes: list[int] = field(default_factory=lambda: [0] * len(Verdict))  # By verdict.
    num_pulls_answered: int = 0
    num_pulls_put_off: int = 0


@dataclass(slots=True)
class Counters:
    """Numbers that only rise; all but `times_s` are read and changed under the engine's lock."""

    pushes: list[int] = field(default_factory=lambda: [0] * len(Verdict))  # By verdict.
    num_pushes_refused: int = 0
    num_pulls_answered: int = 0
    num_pulls_put_off: int = 0
    num_updates: int = 0
    received_nbytes: int = 0
    sent_nbytes: int = 0
    staleness: Histogram = field(default_factory=lambda: Histogram(STALENESS_BOUNDS))
    apply_s: Histogram = field(default_factory=lambda: Histogram(APPLY_BOUNDS_S))
    # By job, for those with live workers only, so that their number stays bounded.
    jobs: dict[str, JobShare] = field(default_factory=dict)
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))  # Any thread.

    def pushed(self, job: str, verdict: Verdict) -> None:
        """Counts the answer to a push."""
        self.pushes[verdict] += 1
        self._of(job).pushes[verdict] += 1

    def pulled(self, job: str, *, is_answered: bool) -> None:
        """Counts the answer to a pull: weights, or the reason of its wait."""
        self.num_pulls_answered += is_answered
        self.num_pulls_put_off += not is_answered
        share = self._of(job)
        share.num_pulls_answered += is_answered
        share.num_pulls_put_off += not is_answered

    def _of(self, job: str) -> JobShare:
        return self.jobs.get(job) or self.jobs.setdefault(job, JobShare())

    def keep(self, jobs: Collection[str]) -> None:
        """Forgets the shares of all other jobs; the shard's own counters keep them."""
        self.jobs = {name: share for name, share in self.jobs.items() if name in jobs}

    def copy(self) -> Counters:
        """Returns a copy that may be read without the lock."""
        staleness, apply_s = self.staleness.copy(), self.apply_s.copy()
        jobs = {n: replace(share, pushes=list(share.pushes)) for n, share in self.jobs.items()}
        return replace(
            self,
            jobs=jobs,
            pushes=list(self.pushes),
            staleness=staleness,
            apply_s=apply_s,
            times_s=deque(),
        )

    def settle(self) -> None:
        """Moves the times measured by the queues into the histogram."""
        for _ in range(len(self.times_s)):
            self.apply_s.observe(self.times_s.popleft())
