"""Joins a job with several processes as one worker: the leader joins, the others take its identity.

All processes of a group have one rank and one incarnation, and each opens connections of its own
for its slices. So a shard knows one worker per group: it counts one push per slice and step, from
whichever connection it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psworker.connection.membership.joining import JobMember, Joining
from psworker.connection.shard_link import Link
from psworker.group.local_group import LocalGroup


class GroupJoining(Joining):
    """Joins the processes of a group; all of them make each call."""

    def __init__(
        self,
        group: LocalGroup,
        member: JobMember,
        links: Sequence[Link],
        patience_s: float,
        data_plane: str,
    ) -> None:
        """Sends nothing yet.

        Args:
            group: The processes of this worker.
            member: The worker; its rank and lease are set by a join.
            links: One per shard, in the order of the shards.
            patience_s: Seconds to wait for a rank that another process still holds.
            data_plane: `auto`, `local`, `tcp` or `grpc` (psworker/transports).
        """
        super().__init__(member, links, patience_s, data_plane)
        self._group = group

    def join(self) -> None:
        """Joins for the first time.

        Raises:
            PacelineError: A shard refuses this worker, or does not answer.
            GroupError: A process of the group has ended.
        """
        self._adopt(self._group.led(lambda: self._identity(super(GroupJoining, self).join)))

    def rejoin(self) -> None:
        """Joins as a new incarnation.

        Raises:
            PacelineError: Another process holds the rank, or a shard does not answer.
            GroupError: A process of the group has ended.
        """
        self._group.watch.check()
        self._adopt(self._group.led(lambda: self._identity(super(GroupJoining, self).rejoin)))

    # ----- inside

    def _identity(self, join: Any) -> dict[str, Any]:
        """Joins as the leader; returns the identity of the worker at the shards."""
        join()
        return {
            "rank": self._member.rank,
            "incarnation": self._member.incarnation,
            "lease_s": self._member.lease_s,
            "progress": self.known.progress,
            "life": self.known.life,
            "instances": [link.instance for link in self._links],
        }

    def _adopt(self, identity: dict[str, Any]) -> None:
        """Copies the leader's identity, and connects to the shards' data planes."""
        if self._group.is_leader:
            return
        member = self._member
        member.rank, member.incarnation = identity["rank"], identity["incarnation"]
        member.lease_s, self.known.progress = identity["lease_s"], identity["progress"]
        self.known.life = identity["life"]
        for link, instance in zip(self._links, identity["instances"], strict=True):
            link.instance, link.joined_as = instance, (member.rank, member.incarnation)
            link.open(self._data_plane)
