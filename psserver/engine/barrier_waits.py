"""The workers that wait at barriers: each is woken when its barrier may have opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from psserver.decisions.shard import Job, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The state of a barrier for one worker that has arrived at it.

    Attributes:
        waiting_for: The workers that are missing; empty if the barrier is open.
        largest: The largest value that workers have brought to this round.
    """

    waiting_for: str
    largest: float

    @property
    def is_open(self) -> bool:
        """Whether the worker may pass."""
        return not self.waiting_for


class BarrierWaits:
    """All waits at the barriers of one shard."""

    def __init__(self, shard: Shard, lock: threading.RLock, note: Callable[[Job], None]) -> None:
        """Starts with none.

        Args:
            shard: The decisions.
            lock: The engine's.
            note: Called when a job's barriers have changed, to journal them.
        """
        self._shard = shard
        self._lock = lock
        self._note = note
        self._waiting: dict[tuple[int, str], list[Callable[[], None]]] = {}  # By job id and name.

    def arrive(
        self,
        job: Job,
        name: str,
        number: int,
        rank: int,
        value: float,
        wake: Callable[[], None],
    ) -> Arrival:
        """Records that a worker is at round `number` of a barrier, with `value`.

        May be repeated to ask for the state. Until `stop_waiting`, `wake` is called, on any thread,
        whenever the barrier may have opened.
        """
        with self._lock:
            awaited = self._shard.barrier(job, name, number, rank, value)
            waiting = self._waiting.get((id(job), name), [])
            is_new = wake not in waiting
            if is_new or not awaited:
                self._note(job)
            if is_new and awaited:
                self._waiting[id(job), name] = [*waiting, wake]
            elif is_new:
                self.wake_all(job)
            return Arrival(waiting_for=awaited, largest=job.barriers.agreed(name, number))

    def stop_waiting(self, job: Job, name: str, wake: Callable[[], None]) -> None:
        """Forgets a `wake` that `arrive` was given, if it is still known."""
        with self._lock:
            waiting = [other for other in self._waiting.pop((id(job), name), []) if other != wake]
            if waiting:
                self._waiting[id(job), name] = waiting

    def wake_all(self, job: Job) -> None:
        """Calls every `wake` of a job."""
        with self._lock:
            for (key, _), waiting in list(self._waiting.items()):
                if key == id(job):
                    for wake in waiting:
                        wake()

    def names(self, job: Job) -> list[str]:
        """Returns the barriers of a job at which workers wait."""
        return [name for key, name in self._waiting if key == id(job)]
