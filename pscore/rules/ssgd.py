"""Synchronous SGD: one update per step, from the mean gradient of all workers.

Jianmin Chen et al., "Revisiting Distributed Synchronous SGD", arXiv:1604.00981, section 2.

    W <- opt(W, (1/N) sum_i g_i)

Every worker waits for the update of its own step. Its gradients are added in the order of the
ranks, so that the same seed gives the same bits whatever the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pscore.rules.base import Rule, SliceClocks


@dataclass(frozen=True)
class SSGD(Rule):
    """Synchronous SGD."""

    name: ClassVar[str] = "ssgd"
    source: ClassVar[str] = "Chen et al., arXiv:1604.00981"

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
        """The update asked for is there; the worker's own push may have been too late for it."""
        return clocks.version >= min_version
