"""Synchronous SGD: one update per step, from the mean gradient of all workers, or of the fastest.

Jianmin Chen et al., "Revisiting Distributed Synchronous SGD", arXiv:1604.00981, section 2 and, for
backup workers, section 3.

    W <- opt(W, (1/N) sum_i g_i)              i: all workers; with b backup workers the N of N + b
                                              whose gradient of this step came first

Every worker waits for the update of its own step. Without backup workers its gradients are added in
the order of the ranks, so that the same seed gives the same bits whatever the order of arrival;
with them they are added as they come. A gradient that comes after its step has closed never enters
the weights: its worker gets TOO_LATE, pulls, and continues with the oldest step still open.

Differs from the paper: the first N are chosen slice by slice, so that the late gradient of a large
model may still count in the slices that were in time. Where fewer than N workers are left, a step
takes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.plugins import require_range
from pscore.rules.base import Rule, SliceClocks


@dataclass(frozen=True)
class Synchronous(Rule):
    """The server half of every mode that collects gradients by step."""

    @property
    def by_step(self) -> bool:
        """A step's update takes the gradients of that step and no others."""
        return True

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        """Every expected worker."""
        return num_expected

    def steps_open(self) -> int:
        """A worker has its step's update before it pushes the next."""
        return 1

    def readable(self, clocks: SliceClocks, worker: int, clock: int, min_version: int) -> bool:
        """The requested update is there; the worker's own push may have been too late for it."""
        return clocks.version >= min_version


class WithBackup(Synchronous):
    """The server half of a mode by step that need not wait for everybody; `backup` is a field."""

    backup: int

    def __post_init__(self) -> None:
        require_range(f"{self.name}.backup", self.backup, 0, 4095)

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for more backup workers than leave one to wait for."""
        if self.backup >= num_workers:
            raise ConfigError(
                f"{self.name}.backup is {self.backup}, must be less than the {num_workers} workers"
            )

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        """All but the backup workers, or everybody if fewer are left."""
        return min(num_expected, max(1, num_workers - self.backup))


@dataclass(frozen=True)
class SSGD(WithBackup):
    """Synchronous SGD, with backup workers if configured.

    Attributes:
        backup: b, workers whose gradient a step need not wait for, 0 to the number of workers
            less one. About 4 % of the workers is usual.
    """

    backup: int = 0

    name = "ssgd"
    source = "Chen et al., arXiv:1604.00981"

    @property
    def workers_may_step(self) -> bool:
        """With backup workers a late worker continues without some of the updates."""
        return self.backup == 0
