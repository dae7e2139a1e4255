"""A shard with a standby, and the process that restores lost jobs: losses, cuts and stops, by seed.

That process is the product's (psserver/mending/losses.py, successors.py), and so is the shard's
wait for it (psserver/standby/menders.py). The second of two shards is at one of two addresses, and
may have a standby at the other one, which takes over once the shard's machine is lost. Empty
processes come up where there are none. A worker knows what the shard has told it, follows it to
its standby, and tells the first shard which shards answer it. A job that is still somewhere must
not be set back; one that is nowhere must be restored.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.mending.losses import Losses
from psserver.mending.mender import LATE_S
from psserver.mending.successors import Successors
from psserver.standby.menders import LEASE_S, Menders

FIRST, PLACES = "first:1", ("one:1", "two:1")
NUM_EVENTS, NUM_CALM = 200, 60
JOB = "night"
MUTANTS = (
    "workers do not say what they reach",
    "the shard waits for nobody, and workers do not say what they reach",
)


class SetBackError(AssertionError):
    """A job that was there was set back, or one that was nowhere was not restored."""


@dataclass
class Process:
    """The process at an address: it has the shard, is its standby, or is empty."""

    instance: int
    has_job: bool = False
    stands_by: bool = False
    next: str = ""  # The address of its standby, or of that which it is to have.
    is_told: bool = False  # Whether the worker knows that.
    menders: Menders = field(default_factory=Menders)


class Keeper:
    """The process that restores lost jobs."""

    def __init__(self, world: World, name: str, path: Path) -> None:
        self.name, self.addresses, self.losses = name, [FIRST, world.known], Losses()
        self.successors = Successors(world.answer, self.addresses, path)
        self.asked_s, self.stopped_until_s = world.now_s, 0.0

    def look(self, world: World) -> bool:
        """Asks all shards; returns whether the second one's job is to be restored."""
        is_late, self.asked_s = world.now_s - self.asked_s > LATE_S, world.now_s
        world.has_excuse |= is_late and world.holder != self.addresses[1]
        there = self.addresses[1]
        second = world.answer(there)
        if second is not None:
            world.at[there].menders.note(self.name, self.successors.next[1], world.now_s)
        found = self.successors.look([world.first_answer(), second])
        return 1 in self.losses.look(found, is_late=is_late).get(JOB, ())


