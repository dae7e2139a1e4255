"""What the jobs of one shard wait for, in words: for its status, its log and its workers.

Everything here reads state machines, so it is called under the engine's lock (engine.py).
"""

from __future__ import annotations

import structlog

from psserver.decisions.membership import Presence
from psserver.decisions.shard import Address, Job, Shard
from psserver.decisions.stalls import Key, Stalls
from psserver.decisions.table import Table
from psserver.engine.barrier_waits import BarrierWaits

log = structlog.get_logger()


class Waits:
    """The waits of all jobs of one shard."""

    def __init__(self, shard: Shard, barriers: BarrierWaits) -> None:
        """Starts with none.

        Args:
            shard: The jobs.
            barriers: The workers that wait at barriers.
        """
        self._shard = shard
        self._barriers = barriers
        self._stalls: dict[int, Stalls] = {}  # By the id of the job.

    def of_table(self, job: Job, table: Table) -> str:
        """Returns what the slice that is furthest behind waits for; empty if none does."""
        found = _behind(table)
        return "" if found is None else self._in_words(job, table, found[1])

    def others_of(self, job: Job) -> list[str]:
        """Returns at which barriers workers wait, and for which other shards."""
        members = job.membership.members.values()
        waiting = [m for m in members if m.waits and m.presence is Presence.LIVE]
        return [
            *self._barriers_of(job).values(),
            *(f"worker {member.rank}, for {member.waits}" for member in waiting),
        ]

    def note(self, job: Job, rank: int, text: str) -> None:
        """Takes for which other shard, one that does not answer, a worker waits; empty: none."""
        member = job.membership.members[rank]
        if text and not member.waits:
            log.warning("worker waits", job=job.name, worker=rank, waiting_for=text)
        member.waits = text

    def stalled(self, job: Job) -> str:
        """Returns what a job has waited for longest; empty if that is not long."""
        stalls = self._stalls.get(id(job))
        return "" if stalls is None else stalls.told

    def look(self, now_s: float) -> None:
        """Looks what stands still, and logs what has for long; called about once a second."""
        jobs = {id(job): job for job in self._shard.jobs.values()}
        self._stalls = {key: self._stalls.get(key) or Stalls() for key in jobs}
        for key, stalls in self._stalls.items():
            for text, waited_s in stalls.look(self._standing(jobs[key]), now_s):
                log.warning(
                    "job waits", job=jobs[key].name, waited_s=round(waited_s, 1), waiting_for=text
                )

    def _standing(self, job: Job) -> dict[Key, str]:
        """Returns what waits, by what changes when it goes on."""
        found: dict[Key, str] = {}
        if job.membership.is_idle:
            return found
        for table in job.tables.values():
            behind = _behind(table)
            if behind is not None:
                step, index = behind
                found["table", table.index, index, step] = self._in_words(job, table, index)
        return found | self._barriers_of(job)

    def _barriers_of(self, job: Job) -> dict[Key, str]:
        found: dict[Key, str] = {}
        if job.membership.is_idle:
            return found
        for name in self._barriers.names(job):
            barrier = job.barriers.by_name.get(name)
            if barrier is not None and (awaited := self._shard.at_barrier(job, name, barrier)):
                found["barrier", name, barrier.number] = awaited
        return found

    def _in_words(self, job: Job, table: Table, index: int) -> str:
        return self._shard.waiting_for(job, Address(job.name, table.index, index))


def _behind(table: Table) -> tuple[int, int] | None:
    """Returns step and index of the slice that is furthest behind of those that wait."""
    found: tuple[int, int] | None = None
    for index, clock in table.clocks.items():
        if not clock.is_awaited:
            continue
        step, ranks = clock.missing()
        if ranks or clock.version < 0 or clock.is_short:
            found = min(found or (step, index), (step, index))
    return found
