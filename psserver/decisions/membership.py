"""Who takes part in a job, as one shard sees it: a state machine without clock or network.

Each shard keeps its own membership of each job. A worker joins every shard, renews its lease at
every shard, and leaves every shard; time is an argument. What the rest of the shard asks is one
question: who is expected to push step t? A job is *formed* when `num_workers` have joined; before,
those who have not come yet are expected at every step, so that no step closes without them.

An *elastic* job has a least and a largest number of workers: whoever is live is expected, anybody
may join while there are fewer than the largest number, and no step closes while there are fewer
than the least (`wanted`). A worker whose script has come to its end counts as there.

Each time a process joins it draws an incarnation, a random number. Which of two came later is known
here alone, from what has held each rank; no clock of another machine is asked, nor the wall clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pscore.errors import ConfigError, RankTakenError, ReplacedError, UnknownJobError

WORKERS_MAX = 4096
SUSPECT_SHARE = 0.4  # Of a lease: the time of two heartbeats.
SPENT_MAX = 32  # Former incarnations that are remembered of each rank.


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
    former: tuple[int, ...] = ()  # Those of the same process, from before it came back.
    spent: tuple[int, ...] = ()  # Those that have held the rank before, the oldest first.
    restart: int
    host: str
    pid: int
    heard_s: float  # Time of its last message.
    lease_ends_s: float = 0.0  # Then it is declared lost, unless it is heard before.
    presence: Presence = Presence.LIVE
    reason: str = ""  # Why it left.
    returns: bool = False  # It was part of the job before: a job without live workers goes on.
    waits: str = ""  # For which shard, in its own words: one that does not answer.
    news: str = ""  # What it has to know of the job when it joins.
    is_suspect: bool = False  # Not heard since its connection broke, or since it was restored.
    # By table: steps ended, begun and not ended, and those ended when the latter last changed.
    left_out: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class Membership:
    """The workers of one job on one shard."""

    def __init__(self, num_workers: int, lease_s: float, min_workers: int = 0) -> None:
        """Starts with nobody.

        Args:
            num_workers: Of the job; the most of an elastic one.
            lease_s: Seconds of silence after which a worker is declared lost.
            min_workers: The least of an elastic job; 0: the job is not elastic.

        Raises:
            ConfigError: The number of workers is not in 1..4096, or the least is not below it.
        """
        if not 1 <= num_workers <= WORKERS_MAX:
            raise ConfigError(f"number of workers is {num_workers}, must be in 1..{WORKERS_MAX}")
        if not 0 <= min_workers <= num_workers:
            raise ConfigError(
                f"the least number of workers is {min_workers}, must be in 1..{num_workers}, the "
                "largest number"
            )
        self.num_workers = num_workers
        self.min_workers = min_workers
        self.lease_s = lease_s
        self.members: dict[int, Member] = {}
        self.has_ended = False  # The last worker to go has said that its part is done.
        self.spent: dict[int, tuple[int, ...]] = {}  # Of ranks whose workers `begin_again` forgot.

    def join(self, member: Member) -> int:
        """Takes `member` in, at its rank or, with rank -1, at the lowest that is free.

        Returns:
            The rank.

        Raises:
            RankTakenError: Another live process holds the rank, or there is none free.
            ReplacedError: Another process has taken it over since, or this incarnation is over.
        """
        self.require_new(member)
        if member.rank < 0:
            member.rank = self._free_rank(member.incarnation)
        if member.rank >= self.num_workers:
            raise RankTakenError(f"rank {member.rank} wanted in a job of {self.size} workers")
        held = self.members.get(member.rank)
        if held is not None and held.incarnation == member.incarnation:
            # The same request again; if it comes after the worker has gone, it stays gone.
            return self.heard(member.rank, member.incarnation, member.heard_s).rank
        if held is not None:
            # Lost on another shard, but not yet on this one: the same process begins anew on all.
            is_itself = held.incarnation in member.former
            if not is_itself and self._was_replaced(member, held):
                raise ReplacedError(
                    f"rank {member.rank} was taken over by process {held.pid} on {held.host}, "
                    "which was started later"
                )
            is_live = held.presence is Presence.LIVE and not (is_itself or held.is_suspect)
            if is_live and held.restart >= member.restart:
                raise RankTakenError(
                    f"rank {member.rank} is held by process {held.pid} on {held.host}, last heard "
                    f"{member.heard_s - held.heard_s:.1f} s ago"
                )
            member.spent = (*held.spent, held.incarnation)[-SPENT_MAX:]
        else:
            member.spent = self.spent.pop(member.rank, ())
        member.lease_ends_s = member.heard_s + self.lease_s
        self.members[member.rank] = member
        self.has_ended = False
        return member.rank

    def require_new(self, member: Member) -> None:
        """Refuses a request to join that comes again after its worker was replaced.

        Raises:
            ReplacedError: Its worker has joined again, or another in its place.
        """
        places = range(self.num_workers) if member.rank < 0 else (member.rank,)
        former = [self.members[rank].spent for rank in places if rank in self.members]
        former += [self.spent[rank] for rank in places if rank in self.spent]
        if any(member.incarnation in spent for spent in former):
            raise ReplacedError(
                f"a request to join at rank {member.rank} came late: its worker has joined again, "
                "or another in its place"
            )

    def restore(
        self,
        members: list[Member],
        *,
        has_ended: bool = False,
        spent: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Takes the workers in a record in; those that were live have a new lease.

        Each of them is under suspicion until it is heard: it may have died together with the shard,
        and a new process may take its rank at once.
        """
        for member in members:
            member.lease_ends_s = member.heard_s + self.lease_s
            member.is_suspect = True
            self.members[member.rank] = member
        self.has_ended = has_ended
        self.spent = dict(spent or {})

    def begin_again(self) -> None:
        """Forgets the workers that have not ended by themselves: all ranks but theirs are to come.

        A job whose workers were all lost goes on so with new ones, and waits for all of them as it
        did at its start.
        """
        for member in self.members.values():
            if member.presence is not Presence.LEFT:
                self.spent[member.rank] = (*member.spent, member.incarnation)[-SPENT_MAX:]
        self.members = {rank: self.members[rank] for rank in self._in(Presence.LEFT)}
        for member in self.members.values():
            member.restart = 0  # Its command may be given again too.

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
        member.is_suspect = False
        return member

    def suspect(self, rank: int, incarnation: int, now_s: float) -> None:
        """Shortens the lease of a worker whose connection broke: it has two heartbeats' time."""
        member = self.members.get(rank)
        if member is not None and member.incarnation == incarnation:
            member.lease_ends_s = min(member.lease_ends_s, now_s + SUSPECT_SHARE * self.lease_s)
            member.is_suspect = True

    def leave(self, rank: int, incarnation: int, reason: str, *, failed: bool = False) -> bool:
        """Lets a worker go; returns whether that changed anything.

        Args:
            rank: Of the worker.
            incarnation: Of the worker.
            reason: Why it goes, for people.
            failed: Its script did not come to its end: it counts as lost.
        """
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return False
        if member.presence is not Presence.LIVE:
            return False
        member.presence, member.reason = Presence.LOST if failed else Presence.LEFT, reason
        self.has_ended = self.is_idle and not failed
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
            self.has_ended = False
        return over

    def expected(self) -> list[int]:
        """Returns the ranks that a step waits for, in order: live ones and those yet to come.

        Nobody is yet to come to an elastic job: who has come is waited for.
        """
        if self.is_elastic:
            return self.live()
        return [
            rank
            for rank in range(self.num_workers)
            if rank not in self.members or self.members[rank].presence is Presence.LIVE
        ]

    def live(self) -> list[int]:
        """Returns the ranks of those who take part now, in order."""
        return sorted(self._in(Presence.LIVE))

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join, up to a largest number, while others train."""
        return self.min_workers > 0

    @property
    def size(self) -> str:
        """Number of workers for people: `4`, or `2 to 4`."""
        return (
            f"{self.min_workers} to {self.num_workers}"
            if self.is_elastic
            else str(self.num_workers)
        )

    def wanted(self) -> int:
        """Returns how many live workers a step needs in order to close; 0: it needs none.

        So it is in a job that is not elastic, and in one that nobody is live in: what is in its
        open steps shall be in its weights.
        """
        if not self.is_elastic or self.is_idle:
            return 0
        return max(0, self.min_workers - len(self._in(Presence.LEFT)))

    @property
    def is_short(self) -> bool:
        """Whether an elastic job waits for more workers."""
        return len(self._in(Presence.LIVE)) < self.wanted()

    def shortage(self) -> str:
        """Returns how many workers are missing, for people: `1 more worker (1 of at least 2)`."""
        there = len(self._in(Presence.LIVE)) + len(self._in(Presence.LEFT))
        missing = max(0, self.min_workers - there)
        workers = "worker" if missing == 1 else "workers"
        return f"{missing} more {workers} ({there} of at least {self.min_workers})"

    @property
    def has_begun(self) -> bool:
        """Whether as many have come as an elastic job needs, or all of another."""
        return len(self.members) >= (self.min_workers or self.num_workers)

    @property
    def is_idle(self) -> bool:
        """Whether somebody had joined and nobody is live any more."""
        return bool(self.members) and not self._in(Presence.LIVE)

    def is_deserted(self, rank: int) -> bool:
        """Returns whether no worker takes part any more, for a new process that asks for `rank`.

        Workers under suspicion count as gone if the process asks for the rank of one of them.
        """
        live = [self.members[other] for other in self._in(Presence.LIVE)]
        asked = self.members.get(rank)
        is_asked = asked is not None and asked.is_suspect
        return all(member.is_suspect for member in live) and (is_asked or not live)

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

    def _in(self, presence: Presence) -> list[int]:
        return [rank for rank, member in self.members.items() if member.presence is presence]

    def _was_replaced(self, member: Member, held: Member) -> bool:
        """Whether the process that holds or held a rank has taken it over from `member`'s."""
        if self.is_elastic:  # Whoever finds its place free may have it, whoever had it meanwhile.
            return False
        return member.restart < held.restart or not set(held.spent).isdisjoint(member.former)

    def _free_rank(self, incarnation: int) -> int:
        """Returns the rank that this process has already, or the lowest that nobody has had.

        In an elastic job one that was lost comes before those, and one that was left after them.
        """
        former = self.rank_of(incarnation)
        if former is not None:
            return former
        new = [rank for rank in range(self.num_workers) if rank not in self.members]
        if self.is_elastic:
            lost, left = sorted(self._in(Presence.LOST)), sorted(self._in(Presence.LEFT))
            new = [*lost, *new, *left]
        if not new:
            raise RankTakenError(f"all {self.num_workers} ranks of the job are taken")
        return new[0]
