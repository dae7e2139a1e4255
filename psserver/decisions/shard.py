"""One shard: its jobs, their tables and workers. A state machine without I/O, clock or threads.

Messages go in with the time as an argument, and actions come out, each with the slice that it is
for (orders.py). A job is the workers that train together; a table
is a set of tensors with one rule, one optimizer and one count of steps: `model`, and one for each
named tensor of the low-level interface. Jobs share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pscore.errors import ConfigError, JobMismatchError, LimitError, PacelineError, UnknownJobError
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import Origin, Pull, Push, Role
from psserver.decisions import mode_switch
from psserver.decisions.barriers import Barrier
from psserver.decisions.job import Job as Job  # Also from here, for those who drive a shard.
from psserver.decisions.job import Life
from psserver.decisions.lifetime import Lifetimes, is_repeated
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member, Membership, await_others, rest_of
from psserver.decisions.orders import Acknowledge, Action, Add, Hold, Update
from psserver.decisions.participants import ChangeId
from psserver.decisions.progress import Token
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table, make_table

JOBS_MAX = 64
TABLES_MAX = 4096  # Per job.
NAME_LENGTH_MAX = 256
COUNTED = (Add, Hold, Acknowledge)  # Orders with a push that has been counted.


class Address(NamedTuple):
    """Where an action happens."""

    job: str
    table: int
    slice: int


Actions = list[tuple[Address, Action]]


class Shard:
    """The decisions of one shard: every message enters here."""

    def __init__(
        self, index: int, num_shards: int, lease_s: float, limits: Limits | None = None
    ) -> None:
        """Starts without jobs.

        Args:
            index: 0-based position of this shard.
            lease_s: Seconds of silence after which a worker is declared lost.
            limits: Bounds on its memory; None: the default ones.
        """
        self.index = index
        self.limits = limits or Limits()
        self.num_shards = num_shards
        self.lease_s = lease_s
        self.lifetimes = Lifetimes(index, self.limits)
        self.jobs = self.lifetimes.jobs

    # ----- workers

    def decide_join(
        self, name: str, num_workers: int, member: Member, min_workers: int = 0, life: int = 0
    ) -> tuple[Job, Actions]:
        """Adds a worker to a job; the first one creates it. Returns the job and the actions.

        A job that has ended starts over; one that was interrupted continues (lifetime.py).

        Args:
            num_workers: Workers of the job; the largest number of an elastic one.
            min_workers: The least number of an elastic job; 0: it is not elastic.
            life: The job's life on the first shard (`Lifetimes.meet`); 0: this is the first.

        Raises:
            RankTakenError: The rank is held by a live worker.
            NotOverError: Its process has finished a run of the job that continues with others.
            JobMismatchError: The job has another number of workers.
            LimitError: There are too many jobs.
            StateLostError: The job was here, and its numbers cannot be used.
        """
        require_name("job", name)
        former = self.jobs.get(name)
        if former is not None and not self.lifetimes.is_gone(former, num_workers, member, life):
            job = former
        else:
            news = self.lifetimes.begins_anew(name, refills=member.refills)
            job = Job(name=name, membership=Membership(num_workers, self.lease_s, min_workers))
            has_ended = former is not None and former.membership.has_ended
            job.life = Life(number=life or 1, news=news, is_anew=has_ended)
        if job.membership.size != (wanted := Membership(num_workers, 0.0, min_workers).size):
            raise JobMismatchError(
                f"job {name!r} has {job.membership.size} workers, this worker was started for "
                f"{wanted}{job.hint()}"
            )
        job.membership.require_new(member)
        repeated = is_repeated(job, member)
        if member.rank < num_workers:  # Else it is refused.
            if job is former:
                self.lifetimes.meet(job, member, life)
            self.lifetimes.require_over(job, member)
        came_back = job.membership.join(member) in job.met
        job.met.add(member.rank)
        if member.refills:
            await_others(job.membership, member.heard_s)
        if not repeated:
            _welcome(job, member, came_back=came_back)
        if self.jobs.get(name) is not job:  # Only now: a join that is refused changes nothing.
            self.lifetimes.make_room(name, JOBS_MAX)
            self.jobs[name] = job
        is_late = job.membership.is_elastic and job.step > job.life.first_step
        if not (member.returns or is_late or member.news):
            member.news = job.life.news_for(member.rank, member.incarnation)
        return job, self.recheck(job)

    def heard(self, name: str, rank: int, incarnation: int, now_s: float) -> Job:
        """Renews a worker's lease and returns its job.

        Raises:
            UnknownJobError: No such job or worker.
            ReplacedError: The worker is no longer part of the job.
        """
        job = self.jobs.get(name)
        if job is None:
            raise UnknownJobError(f"no job {name!r} on shard {self.index}")
        job.membership.heard(rank, incarnation, now_s)
        return job

    def decide_leave(
        self, name: str, rank: int, incarnation: int, reason: str, *, failed: bool = False
    ) -> Actions:
        """Removes a worker (`Membership.leave`); steps that waited for it alone close."""
        job = self.jobs.get(name)
        if job is None or not job.membership.leave(rank, incarnation, reason, failed=failed):
            return []
        return self.recheck(job)

    def tick(self, now_s: float, away_s: float = 0.0) -> tuple[list[tuple[Job, Member]], Actions]:
        """Declares workers lost whose lease has run out; returns them, and the actions that follow.

        Forgets jobs that ended long ago.

        Args:
            away_s: Seconds of it in which this shard heard nobody: they count for no lease.
        """
        lost: list[tuple[Job, Member]] = []
        actions: Actions = []
        for job in self.jobs.values():
            for member in job.membership.members.values():
                member.lease_ends_s += away_s
            members = job.membership.expire(now_s)
            lost += [(job, member) for member in members]
            if members:
                actions += self.recheck(job)
        self.lifetimes.tick(now_s)
        return lost, actions

    def restore(
        self,
        name: str,
        num_workers: int,
        members: list[Member],
        min_workers: int = 0,
        *,
        has_ended: bool = False,
        is_restored: bool = True,
        spent: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Job:
        """Creates a job from a record; the caller defines its tables next."""
        require_name("job", name)
        job = Job(name=name, membership=Membership(num_workers, self.lease_s, min_workers))
        job.membership.restore(members, has_ended=has_ended, spent=spent)
        job.met = {member.rank for member in members}
        job.life.is_restored = is_restored
        self.lifetimes.forget(name, is_forced=True)
        self.jobs[name] = job
        return job

    # ----- tables

    def define(
        self, job: Job, spec: TableSpec, *, adopts: bool = False, number: int | None = None
    ) -> tuple[Table, bool]:
        """Returns the table that `spec` declares, and whether it is new.

        Args:
            adopts: Whether the job's table may have its weights in slices of another length.
            number: Index of the table on the first shard, for a new one if no other table has it
                here; workers that were killed may have declared tables there alone.

        Raises:
            JobMismatchError: The job's table of this name differs; the message names how.
            LimitError: There are too many tables, or too little memory.
            ConfigError: The declaration is not one that a shard can serve.
        """
        table = job.tables.get(spec.name)
        if table is not None:
            if adopts and spec.content.name == table.spec.content.name:
                spec = replace(spec, content=table.spec.content)
            difference = spec.difference(table.spec)
            if difference is not None:
                raise JobMismatchError(f"job {job.name!r}: {difference}{job.hint()}")
            return table, False
        if len(job.tables) >= TABLES_MAX:
            raise LimitError(f"job {job.name!r} already has {TABLES_MAX} tables")
        if spec.num_shards != self.num_shards:
            raise ConfigError(f"table for {spec.num_shards} shards, there are {self.num_shards}")
        kept = self.limits.is_kept
        taken = {other.index for other in job.tables.values()}
        if number is None or number in taken or number >= TABLES_MAX:
            number = max(taken, default=-1) + 1
        table = make_table(spec, number, self.index, job.membership, is_kept=kept)
        self._require_memory(job, table, table.memory_nbytes)
        job.tables[spec.name] = table
        return table, True

    def _require_memory(self, job: Job, table: Table, wanted: int) -> None:
        self.require_memory(
            f"table {table.spec.name!r} of job {job.name!r} on shard {self.index}", wanted
        )

    def require_memory(self, what: str, wanted: int, besides: int = 0) -> None:
        """Checks that there is memory; forgets jobs that have ended until there is.

        Args:
            what: The thing that needs it, for the message.
            wanted: Bytes that it needs.
            besides: Bytes in use beside those of tables.

        Raises:
            LimitError: There is too little, also without the jobs that have ended.
        """

        def held() -> int:
            return besides + self.table_nbytes

        while not self.limits.has_room(wanted, held()) and self.lifetimes.free_one():
            pass
        self.limits.require_memory(what, wanted, held())

    @property
    def table_nbytes(self) -> int:
        """Bytes that the tables of all jobs take."""
        return sum(job.memory_nbytes for job in self.jobs.values())

    # ----- a change of the mode

    def step_aside(
        self, job: Job, index: int, rank: int, change: ChangeId, rule: Rule | None = None
    ) -> Actions:
        """Stops waiting for a worker at a table's steps until the mode has been changed.

        Args:
            rule: The mode to come; None: that is not known.

        Raises:
            ConfigError: The mode does not fit.
            LimitError: There is no memory for it.
        """
        table = job.table(index)
        if rule is not None:
            self._require_possible(job, table, rule)
        if not mode_switch.set_aside(table, rank, change):
            return []
        return self._noted(job, table, lambda clock: clock.recheck())

    def rest(self, job: Job, rank: int, now_s: float, *, rests: bool) -> Actions:
        """Records whether a worker waits for others; steps that need not wait for it close."""
        resting = job.membership.resting
        if (rank in resting) == rests:
            return []
        if rests:
            resting[rank] = rest_of(job.membership, now_s)
        else:
            del resting[rank]
        return self.recheck(job)

    def change(self, job: Job, index: int, rank: int, rule: Rule) -> Actions | None:
        """Changes a table's mode; None if an earlier worker has done so.

        Raises:
            JobMismatchError: The earlier worker named another mode.
            RemoteProtocolError: Not all workers have stepped aside.
            ConfigError: The mode's arguments do not fit the job, or its updates the optimizer.
            LimitError: There is no memory for the steps that the mode leaves open.
        """
        table = job.table(index)
        if mode_switch.is_done(job, table, rank, rule):
            return None
        try:
            mode_switch.require_met(job, table, rule)
            self._require_possible(job, table, rule)
        except PacelineError:
            table.participants.aside.clear()  # The workers continue in the former mode, if they do.
            raise
        actions = self._noted(job, table, lambda clock: clock.change(rule))
        mode_switch.switch(table, rule)
        # Those workers meet again before they begin, on the first shard, which all join first.
        job.barriers.holds = bool(rule.gossip) and not self.index
        return actions

    def _require_possible(self, job: Job, table: Table, rule: Rule) -> None:
        """Checks that a table can change to a mode (`change`)."""
        mode_switch.require_possible(job, table, rule)
        self._require_memory(job, table, table.memory_under(rule) - table.memory_nbytes)

    def _noted(
        self, job: Job, table: Table, decide: Callable[[SliceClock], list[Action]]
    ) -> Actions:
        """Returns the actions that follow for each slice of a table, and counts its updates."""
        actions = [
            (Address(job.name, table.index, index), action)
            for index, clock in table.clocks.items()
            for action in decide(clock)
        ]
        _count(job, [action for _, action in actions])
        return actions

    # ----- pushes, pulls, barriers

    def decide_push(
        self, job: Job, address: Address, push: Push, token: Token, now_s: float = 0.0
    ) -> Actions:
        """Decides on one push (`SliceClock.push`)."""
        table = job.table(address.table)
        clock = table.clock(address.slice)
        job.membership.resting.pop(push.worker, None)
        actions = clock.push(push, token, now_s)
        if push.role is Role.STATE:  # The step is that of the state.
            newest = max(clock.progress() for clock in table.clocks.values())
            table.spec = replace(table.spec, origin=Origin(newest, push.step))
        job.counters.num_pushes += 1
        _count(job, actions)
        return [(address, action) for action in actions]

    def decide_pull(self, job: Job, address: Address, pull: Pull, token: Token) -> Actions:
        """Decides on one pull (`SliceClock.pull`)."""
        clock = job.table(address.table).clock(address.slice)
        return [(address, action) for action in clock.pull(pull, token)]

    def waiting_for(self, job: Job, address: Address) -> str:
        """Returns what an unanswered pull waits for, as text."""
        table = job.table(address.table)
        where = f"slice {address.slice} of {table.spec.name!r} on shard {self.index}"
        return table.waiting_for(address.slice, job.membership, where)

    def barrier(
        self,
        job: Job,
        name: str,
        number: int,
        rank: int,
        value: float = 0.0,
        *,
        holds: bool = False,
    ) -> str:
        """Records an arrival at round `number` of a barrier; returns what it waits for, as text."""
        barrier = job.barriers.arrive(name, number, rank, value, holds=holds)
        return "" if barrier is None else self.at_barrier(job, name, barrier)

    def at_barrier(self, job: Job, name: str, barrier: Barrier) -> str:
        """Returns what a barrier waits for, as text; empty if it is open."""
        members, was_open = job.membership, barrier.is_open
        missing = barrier.missing(members.expected(), is_short=members.is_short)
        if barrier.is_open and not was_open:
            job.barriers.holds = barrier.holds
        who = ", ".join(members.describe(rank) for rank in missing[:4]) or members.shortage()
        return "" if barrier.is_open else f"{who} at barrier {name!r}"

    def recheck(self, job: Job) -> Actions:
        """Decides again on every slice of a job, after its membership has changed."""
        return [
            item
            for table in job.tables.values()
            for item in self._noted(job, table, lambda clock: clock.recheck())
        ]


def require_name(what: str, name: str) -> None:
    """Checks that a name can be shown to people.

    Raises:
        ConfigError: It is empty, too long, or has characters that are not printed.
    """
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"{what} name {name[:NAME_LENGTH_MAX]!a} must have 1..{NAME_LENGTH_MAX} "
            "characters, all of them printable (no line ends, no escape sequences)"
        )


def _welcome(job: Job, member: Member, *, came_back: bool) -> None:
    """Prepares a job for a worker that has joined it, perhaps in another one's place."""
    rank = member.rank
    # A job that begins anew may have a worker of the former one, which comes back.
    has_begun = job.has_progress or any(one.newest for one in job.directories.values())
    member.came_late = bool(member.spent) or has_begun or job.life.is_anew
    job.barriers.forget(rank)
    for table in job.tables.values():
        table.participants.forget(rank)
        for clock in table.clocks.values():
            if clock.is_under_way(came_back=came_back):
                clock.welcome(rank)
            else:  # It begins together with the others.
                clock.parking.discard_worker(rank)
            if member.returns:
                clock.knows_pushes(rank)


def close_windows(job: Job, now_s: float) -> Actions:
    """Closes the rounds of a job whose windows are over at a time, in seconds."""
    actions = [
        (Address(job.name, table.index, index), action)
        for table in job.tables.values()
        if table.spec.rule.window_s is not None
        for index, clock in table.clocks.items()
        for action in clock.tick(now_s)
    ]
    _count(job, [action for _, action in actions])
    return actions


def _count(job: Job, actions: Sequence[Action]) -> None:
    """Counts the updates in `actions`, and the steps of workers, parked pushes included."""
    for action in actions:
        if isinstance(action, Update):
            job.counters.num_updates += 1
        elif isinstance(action, COUNTED) and (push := action.push) is not None:
            job.steps[push.worker] = max(job.steps.get(push.worker, 0), push.step + 1)
