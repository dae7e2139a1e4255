"""The workers that wait at the barriers of a job: each is woken when a barrier may have opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psserver.decisions.shard import Job, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The state of a barrier for one worker that has arrived at it."""

    waiting_for: str  # The workers that are missing; empty if the barrier is open.
    largest: float  # The largest value that workers have brought to this round.
    newest: int  # Number of the newest round at which a worker has arrived.

    @property
    def is_open(self) -> bool:
        """Whether the worker may pass."""
        return not self.waiting_for


class BarrierWaits:
    """The waits at the barriers of one job."""

    def __init__(
        self, shard: Shard, job: Job, lock: threading.RLock, note: Callable[[], None]
    ) -> None:
        """Starts with none.

        Args:
            note: Called when the barriers have changed, to journal them.
        """
        self._shard = shard
        self._job = job
        self._lock = lock
        self._note = note
        self._waiting: dict[str, list[Callable[[], None]]] = {}  # By name of the barrier.

    def arrive(
        self,
        name: str,
        number: int,
        rank: int,
        value: float,
        wake: Callable[[], None],
        *,
        holds: bool = False,
    ) -> Arrival:
        """Records that a worker is at round `number` of a barrier, with `value`.

        May be repeated to ask for the state. Until `stop_waiting`, `wake` is called, on any thread,
        whenever the barrier may have opened.
        """
        with self._lock:
            awaited = self._shard.barrier(self._job, name, number, rank, value, holds=holds)
            waiting = self._waiting.get(name, [])
            is_new = wake not in waiting
            if is_new or not awaited:
                self._note()
            if is_new and awaited:
                self._waiting[name] = [*waiting, wake]
            elif is_new:
                self.wake_all()
            barriers = self._job.barriers
            return Arrival(
                waiting_for=awaited,
                largest=barriers.agreed(name, number),
                newest=barriers.newest(name),
            )

    @property
    def names(self) -> list[str]:
        """Names of the barriers at which workers wait."""
        return [name for name in self._waiting if name in self._job.barriers.by_name]

    def withdraw(self, name: str, number: int, rank: int) -> bool:
        """Forgets that a worker waits at a round; returns whether it may pass that."""
        with self._lock:
            passes = self._job.barriers.withdraw(name, number, rank)
            self._note()
            return passes

    def excuse(self, name: str, number: int, rank: int, absent: Sequence[int]) -> None:
        """Records workers that do not come to a round at which `rank` is."""
        with self._lock:
            self._job.barriers.excuse(name, number, rank, absent)

    def stop_waiting(self, name: str, wake: Callable[[], None]) -> None:
        """Forgets a `wake` that `arrive` was given, if it is still known."""
        with self._lock:
            waiting = [other for other in self._waiting.pop(name, []) if other != wake]
            if waiting:
                self._waiting[name] = waiting

    def wake_all(self) -> None:
        """Calls every `wake`: workers have come or gone, or a barrier is open; under the lock."""
        for waiting in self._waiting.values():
            for wake in waiting:
                wake()

    def waits(self) -> list[tuple[tuple[int, ...], int]]:
        """Returns the missing ranks and the number of workers there, by barrier; under the lock."""
        members, found = self._job.membership, []
        for name in self._waiting:
            barrier = self._job.barriers.by_name.get(name)
            if barrier is not None and not barrier.is_open:
                missing = set(members.expected()) - barrier.arrived.keys()
                found.append((tuple(missing), len(barrier.arrived)))
        return found

    def missing(self) -> dict[tuple[str, int], str]:
        """Returns the workers that barriers wait for, by name and round; under the lock."""
        found: dict[tuple[str, int], str] = {}
        for name in self._waiting:
            barrier = self._job.barriers.by_name.get(name)
            if barrier is not None and (
                awaited := self._shard.at_barrier(self._job, name, barrier)
            ):
                found[name, barrier.number] = awaited
        return found