class World:
    """Two places of the second shard, a worker, and the process that restores lost jobs."""

    def __init__(self, seed: int, folder: Path, mutant: str = "") -> None:
        self.rng, self.mutant = random.Random(f"mending {seed}"), mutant
        self.now_s, self.num_instances = 0.0, 1
        self.at = {PLACES[0]: Process(1, has_job=True)}
        self.cut: set[str] = set()  # Addresses that the keeper does not reach.
        self.worker_at, self.worker_next, self.worker_knows = PLACES[0], "", 1
        self.is_reached = True
        self.known = PLACES[0]  # As a new keeper is told.
        self.path, self.num_keepers = folder / f"{seed}.successors", 0
        self.has_excuse = False  # Whether a loss may stay unknown: the keeper was away meanwhile.
        self.trace: list[str] = []
        self.keeper = self.new_keeper()

    def new_keeper(self) -> Keeper:
        self.num_keepers += 1
        return Keeper(self, f"keeper {self.num_keepers}", self.path)

    # ----- what processes answer to the keeper

    def first_answer(self) -> pb.StatusReply:
        answer = pb.StatusReply(shard=pb.DescribeReply(instance=100))
        job = answer.jobs.add(job=JOB, state="live")
        job.tables.add(name="model", num_slices=1, version_min=7)
        number = self.worker_knows if self.is_reached else 0
        says = "do not say" not in self.mutant
        job.workers.add(state="live", reached=[100, number] if says else [])
        return answer

    def answer(self, address: str) -> pb.StatusReply | None:
        process = self.at.get(address)
        if process is None or address in self.cut:
            return None
        about = pb.DescribeReply(instance=process.instance, stands_by=process.stands_by)
        answer = pb.StatusReply(shard=about, next_address=process.next)
        if process.has_job:
            job = answer.jobs.add(job=JOB, state="live")
            job.tables.add(name="model", num_slices=1, version_min=7)
        return answer

    # ----- events

    @property
    def holder(self) -> str:
        """The address of the process that has the shard; empty: none has."""
        return next((where for where, one in self.at.items() if one.has_job), "")

    @property
    def is_somewhere(self) -> bool:
        return bool(self.holder) or any(one.stands_by for one in self.at.values())

    def beat(self) -> None:
        """Sends the worker's heartbeats."""
        process = self.at.get(self.worker_at)
        if process is not None and process.has_job and process.instance == self.worker_knows:
            self.worker_next, process.is_told, self.is_reached = process.next, True, True
            return
        there = self.at.get(self.worker_next)
        if there is None:
            self.is_reached = False
        elif there.has_job and there.instance == self.worker_knows:
            self.worker_at, self.worker_next, self.is_reached = self.worker_next, "", True
        else:
            self.is_reached = there.stands_by

    def get_standby(self) -> None:
        """Names the empty process as the shard's standby, or makes it that."""
        if not (at := self.holder):
            return
        shard, other = self.at[at], PLACES[1 - PLACES.index(at)]
        if other not in self.at or self.at[other].stands_by:
            return
        if shard.next != other:
            shard.next, shard.is_told = other, False
            return
        is_awaited = "waits for nobody" not in self.mutant
        if shard.is_told and (not is_awaited or shard.menders.know(other, self.now_s)):
            self.at[other].stands_by = True
            self.note(f"{other} is the standby of {at}")

    def lose(self) -> None:
        """Loses the shard's machine, or its standby's."""
        at = self.rng.choice(PLACES)
        if (lost := self.at.get(at)) is None:
            return
        is_copy = lost.has_job or lost.stands_by
        if is_copy and sum(one.has_job or one.stands_by for one in self.at.values()) == 1:
            if self.rng.random() < 0.8:
                return
            self.has_excuse |= bool(self.cut) or self.keeper.stopped_until_s > 0
        self.note(f"{at} is lost")
        del self.at[at]
        if lost.stands_by and self.holder:
            self.at[self.holder].next = ""  # The shard goes on alone.

    def take_over(self) -> None:
        for at, process in self.at.items():
            if process.stands_by and not self.holder:
                process.instance, process.has_job, process.stands_by = (
                    self.worker_knows,
                    True,
                    False,
                )
                self.note(f"{at} takes over")

    def start_empty(self) -> None:
        for at in PLACES:
            if at not in self.at:
                self.num_instances += 1
                self.at[at] = Process(self.num_instances)
                self.note(f"an empty process at {at}")
                return

    def disturb(self) -> None:
        """Cuts the keeper off, stops it for a while, or starts another one in its place."""
        kind = self.rng.random()
        if kind < 0.6:
            self.cut ^= {self.rng.choice(PLACES)}
            self.note(f"cut from the keeper: {sorted(self.cut)}")
        elif kind < 0.85:
            self.keeper.stopped_until_s = self.now_s + self.rng.choice([5.0, LEASE_S + 20.0])
            self.has_excuse = True
        else:
            self.known, self.has_excuse = self.keeper.addresses[1], True
            self.keeper = self.new_keeper()
            self.note("another keeper")

    def restore(self) -> None:
        """Sets the job back, which the keeper takes for lost."""
        self.note("the job is restored")
        if self.is_somewhere:
            raise SetBackError("the job was still there")
        at = self.keeper.addresses[1]
        self.at[at].has_job = True
        self.worker_at, self.worker_next, self.worker_knows = at, "", self.at[at].instance

    def look(self) -> None:
        if self.now_s >= self.keeper.stopped_until_s and self.keeper.look(self):
            self.restore()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_s:.0f} s: {text}")

    def run(self) -> None:
        rng = self.rng
        for _ in range(NUM_EVENTS):
            self.now_s += rng.choice([0.2, 1.0, 4.0])
            if rng.random() < 0.5:
                self.look()
            event = rng.random()
            if event < 0.4:
                self.beat()
            elif event < 0.6:
                self.get_standby()
            elif event < 0.65:
                self.disturb()
            elif event < 0.72:
                self.lose()
            else:
                rng.choice([self.take_over, self.start_empty])()
        self.cut.clear()
        for _ in range(NUM_CALM):
            self.now_s += 1.0
            for step in (self.take_over, self.start_empty, self.beat, self.look):
                step()
        if not (self.has_excuse or self.holder):
            raise SetBackError("the job is nowhere at the end")


def find_failure(seed: int, folder: Path, mutant: str = "") -> str:
    """Runs one seed; returns its failure with the events before it, or nothing."""
    world = World(seed, folder, mutant)
    try:
        world.run()
    except SetBackError as problem:
        return f"seed {seed}: {problem}\n" + "\n".join(world.trace)
    return ""
