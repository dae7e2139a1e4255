"""The waits of one job in words: for the shard's status, its log and its workers.

All functions read state machines, so they are called under the engine's lock (engine.py).
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from psserver.decisions.membership import Presence
from psserver.decisions.shard import Address, Job, Shard
from psserver.decisions.stalls import Key, Stalls
from psserver.decisions.table import Table
from psserver.engine.barrier_waits import BarrierWaits

log = structlog.get_logger()


class Waits:
    """The waits of one job of a shard."""

    def __init__(self, shard: Shard, job: Job, barriers: BarrierWaits) -> None:
        self._shard = shard
        self._job = job
        self._barriers = barriers
        self._stalls = Stalls()
        # Seconds in which the other workers waited for one, by rank: a mean over them.
        self.waited_for_s: dict[int, float] = {}
        self._looked_s: float | None = None

    def of_table(self, table: Table) -> str:
        """Returns the wait of the slice that is furthest behind; empty if none waits."""
        found = _behind(table)
        return "" if found is None else self._in_words(table, found.slice_index)

    def others(self) -> list[str]:
        """Returns the waits at barriers, and those of workers for other shards."""
        members = self._job.membership.members.values()
        waiting = [m for m in members if m.waits and m.presence is Presence.LIVE]
        return [
            *self._at_barriers().values(),
            *(f"worker {member.rank}, for {member.waits}" for member in waiting),
        ]

    def note(self, rank: int, text: str) -> None:
        """Records that a worker waits for another shard, which does not answer; empty: none."""
        member = self._job.membership.members[rank]
        if text and not member.waits:
            log.warning("worker waits", job=self._job.name, worker=rank, waiting_for=text)
        member.waits = text

    @property
    def longest(self) -> str:
        """The longest wait; empty if none is long."""
        return self._stalls.told

    def look(self, now_s: float) -> None:
        """Updates the waits, and logs those that are long; called about once a second."""
        self._charge(now_s)
        for text, waited_s in self._stalls.look(self._standing(), now_s):
            log.warning(
                "job waits", job=self._job.name, waited_s=round(waited_s, 1), waiting_for=text
            )

    def _charge(self, now_s: float) -> None:
        """Charges the time since the last call to each worker that others wait for at this moment.

        It counts by the share of the others that wait: of many workers whose steps vary, one always
        waits already, and none of those that it waits for is slow.
        """
        former_s, self._looked_s = self._looked_s, now_s
        if former_s is None or self._job.membership.is_idle:
            return
        found = [_behind(table) for table in self._job.tables.values()]
        waits = [(behind.ranks, behind.num_waiting) for behind in found if behind is not None]
        shares: dict[int, float] = {}
        num_others = max(len(self._job.membership.live()) - 1, 1)
        for ranks, num_waiting in waits + self._barriers.waits():
            for rank in ranks:
                share = min(num_waiting / num_others, 1.0)
                shares[rank] = max(shares.get(rank, 0.0), share)
        for rank, share in shares.items():
            charged_s = self.waited_for_s.get(rank, 0.0)
            self.waited_for_s[rank] = charged_s + share * (now_s - former_s)

    def _standing(self) -> dict[Key, str]:
        """Returns the waits of now, each by a key that changes with every step forward."""
        found: dict[Key, str] = {}
        if self._job.membership.is_idle:
            return found
        for table in self._job.tables.values():
            behind = _behind(table)
            if behind is not None:
                key = "table", table.index, behind.slice_index, behind.step
                found[key] = self._in_words(table, behind.slice_index)
        return found | self._at_barriers()

    def _at_barriers(self) -> dict[Key, str]:
        if self._job.membership.is_idle:
            return {}
        missing = self._barriers.missing()
        return {("barrier", name, number): awaited for (name, number), awaited in missing.items()}

    def _in_words(self, table: Table, index: int) -> str:
        return self._shard.waiting_for(self._job, Address(self._job.name, table.index, index))


class Behind(NamedTuple):
    """A slice that workers wait at."""

    step: int
    slice_index: int
    ranks: tuple[int, ...]  # The workers that have not pushed the step.
    num_waiting: int  # Workers that wait at it.


def _behind(table: Table) -> Behind | None:
    """Returns the slice that is furthest behind of those that wait."""
    found: Behind | None = None
    for index, clock in table.clocks.items():
        if not clock.is_awaited:
            continue
        step, ranks = clock.missing()
        if ranks or clock.version < 0 or clock.is_short:
            here = Behind(step, index, tuple(ranks), clock.num_waiting)
            found = here if found is None else min(found, here)
    return found
