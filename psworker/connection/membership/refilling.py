"""Fills a shard that has come back empty with the numbers that the workers have, in a step.

Where each worker has all that a shard has lost, nothing has to be restored from elsewhere. Each
worker joins the empty shard as the member that the other shards know, declares the tables, and
brings its slices at the version that it has: the newest of all workers counts. When all have done
so, each sends its requests of the step under way again, those that were answered too. So the shard
makes the same updates again, of the same gradients in the same order.

A worker that is lost together with the shard has taken its part of the step under way with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from pscore.contents import FLAT
from pscore.errors import LOST, PacelineError, ShardMapError
from pscore.optimizers import OPTIMIZERS
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.table_spec import TableSpec
from pscore.types import Origin
from psworker.connection.membership.heartbeats import Heartbeats
from psworker.connection.membership.joining import JobMember, Joining
from psworker.connection.shard_link import Link
from psworker.group.worker_group import WorkerGroup

log = logging.getLogger("paceline")
BARRIER = "refill"  # On the shard that is filled.
WAIT_MS = 300  # For the other workers, before the other shards are looked at.


class HeldTable(Protocol):
    """One table of which this worker has all that the shards have, with the step under way."""

    @property
    def spec(self) -> TableSpec:
        """Its declaration."""

    @property
    def origin(self) -> Origin:
        """The push and the step from which its steps are counted."""

    def fill(self, shard: int) -> None:
        """Brings the slices of a shard, and waits until it has them.

        Raises:
            PacelineError: The shard refuses one, or does not answer.
        """

    def send_again(self, shard: int) -> None:
        """Sends the requests of the step under way to a shard again."""


class Refilling:
    """Fills empty shards again.

    Attributes:
        specs: Each table that this worker has declared, by number.
        held: Those of which it has all, likewise.
        arrivals: The last round at which it has arrived, of each barrier of the first shard.
    """

    def __init__(
        self,
        member: JobMember,
        links: Sequence[Link],
        joining: Joining,
        group: WorkerGroup,
        heartbeats: Heartbeats,
    ) -> None:
        """Starts without tables; heartbeats join an empty shard at once."""
        self.specs: dict[int, TableSpec] = {}
        self.held: WeakValueDictionary[int, HeldTable] = WeakValueDictionary()
        self.arrivals: dict[str, pb.BarrierRequest] = {}
        self._member = member
        self._links = links
        self._joining = joining
        self._group = group
        self._heartbeats = heartbeats
        heartbeats.joins_again = self.join_early

    @property
    def is_possible(self) -> bool:
        """Whether this worker has all that any shard may lose."""
        if self._member.min_workers or not self._group.is_alone or not self.held:
            return False
        others = [spec for number, spec in list(self.specs.items()) if number not in self.held]
        # Such as a table that another has followed: nobody needs its numbers any more.
        return not any(
            spec.content.name != FLAT.name or OPTIMIZERS[spec.optimizer].holds_weights
            for spec in others
        )

    def mend(self, problem: PacelineError) -> None:
        """Fills the shards that have come back empty, where the workers have all of them.

        Raises:
            PacelineError: `problem` has another cause, or the workers lack something; or a shard
                does not answer.
        """
        if not self.run():
            raise problem
        self._heartbeats.failure = None

    def run(self) -> bool:
        """Fills all shards that have come back empty; returns whether there were any.

        Returns False, and changes nothing, if this worker lacks something that they have lost.

        Raises:
            PacelineError: A shard refuses this worker, or does not answer in time.
        """
        if not (self.is_possible and any([link.look() for link in self._links])):
            return False
        waiting: set[int] = set()
        filled: set[int] = set()
        while waiting or any(link.is_bare for link in self._links):
            for shard, link in enumerate(self._links):
                if link.is_bare:
                    self._fill(shard)
                    waiting.add(shard)
            for shard in sorted(waiting):
                if self._is_filled(shard):
                    waiting.discard(shard)
                    filled.add(shard)
        for shard in sorted(filled):
            for table in list(self.held.values()):
                table.send_again(shard)
            log.warning("shard %d has its part of the job again, and training goes on", shard)
        return True

    def join_early(self, link: Link) -> bool:
        """Joins a shard that has come back empty, which is filled later; returns whether it has.

        So a long computation does not cost this worker its lease there.
        """
        try:
            if not (self.is_possible and link.look()):
                return False
            self._joining.join_emptied(link)
        except PacelineError:
            return False
        return True

    def _fill(self, shard: int) -> None:
        """Brings all that this worker has of one shard, unless that is lost meanwhile."""
        link, member = self._links[shard], self._member
        log.warning(
            "worker %d fills shard %d at %s, which has come back empty, with what it has of it",
            member.rank,
            shard,
            link.address,
        )
        link.cut()
        try:
            link.joined(self._joining.join_emptied(link), member.rank, member.incarnation)
            for number, spec in sorted(self.specs.items()):
                self._declare(link, number, spec)
            self._joining.connect(link)
            for table in list(self.held.values()):
                table.fill(shard)
            for arrival in self.arrivals.values() if shard == 0 else ():
                link.call(link.control.Barrier, arrival)
        except LOST:
            if not link.look():
                raise

    def _declare(self, link: Link, number: int, spec: TableSpec) -> None:
        table = self.held.get(number)
        origin = Origin()
        if table is not None:  # Its mode may have been changed.
            spec, origin = table.spec, table.origin
        request = pb.DefineRequest(
            job=self._member.job,
            worker=self._member.rank,
            incarnation=self._member.incarnation,
            table=spec.to_proto(),
            clock=origin.clock,
            step=origin.step,
            held=spec.is_held,
        )
        found = link.call(link.control.Define, request).table
        if found != number:
            raise ShardMapError(
                f"table {spec.name!r} is number {found} at {link.address}, the "
                f"other shards have it as {number}"
            )

    def _is_filled(self, shard: int) -> bool:
        """Returns whether all workers have brought what they have; waits a moment for them."""
        link = self._links[shard]
        request = pb.BarrierRequest(
            job=self._member.job,
            worker=self._member.rank,
            incarnation=self._member.incarnation,
            name=BARRIER,
            wait_ms=WAIT_MS,
        )
        try:
            return bool(link.call(link.control.Barrier, request).done)
        except LOST:
            if not link.look():
                raise
            return False
