"""One shard: its jobs, their tables and workers. A state machine without I/O, clock or threads.

Messages go in with the time as an argument, and actions come out, each with the slice that it is
for (`slice_clock.py` says what the actions mean). A job is the workers that train together; a table
is a set of tensors with one rule, one optimizer and one count of steps: `model`, and one for each
named tensor of the low-level interface. Jobs share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pscore.errors import (
    ConfigError,
    JobMismatchError,
    LimitError,
    PacelineError,
    RemoteProtocolError,
    UnknownJobError,
)
from pscore.optimizers import OPTIMIZERS
from pscore.rules.base import Rule, require_sizes
from pscore.table_spec import COUNT_MAX, TableSpec
from pscore.types import Origin, Pull, Push, Role
from psserver.decisions.barriers import Barrier
from psserver.decisions.job import Job as Job  # Also from here, for those who drive a shard.
from psserver.decisions.lifetime import Lifetimes, is_repeated
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member, Membership
from psserver.decisions.orders import Acknowledge, Action, Add, Hold, Update
from psserver.decisions.participants import ChangeId, TableParticipants
from psserver.decisions.progress import Token
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table

JOBS_MAX = 64
TABLES_MAX = 4096  # Per job.
GROUPS_MAX = 1024
NAME_LENGTH_MAX = 256


class Address(NamedTuple):
    """Where an action happens."""

    job: str
    table: int
    slice: int


Actions = list[tuple[Address, Action]]


class Shard:
    """All that one shard decides."""

    def __init__(
        self, index: int, num_shards: int, lease_s: float, limits: Limits | None = None
    ) -> None:
        """Starts without jobs.

        Args:
            index: 0-based position of this shard.
            num_shards: Shards of the cluster.
            lease_s: Seconds of silence after which a worker is declared lost.
            limits: What it may use.
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
        """Adds a worker to a job; the first one creates it. Returns the job, and what follows.

        A job that is over begins anew; one that was interrupted goes on (lifetime.py).

        Args:
            name: Of the job.
            num_workers: Of the job; the most of an elastic one.
            member: The worker.
            min_workers: The least of an elastic job; 0: it is not elastic.
            life: Of the job on the first shard (`Lifetimes.meet`); 0: this is the first.

        Raises:
            RankTakenError: The rank is held by a live worker.
            JobMismatchError: The job has another number of workers.
            LimitError: There are too many jobs.
            StateLostError: The job was here, and its numbers cannot be used.
        """
        require_name("job", name)
        job = self.jobs.get(name)
        if job is None or self.lifetimes.is_gone(job, num_workers, member):
            news = self.lifetimes.begins_anew(name)
            job = Job(name=name, membership=Membership(num_workers, self.lease_s, min_workers))
            job.life.news = news
        if job.membership.size != (wanted := Membership(num_workers, 0.0, min_workers).size):
            raise JobMismatchError(
                f"job {name!r} has {job.membership.size} workers, this one was started for {wanted}"
                f"{job.hint()}"
            )
        job.membership.require_new(member)
        repeated = is_repeated(job, member)
        if member.rank < num_workers:  # Else it is refused.
            self.lifetimes.meet(job, member, life)
        came_back = job.membership.join(member) in job.met
        job.met.add(member.rank)
        for table in [] if repeated else job.tables.values():
            for clock in table.clocks.values():
                # Before the first update whoever comes begins together with the others.
                if came_back or clock.is_under_way():
                    clock.welcome(member.rank)
        if self.jobs.get(name) is not job:  # Only now: a join that is refused changes nothing.
            self.lifetimes.make_room(name, JOBS_MAX)
            self.jobs[name] = job
        is_late = job.membership.is_elastic and job.step > job.life.first_step
        if not (member.returns or is_late):
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

    def tick(self, now_s: float) -> tuple[list[tuple[Job, Member]], Actions]:
        """Declares lost whose lease is over. Returns them, and what follows for open steps.

        Jobs that ended long ago are forgotten.
        """
        lost: list[tuple[Job, Member]] = []
        actions: Actions = []
        for job in self.jobs.values():
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
        """Makes a job of a record of it; its tables are defined next."""
        require_name("job", name)
        job = Job(name=name, membership=Membership(num_workers, self.lease_s, min_workers))
        job.membership.restore(members, has_ended=has_ended, spent=spent)
        job.met = {member.rank for member in members}
        job.life.is_restored = is_restored
        self.lifetimes.forget(name, is_forced=True)
        self.jobs[name] = job
        return job

    # ----- tables

    def define(self, job: Job, spec: TableSpec) -> tuple[Table, bool]:
        """Returns the table that `spec` declares, and whether it is new.

        Raises:
            JobMismatchError: The job has a table of this name that differs; says in what.
            LimitError: There are too many tables.
            ConfigError: The declaration is not one that a shard can serve.
        """
        table = job.tables.get(spec.name)
        if table is not None:
            difference = spec.difference(table.spec)
            if difference is not None:
                raise JobMismatchError(f"job {job.name!r}: {difference}{job.hint()}")
            return table, False
        table = self._new_table(job, spec)
        job.tables[spec.name] = table
        return table, True

    def _new_table(self, job: Job, spec: TableSpec) -> Table:
        if len(job.tables) >= TABLES_MAX:
            raise LimitError(f"job {job.name!r} has {TABLES_MAX} tables already")
        if spec.num_shards != self.num_shards:
            raise ConfigError(f"table for {spec.num_shards} shards, there are {self.num_shards}")
        if spec.optimizer not in OPTIMIZERS:
            listed = ", ".join(sorted(OPTIMIZERS))
            raise ConfigError(f"no optimizer {spec.optimizer!r} on the shards; there are {listed}")
        if not 1 <= spec.num_groups <= GROUPS_MAX:
            raise ConfigError(f"{spec.num_groups} parameter groups, must be 1..{GROUPS_MAX}")
        if any(not 0 <= tensor.group < spec.num_groups for tensor in spec.tensors):
            raise ConfigError(f"a tensor is in a group beyond the {spec.num_groups} declared")
        layout = spec.layout()
        specs = {part.index: part for part in layout.of_shard(self.index)}
        require_sizes(spec.rule, job.membership.num_workers, job.membership.min_workers)
        participants = TableParticipants(job.membership)
        table = Table(
            index=len(job.tables),
            spec=spec,
            layout=layout,
            optimizer=OPTIMIZERS[spec.optimizer](),
            specs=specs,
            participants=participants,
            clocks={index: SliceClock(spec.rule, participants) for index in specs},
            is_kept=self.limits.is_kept,
        )
        self._require_memory(job, table, table.memory_nbytes)
        return table

    def _require_memory(self, job: Job, table: Table, wanted: int) -> None:
        self.require_memory(
            f"table {table.spec.name!r} of job {job.name!r} on shard {self.index}", wanted
        )

    def require_memory(self, what: str, wanted: int, besides: int = 0) -> None:
        """Refuses what would take more memory than this shard may have.

        Args:
            what: It, for the message.
            wanted: Bytes that it takes.
            besides: Bytes that are held beside the tables.

        Raises:
            LimitError: It would, also when all jobs that have ended are forgotten.
        """

        def held() -> int:
            return besides + sum(job.memory_nbytes for job in self.jobs.values())

        while not self.limits.has_room(wanted, held()) and self.lifetimes.free_one():
            pass
        self.limits.require_memory(what, wanted, held())

    # ----- a change of the mode

    def step_aside(self, job: Job, index: int, rank: int, change: ChangeId) -> Actions:
        """Lets the steps of a table close without `rank`, until its mode has been changed."""
        table = job.table(index)
        if change[-1] > COUNT_MAX:
            raise RemoteProtocolError(f"worker {rank} is at step {change[-1]}, beyond {COUNT_MAX}")
        known = table.changed.get(rank, ())
        if change[:1] == known[:1] and change <= known:
            return []  # Sent twice, and this one was under way for long.
        table.participants.aside[rank] = change
        return self._noted(job, table, lambda clock: clock.recheck())

    def change(self, job: Job, index: int, rank: int, rule: Rule) -> Actions | None:
        """Gives a table another mode; None if a worker before this one has done so.

        Raises:
            JobMismatchError: That worker named another mode.
            RemoteProtocolError: Not all workers have stepped aside.
            ConfigError: The mode's arguments do not fit the job, or its updates the optimizer.
            LimitError: There is no memory for the steps that it leaves open.
        """
        table = job.table(index)
        aside = table.participants.aside
        if rank not in aside:
            if str(rule) != str(table.spec.rule):
                raise JobMismatchError(
                    f"job {job.name!r}: mode is changed to {rule} here and to {table.spec.rule} "
                    "in the job"
                )
            return None
        try:
            self._check_change(job, table, rule)
        except PacelineError:
            aside.clear()  # All go on as they were, if they do.
            raise
        table.changed |= aside
        actions = self._noted(job, table, lambda clock: clock.change(rule))
        table.former, table.epoch = table.spec.rule, table.epoch + 1
        # All go on from the newest version, and from the step of the worker that was furthest.
        clock = max((max(clock.version, 0) for clock in table.clocks.values()), default=0)
        step = max((step for *_, step in filter(None, aside.values())), default=0)
        table.spec = replace(table.spec, rule=rule, origin=Origin(clock, step))
        aside.clear()
        return actions

    def _check_change(self, job: Job, table: Table, rule: Rule) -> None:
        if rule.outer_optimizer != table.spec.rule.outer_optimizer:
            raise ConfigError(
                f"{table.spec.rule} cannot become {rule} while it runs: the shards run another "
                "optimizer then"
            )
        require_sizes(rule, job.membership.num_workers, job.membership.min_workers)
        others = [who for who in job.membership.expected() if who not in table.participants.aside]
        if others:
            raise RemoteProtocolError(
                f"job {job.name!r}: the mode is to be changed to {rule}, but "
                f"{job.membership.describe(others[0])} has not stepped aside for it"
            )
        self._require_memory(job, table, table.memory_under(rule) - table.memory_nbytes)

    def _noted(
        self, job: Job, table: Table, decide: Callable[[SliceClock], list[Action]]
    ) -> Actions:
        """Returns what follows for each slice of a table, and counts its updates."""
        actions = [
            (Address(job.name, table.index, index), action)
            for index, clock in table.clocks.items()
            for action in decide(clock)
        ]
        _count(job, [action for _, action in actions])
        return actions

    # ----- pushes and pulls

    def decide_push(self, job: Job, address: Address, push: Push, token: Token) -> Actions:
        """Decides on one push (`SliceClock.push`)."""
        table = job.table(address.table)
        clock = table.clock(address.slice)
        actions = clock.push(push, token)
        if push.role is Role.STATE:  # The step is that of the state.
            table.spec = replace(table.spec, origin=Origin(clock.progress(), push.step))
        job.counters.num_pushes += 1
        _count(job, actions)
        return [(address, action) for action in actions]

    def decide_pull(self, job: Job, address: Address, pull: Pull, token: Token) -> Actions:
        """Decides on one pull (`SliceClock.pull`)."""
        clock = job.table(address.table).clock(address.slice)
        return [(address, action) for action in clock.pull(pull, token)]

    def waiting_for(self, job: Job, address: Address) -> str:
        """Returns what an unanswered pull waits for, in words."""
        table = job.table(address.table)
        clock = table.clock(address.slice)
        where = f"slice {address.slice} of {table.spec.name!r} on shard {self.index}"
        if clock.version < 0:
            return f"the initial weights of {where}, from {job.membership.describe(0)}"
        if clock.is_short:
            return f"{job.membership.shortage()}, at {where}"
        step, ranks = clock.missing()
        who = ", ".join(job.membership.describe(rank) for rank in ranks[:4])
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""  # noqa: PLR2004
        return f"step {step} of {who or 'nobody'}{more}, at {where}"

    # ----- barriers

    def barrier(self, job: Job, name: str, number: int, rank: int, value: float = 0.0) -> str:
        """Arrives at round `number` of a barrier. Returns what that waits for; empty if open."""
        barrier = job.barriers.arrive(name, number, rank, value)
        return "" if barrier is None else self.at_barrier(job, name, barrier)

    def at_barrier(self, job: Job, name: str, barrier: Barrier) -> str:
        """Returns what a barrier waits for, in words; empty if it is open."""
        members = job.membership
        missing = barrier.missing(members.expected(), is_short=members.is_short)
        if barrier.is_open:
            return ""
        who = ", ".join(members.describe(rank) for rank in missing[:4]) or members.shortage()
        return f"{who} at barrier {name!r}"

    # ----- inside

    def recheck(self, job: Job) -> Actions:
        """Decides again, for every slice of a job, after its membership has changed."""
        return [
            item
            for table in job.tables.values()
            for item in self._noted(job, table, lambda clock: clock.recheck())
        ]


def require_name(what: str, name: str) -> None:
    """Refuses a name that people could not read where it is shown to them.

    Raises:
        ConfigError: It is empty, too long, or has characters that are not printed.
    """
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"{what} name {name[:NAME_LENGTH_MAX]!a} must have 1..{NAME_LENGTH_MAX} "
            "characters, all of them printable (no line ends, no escape sequences)"
        )


def _count(job: Job, actions: Sequence[Action]) -> None:
    """Counts the updates that follow, and the steps of workers: perhaps of pushes that waited."""
    for action in actions:
        if isinstance(action, Update):
            job.counters.num_updates += 1
        elif isinstance(action, Add | Hold | Acknowledge) and action.push is not None:
            push = action.push
            job.steps[push.worker] = max(job.steps.get(push.worker, 0), push.step + 1)
