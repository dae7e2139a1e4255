"""Who takes part in a job, as one shard sees it: a state machine without clock or network.

Each shard keeps its own membership of each job. A worker joins every shard, renews its lease at
every shard, and leaves every shard; time is an argument. What the rest of the shard asks is one
question: who is expected to push step t? A job is *formed* when `num_workers` have joined; before,
those who have not come yet are expected at every step, so that no step closes without them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pscore.errors import ConfigError, RankTakenError, ReplacedError, UnknownJobError

WORKERS_MAX = 4096
SUSPECT_SHARE = 0.4  # Of a lease: the time of two heartbeats.


class Presence(enum.Enum):
    """State of one worker."""

    LIVE = "live"
    LEFT = "left"  # It said so: its script ended.
    LOST = "lost"  # Its lease ran out.


@dataclass(slots=True, kw_only=True)
class Member:
    """One worker of a job."""

    rank: int
    incarnation: int
    restart: int
    host: str
    pid: int
    heard_s: float  # Time of its last message.
    lease_ends_s: float = 0.0  # Then it is declared lost, unless it is heard before.
    presence: Presence = Presence.LIVE
    reason: str = ""  # Why it left.
    returns: bool = False  # It was part of the job before: a job without live workers goes on.
    waits: str = ""  # For which shard, in its own words: one that does not answer.


class Membership:
    """The workers of one job on one shard."""

    def __init__(self, num_workers: int, lease_s: float) -> None:
        """Starts with nobody.

        Raises:
            ConfigError: The number of workers is not in 1..4096.
        """
        if not 1 <= num_workers <= WORKERS_MAX:
            raise ConfigError(f"number of workers is {num_workers}, must be in 1..{WORKERS_MAX}")
        self.num_workers = num_workers
        self.lease_s = lease_s
        self.members: dict[int, Member] = {}

    def join(self, member: Member) -> int:
        """Takes `member` in, at its rank or, with rank -1, at the lowest that is free.

        Returns:
            The rank.

        Raises:
            RankTakenError: Another live process holds the rank, or there is none free.
            ReplacedError: A newer incarnation holds it, or this one was declared lost.
        """
        if member.rank < 0:
            member.rank = self._free_rank(member.incarnation)
        if member.rank >= self.num_workers:
            raise RankTakenError(
                f"rank {member.rank} wanted in a job of {self.num_workers} workers"
            )
        held = self.members.get(member.rank)
        if held is not None and held.incarnation == member.incarnation:
            # The same request again; if it comes after the worker has gone, it stays gone.
            return self.heard(member.rank, member.incarnation, member.heard_s).rank
        if held is not None:
            if (held.restart, held.incarnation) > (member.restart, member.incarnation):
                raise ReplacedError(f"rank {member.rank} is held by a newer incarnation")
            # Lost on another shard, but not yet on this one: the same process begins anew on all.
            is_itself = member.returns and (held.host, held.pid) == (member.host, member.pid)
            is_live = held.presence is Presence.LIVE and not is_itself
            if is_live and held.restart == member.restart:
                raise RankTakenError(
                    f"rank {member.rank} is held by process {held.pid} on {held.host}, last heard "
                    f"{member.heard_s - held.heard_s:.1f} s ago"
                )
        member.lease_ends_s = member.heard_s + self.lease_s
        self.members[member.rank] = member
        return member.rank

    def restore(self, members: list[Member]) -> None:
        """Takes the workers of a snapshot in; those that were live have a new lease."""
        for member in members:
            member.lease_ends_s = member.heard_s + self.lease_s
            self.members[member.rank] = member

    def heard(self, rank: int, incarnation: int, now_s: float) -> Member:
        """Renews a lease, and returns whose it is.

        Raises:
            UnknownJobError: Nobody has joined at this rank.
            ReplacedError: It was declared lost, or another incarnation holds the rank.
        """
        member = self.members.get(rank)
        if member is None:
            raise UnknownJobError(f"no worker has joined at rank {rank}")
        if member.incarnation != incarnation:
            raise ReplacedError(f"rank {rank} is now process {member.pid} on {member.host}")
        if member.presence is Presence.LOST:
            raise ReplacedError(
                f"rank {rank} was silent for more than its lease of {self.lease_s:g} s and was "
                "declared lost"
            )
        member.heard_s = now_s
        member.lease_ends_s = now_s + self.lease_s
        return member

    def suspect(self, rank: int, incarnation: int, now_s: float) -> None:
        """Shortens the lease of a worker whose connection broke: it has two heartbeats' time."""
        member = self.members.get(rank)
        if member is not None and member.incarnation == incarnation:
            member.lease_ends_s = min(member.lease_ends_s, now_s + SUSPECT_SHARE * self.lease_s)

    def leave(self, rank: int, incarnation: int, reason: str) -> bool:
        """Lets a worker go; returns whether that changed anything."""
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return False
        if member.presence is not Presence.LIVE:
            return False
        member.presence, member.reason = Presence.LEFT, reason
        return True

    def expire(self, now_s: float) -> list[Member]:
        """Declares lost whose lease is over, and returns them."""
        over = [
            member
            for member in self.members.values()
            if member.presence is Presence.LIVE and now_s > member.lease_ends_s
        ]
        for member in over:
            member.presence, member.reason = Presence.LOST, "its lease ran out"
        return over

    def expected(self) -> list[int]:
        """Returns the ranks that a step waits for, in order: live ones and those yet to come."""
        return [
            rank
            for rank in range(self.num_workers)
            if rank not in self.members or self.members[rank].presence is Presence.LIVE
        ]

    @property
    def is_over(self) -> bool:
        """Whether somebody had joined and nobody is live any more."""
        return bool(self.members) and not any(
            member.presence is Presence.LIVE for member in self.members.values()
        )

    def describe(self, rank: int) -> str:
        """Returns `worker 3 (process 71 on gpu7)`."""
        member = self.members.get(rank)
        if member is None:
            return f"worker {rank} (has not joined yet)"
        return f"worker {rank} (process {member.pid} on {member.host})"

    def rank_of(self, incarnation: int) -> int | None:
        """Returns the rank that a process has, or had, in this job."""
        for rank, member in self.members.items():
            if member.incarnation == incarnation:
                return rank
        return None

    def _free_rank(self, incarnation: int) -> int:
        """Returns the rank that this process has already, or the lowest that nobody has had."""
        former = self.rank_of(incarnation)
        if former is not None:
            return former
        for rank in range(self.num_workers):
            if rank not in self.members:
                return rank
        raise RankTakenError(f"all {self.num_workers} ranks of the job are taken")
