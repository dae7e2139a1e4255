"""The workers of a job, as one shard sees them: a state machine without a clock or a network.

Each shard has its own membership of each job: a worker joins every shard, renews its lease at
every shard, and leaves every shard. Time is an argument. The rest of the shard asks one question:
which workers are expected to push step t? A job is *formed* when `num_workers` have joined; before,
workers that have not joined yet are expected at every step, so that no step closes without them.

An *elastic* job has a least and a largest number of workers: all live workers are expected, more
may join while there are fewer than the largest number, and no step closes while there are fewer
than the least (`wanted`). A worker whose script has ended counts as present.

Each process that joins draws an incarnation, a random number. The membership alone knows which of
two came later, from the incarnations that have held each rank; it asks no wall clock and no clock
of another machine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pscore.errors import ConfigError, NotOverError, RankTakenError, ReplacedError, UnknownJobError
from psserver.decisions.directory import PeerReport
from psserver.decisions.worker_reports import NO_PACE, ReportedPace, StageReport

WORKERS_MAX = 4096
SUSPECT_SHARE = 0.4  # Share of a lease: the time of two heartbeats.
SPENT_MAX = 32  # Former incarnations that are remembered of each rank.


class Presence(enum.Enum):
    """State of the worker of one rank."""

    ABSENT = "absent"  # Has not joined yet.
    LIVE = "live"
    LEFT = "left"  # Its script ended.
    LOST = "lost"  # Its lease ran out, or its script failed.


class MemberEvent(enum.Enum):
    """Something that changes the state of a worker."""

    JOIN = "join"  # A process joins at the rank.
    MESSAGE = "message"  # Its process is heard.
    LEAVE = "leave"  # Its script ends.
    FAIL = "fail"  # Its script fails.
    SILENCE = "silence"  # Its lease runs out.
    NEW_LIFE = "new life"  # All workers were lost, and the job begins another life.


# The state after an event. An event without an entry is refused or ignored in that state.
TRANSITIONS = {
    (Presence.ABSENT, MemberEvent.JOIN): Presence.LIVE,
    (
        Presence.LIVE,
        MemberEvent.JOIN,
    ): Presence.LIVE,  # Another process, if the first may be replaced.
    (Presence.LEFT, MemberEvent.JOIN): Presence.LIVE,
    (Presence.LOST, MemberEvent.JOIN): Presence.LIVE,
    (Presence.LIVE, MemberEvent.MESSAGE): Presence.LIVE,
    (Presence.LEFT, MemberEvent.MESSAGE): Presence.LEFT,  # A message that was under way.
    (Presence.LIVE, MemberEvent.LEAVE): Presence.LEFT,
    (Presence.LIVE, MemberEvent.FAIL): Presence.LOST,
    (Presence.LIVE, MemberEvent.SILENCE): Presence.LOST,
    (Presence.ABSENT, MemberEvent.NEW_LIFE): Presence.ABSENT,
    (Presence.LIVE, MemberEvent.NEW_LIFE): Presence.ABSENT,
    (Presence.LEFT, MemberEvent.NEW_LIFE): Presence.LEFT,
    (Presence.LOST, MemberEvent.NEW_LIFE): Presence.ABSENT,
}


@dataclass(slots=True, kw_only=True)
class Member:
    """One worker of a job."""

    rank: int
    incarnation: int
    former: tuple[int, ...] = ()  # Earlier incarnations of the same process.
    after: int = 0  # The incarnation under which its process finished a run of the job; 0: none.
    spent: tuple[int, ...] = ()  # Incarnations that have held the rank before, the oldest first.
    restart: int
    host: str
    pid: int
    run_id: str = ""  # Identity of its launch; empty: not known.
    heard_s: float  # Time of its last message.
    lease_ends_s: float = 0.0  # Time when it is declared lost, unless it is heard before.
    presence: Presence = Presence.LIVE
    reason: str = ""  # The reason for which it left.
    returns: bool = False  # It was part of the job before: a job without live workers continues.
    continues: bool = False  # The first shard, which it has joined, has the job under way.
    anew: bool = False  # That shard has begun it anew: the former one had ended there.
    refills: bool = False  # It brings its part of the job to a shard that has lost that.
    asked_s: float = -math.inf  # Time at which it first asked, if it waits for a dead one's rank.
    waits: str = ""  # The shard that does not answer it, as the worker describes it.
    news: str = ""  # Message about the job, for a worker that joins.
    is_suspect: bool = False  # Silent since its connection broke, or since it was restored.
    is_restored: bool = False  # Silent since a new process of the shard has the job.
    # By table: steps ended, begun and not ended, and those ended when the latter last changed.
    left_out: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)  # By name, of its training.
    peers: tuple[PeerReport, ...] = ()  # Its last exchanges with peers, one report a table.
    pace: ReportedPace = NO_PACE  # Pace of its newest heartbeat.
    data_plane: str = ""  # Name in its newest heartbeat; between it and this shard.
    stage: StageReport | None = None  # Of a worker of a pipeline, in its newest heartbeat.
    reached: tuple[int, ...] = ()  # By shard: number if it answers, or 0; in its newest heartbeat.
    awaits: tuple[int, ...] = ()  # Ranks of workers whose models it waits for; in the same one.
    joined_s: float = 0.0  # Time of its join.
    came_late: bool = False  # The job was under way: others may have passed what its script calls.


class Attendance(NamedTuple):
    """The workers that take part at a moment; the lists are not to be changed."""

    live: list[int]  # Ranks, in order.
    expected: list[int]  # Ranks that a step waits for, in order.
    wanted: int  # Live workers that a step needs in order to close.


class Rest(NamedTuple):
    """The wait of a worker for others, at a barrier or for a tensor."""

    since_s: float
    num_steps: dict[int, int]  # Steps that the others had made then, by rank.


class Membership:
    """The workers of one job on one shard.

    Attributes:
        is_elastic: Whether workers may join, up to a largest number, while others train.
        resting: Workers that wait for others at a barrier or for a tensor, by rank: they push no
            step before those have come.
    """

    def __init__(self, num_workers: int, lease_s: float, min_workers: int = 0) -> None:
        """Starts without workers.

        Args:
            num_workers: Number of workers of the job; the most of an elastic one.
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
        self.is_elastic = min_workers > 0
        self.lease_s = lease_s
        self.members: dict[int, Member] = {}
        # Kept between two changes: every push asks. Invariant: as `_attend` would return it.
        self._attendance: Attendance | None = None
        self.has_ended = False  # Whether the last worker that left had ended without an error.
        self.resting: dict[int, Rest] = {}
        self.num_lost = 0  # Declared lost, or ended with an error, since this process has the job.
        self.spent: dict[int, tuple[int, ...]] = {}  # By rank: workers that `begin_again` forgot.

    def join(self, member: Member) -> int:
        """Adds `member`, at its rank or, with rank -1, at the lowest free one.

        Returns:
            The rank.

        Raises:
            RankTakenError: Another live process holds the rank, or no rank is free.
            NotOverError: The process that holds it was not heard since `member` asks for it.
            ReplacedError: Another process has taken it over since, or this incarnation is over.
        """
        self.require_new(member)
        if member.rank < 0:
            member.rank = self._free_rank(member.incarnation)
        if member.rank >= self.num_workers:
            raise RankTakenError(f"rank {member.rank} wanted in a job of {self.size} workers")
        held = self.members.get(member.rank)
        if held is not None and held.incarnation == member.incarnation:
            # A repeated request. If the worker has left meanwhile, it stays so.
            return self.heard(member.rank, member.incarnation, member.heard_s).rank
        if held is not None:
            if member.refills and held.presence is Presence.LOST:
                raise ReplacedError(f"rank {member.rank} came too late to fill an empty shard")
            # The process was declared lost on another shard, and joins all of them again.
            is_itself = held.incarnation in member.former
            if not is_itself and self._was_replaced(member, held):
                raise ReplacedError(
                    f"rank {member.rank} was taken over by process {held.pid} on {held.host}, "
                    "which was started later"
                )
            is_live = held.presence is Presence.LIVE and not (is_itself or held.is_suspect)
            if is_live and held.restart >= member.restart:
                kind = NotOverError if held.heard_s <= member.asked_s else RankTakenError
                raise kind(
                    f"rank {member.rank} is held by process {held.pid} on {held.host}, last heard "
                    f"{member.heard_s - held.heard_s:.1f} s ago; give each worker a rank of "
                    "its own, or end that process"
                )
            member.spent = (*held.spent, held.incarnation)[-SPENT_MAX:]
        else:
            member.spent = self.spent.pop(member.rank, ())
        member.joined_s, member.lease_ends_s = member.heard_s, member.heard_s + self.lease_s
        member.presence = TRANSITIONS[self._presence(member.rank), MemberEvent.JOIN]
        self.members[member.rank] = member
        self._attendance = None
        self.resting.pop(member.rank, None)
        self.has_ended = False
        return member.rank

    def require_new(self, member: Member) -> None:
        """Refuses a repeated request to join whose worker has been replaced since.

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
        """Restores the workers in a record; live ones get a new lease.

        Each one is suspect until it is heard: it may have died together with the shard, and a new
        process may take its rank at once.
        """
        for member in members:
            member.lease_ends_s = member.heard_s + self.lease_s
            member.is_suspect = member.is_restored = True
            self.members[member.rank] = member
        self._attendance = None
        self.has_ended = has_ended
        self.spent = dict(spent or {})

    def begin_again(self) -> None:
        """Forgets the workers that did not end by themselves.

        A job whose workers were all lost continues with new ones, and waits for all of them as it
        did at its start.
        """
        self._attendance = None
        for member in list(self.members.values()):
            if TRANSITIONS[member.presence, MemberEvent.NEW_LIFE] is Presence.ABSENT:
                self.spent[member.rank] = (*member.spent, member.incarnation)[-SPENT_MAX:]
                del self.members[member.rank]
            else:
                member.restart = 0  # Its command may be given again too.

    def heard(self, rank: int, incarnation: int, now_s: float) -> Member:
        """Renews a lease, and returns its worker.

        Raises:
            UnknownJobError: No worker has joined at this rank.
            ReplacedError: It was declared lost, or another incarnation holds the rank.
        """
        member = self.members.get(rank)
        if member is None:
            raise UnknownJobError(f"no worker has joined at rank {rank}")
        if member.incarnation != incarnation:
            raise ReplacedError(f"rank {rank} is now process {member.pid} on {member.host}")
        if (member.presence, MemberEvent.MESSAGE) not in TRANSITIONS:
            raise ReplacedError(
                f"rank {rank} was declared lost: {member.reason or 'it was silent too long'}"
            )
        member.heard_s = now_s
        member.lease_ends_s = now_s + self.lease_s
        member.is_suspect = member.is_restored = False
        return member

    def suspect(self, rank: int, incarnation: int, now_s: float) -> None:
        """Shortens the lease of a worker whose connection broke to the time of two heartbeats."""
        member = self.members.get(rank)
        if member is not None and member.incarnation == incarnation:
            member.lease_ends_s = min(member.lease_ends_s, now_s + SUSPECT_SHARE * self.lease_s)
            member.is_suspect = True

    def leave(self, rank: int, incarnation: int, reason: str, *, failed: bool = False) -> bool:
        """Records that a worker leaves; returns whether that changed anything.

        Args:
            failed: Whether its script failed: it counts as lost.
        """
        member = self.members.get(rank)
        event = MemberEvent.FAIL if failed else MemberEvent.LEAVE
        if member is None or member.incarnation != incarnation:
            return False
        if (member.presence, event) not in TRANSITIONS:
            return False
        member.presence, member.reason = TRANSITIONS[member.presence, event], reason
        self._attendance = None
        self.num_lost += failed
        self.has_ended = self.is_idle and not failed
        return True

    def expire(self, now_s: float) -> list[Member]:
        """Declares the workers lost whose lease has run out, and returns them."""
        over = [
            member
            for member in self.members.values()
            if (member.presence, MemberEvent.SILENCE) in TRANSITIONS and now_s > member.lease_ends_s
        ]
        for member in over:
            member.presence = TRANSITIONS[member.presence, MemberEvent.SILENCE]
            member.reason = f"it was silent for more than its lease of {self.lease_s:g} s"
            self.num_lost += 1
            self._attendance, self.has_ended = None, False
        return over

    def expected(self) -> list[int]:
        """Returns the ranks that a step waits for, in order: live ones and absent ones.

        A step of an elastic job does not wait for absent workers.
        """
        return (self._attendance or self._attend()).expected

    def live(self) -> list[int]:
        """Returns the ranks of the live workers, in order."""
        return (self._attendance or self._attend()).live

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

        If all were lost, a step waits until the job continues: otherwise it would have the
        gradients of some workers only. If one has finished, open steps close for the others.
        """
        return (self._attendance or self._attend()).wanted

    @property
    def num_away(self) -> int:
        """Number of workers that others miss: lost ones, in an elastic job those below the least.

        It is 0 if no worker is live: a job that its user has stopped looks the same.
        """
        num_live = len(self.live())
        if not num_live:
            return 0
        if self.is_elastic:
            return max(0, self.wanted() - num_live)
        return len(self._in(Presence.LOST))

    @property
    def is_short(self) -> bool:
        """Whether an elastic job, or one whose workers were all lost, waits for more workers."""
        return len(self.live()) < self.wanted()

    def shortage(self) -> str:
        """Returns how many workers are missing, for people: `1 more worker (1 of at least 2)`."""
        there = len(self.live()) + len(self._in(Presence.LEFT))
        least = max(1, self.min_workers)
        missing = max(0, least - there)
        workers = "worker" if missing == 1 else "workers"
        return f"{missing} more {workers} ({there} of at least {least})"

    @property
    def has_begun(self) -> bool:
        """Whether as many workers have joined as an elastic job needs, or all of another."""
        return len(self.members) >= (self.min_workers or self.num_workers)

    @property
    def is_idle(self) -> bool:
        """Whether workers have joined and none of them is live now."""
        return bool(self.members) and not self.live()

    def is_deserted(self, rank: int) -> bool:
        """Returns whether the job has no worker left, for a new process that asks for `rank`.

        Suspect workers count as gone if the process asks for the rank of one of them.
        """
        live = [self.members[other] for other in self.live()]
        asked = self.members.get(rank)
        is_asked = asked is not None and asked.is_suspect
        return all(member.is_suspect for member in live) and (is_asked or not live)

    def describe(self, rank: int) -> str:
        """Returns `worker 3 (process 71 on gpu7)`."""
        member = self.members.get(rank)
        if member is None or not member.incarnation:
            return f"worker {rank} (has not joined yet)"
        return f"worker {rank} (process {member.pid} on {member.host})"

    def rank_of(self, incarnation: int) -> int | None:
        """Returns the rank that a process has, or had, in this job."""
        for rank, member in self.members.items():
            if member.incarnation == incarnation:
                return rank
        return None

    def _attend(self) -> Attendance:
        """Returns the workers that a step waits for, and keeps them until one comes or goes."""
        live, num_left = sorted(self._in(Presence.LIVE)), len(self._in(Presence.LEFT))
        expected, wanted = live, max(0, self.min_workers - num_left)
        if not self.is_elastic:
            away = self.members.keys() - live
            expected, wanted = [rank for rank in range(self.num_workers) if rank not in away], 0
        if self.members and not live:
            wanted = 0 if num_left else max(1, self.min_workers)
        self._attendance = Attendance(live, expected, wanted)
        return self._attendance

    def _presence(self, rank: int) -> Presence:
        member = self.members.get(rank)
        return Presence.ABSENT if member is None else member.presence

    def _in(self, presence: Presence) -> list[int]:
        return [rank for rank, member in self.members.items() if member.presence is presence]

    def _was_replaced(self, member: Member, held: Member) -> bool:
        """Returns whether the process that holds or held a rank has replaced `member`'s."""
        if self.is_elastic:  # Any process may have a free rank, also one that others held.
            return False
        return member.restart < held.restart or not set(held.spent).isdisjoint(member.former)

    def _free_rank(self, incarnation: int) -> int:
        """Returns the rank that this process already has, or the lowest that was never held.

        In an elastic job the ranks of lost workers are taken before those, and the ranks of workers
        that have left after them.
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


def await_others(membership: Membership, now_s: float) -> None:
    """Gives each rank that has not joined a lease: the job was under way on other shards.

    So a worker that was lost together with this shard is not waited for without end.
    """
    others = [
        Member(rank=rank, incarnation=0, restart=0, host="", pid=0, heard_s=now_s)
        for rank in range(membership.num_workers)
        if rank not in membership.members
    ]
    membership.restore(others, has_ended=membership.has_ended, spent=membership.spent)


def rest_of(membership: Membership, now_s: float) -> Rest:
    """Returns the rest of a worker that begins to wait for others now."""
    members = membership.members
    return Rest(now_s, {rank: members[rank].pace.num_steps for rank in membership.live()})


def first_of(membership: Membership) -> int:
    """Returns the lowest rank that is here or still to come, which uploads first weights; or 0."""
    return min(membership.expected(), default=0)


def compare_left_out(
    membership: Membership, rank: int, left_out: Mapping[int, tuple[int, int, int]]
) -> str:
    """Records how many steps a worker's script has left out, by table, and compares the workers.

    Counts are compared only when both workers are beyond the step in which the other's last
    changed: until then the one that is behind may still leave out the same step.

    Returns:
        A sentence about a worker that has left out steps that another has made; empty if none has.
    """
    membership.members[rank].left_out = dict(left_out)
    live = [membership.members[rank] for rank in membership.live()]
    for table in left_out:
        reports = [(*member.left_out[table], member) for member in live if table in member.left_out]
        if not reports:  # This worker was lost, and its heartbeat is older than that.
            continue
        _, least, least_since, other = min(reports, key=lambda one: one[1])
        steps, most, since, member = max(reports, key=lambda one: one[1])
        if most > least and steps > least_since and other.left_out[table][0] > since:
            many = "1 step" if most - least == 1 else f"{most - least} steps"
            return (
                f"{membership.describe(member.rank)} has left out {many} that "
                f"{membership.describe(other.rank)} has made, the last of them before the end of "
                f"step {since}: zero_grad() came twice without step() between; call "
                "optimizer.skip_step() in its place"
            )
    return ""
