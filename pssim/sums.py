"""Sums by torch.distributed in simulated time, some of which fail at some of their members."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pscore.types import FloatArray
from psworker.gossip.base import TorchSum

BREAKS = 0.5  # Share of the members at which a sum that fails does so.
Key = tuple[int, int]  # Epoch and round.
AtTime = Callable[[float, Callable[[], None]], None]


@dataclass(slots=True)
class Sum:
    """One sum: its members' arrays so far, and the result of each."""

    members: tuple[int, ...]
    given: dict[int, tuple[FloatArray, Callable[[], None]]] = field(default_factory=dict)
    found: dict[int, FloatArray | str] = field(default_factory=dict)


class WorldSums:
    """All sums of a world.

    A sum in a bad network fails at some members and ends at others, as where a connection breaks
    behind the last message of one of them. One that has failed is followed by one that has not:
    a worker gives up where every one fails.
    """

    def __init__(self, draw: random.Random, at_time: AtTime, latency_s: float, lost: float) -> None:
        """Starts without a sum.

        Args:
            draw: All randomness.
            at_time: Does something later.
            latency_s: Longest time of a sum behind its last member's arrival.
            lost: Share of sums that fail at some members.
        """
        self._draw, self._at_time = draw, at_time
        self._latency_s, self._lost = latency_s, lost
        self._sums: dict[Key, Sum] = {}
        self._has_failed = False

    def ask(
        self, rank: int, wanted: TorchSum, proceed: Callable[[], None]
    ) -> FloatArray | str | None:
        """Returns a member's sum, or the reason of its failure; None: `proceed` is called then."""
        one = self._sums.setdefault((wanted.epoch, wanted.round), Sum(wanted.members))
        assert one.members == wanted.members, "workers of one epoch know different members"
        if rank not in one.given:
            one.given[rank] = wanted.values.copy(), proceed
            if len(one.given) == len(one.members):
                self._end(one)
        return one.found.get(rank)

    def kill(self, rank: int) -> None:
        """Breaks the connections of a worker: sums that it is in may fail, or end never."""
        for one in self._sums.values():
            if rank in one.members and len(one.given) < len(one.members):
                for other in one.given:
                    if self._draw.random() < BREAKS:
                        self._tell(one, other, "connection closed by peer")

    def _end(self, one: Sum) -> None:
        total: FloatArray = np.stack([one.given[rank][0] for rank in one.members]).sum(axis=0)
        fails = not self._has_failed and self._draw.random() < self._lost
        self._has_failed = fails
        for rank in one.members:
            is_broken = fails and self._draw.random() < BREAKS
            self._tell(one, rank, "connection reset by peer" if is_broken else total.copy())

    def _tell(self, one: Sum, rank: int, found: FloatArray | str) -> None:
        def tell() -> None:
            one.found.setdefault(rank, found)
            one.given[rank][1]()

        self._at_time(self._draw.random() * self._latency_s, tell)
