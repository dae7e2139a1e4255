"""Machines that hand a shard to each other through a register: losses, cuts and crashes, by seed.

The decisions are the product's (psserver/standby/handover.py, succession.py); the order of steps is
that of its drivers (mover.py, parting.py, heir.py). Each step of a machine is an event: it reads
the register or writes to it, sends pieces, or answers. Between two events anything may happen: a
link is cut in one direction, an answer is lost, a process is killed and comes back with its marks,
a machine is lost with all that it had. The ledger checks what clients were told.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pscore.errors import ConfigError, RemoteProtocolError
from psserver.standby.handover import Giver, Giving, Taker, Taking
from psserver.standby.succession import Claim, alone, pair, take

NUM_MACHINES = 3
NUM_EVENTS = 150
SETTLE_ROUNDS = 60
MUTANTS = (
    "answers before the standby has it", "takes without a claim", "goes on without a claim",
    "pairs before the standby has everything", "the register replaces claims",
    "forgets that it was about to take over", "any move's pieces",
)  # fmt: skip
Decide = Callable[[Claim | None], Claim | None]
Then = Callable[[Claim | None], None]


class LostError(AssertionError):
    """A client was told something that is not so any more."""


@dataclass
class Register:
    """Claims by epoch."""

    claims: dict[int, Claim] = field(default_factory=dict)

    def newest(self) -> Claim | None:
        return self.claims[max(self.claims)] if self.claims else None


@dataclass
class Marks:
    """The part of a machine that a kill leaves."""

    name: str
    journal: list[int] | None = None  # Updates in the order in which they count; None: no shard.
    incoming: list[int] | None = None  # Those that have arrived from another machine.
    standby: tuple[int, str] | None = None  # The machine that follows, and its move.
    given: tuple[int, str] | None = None
    prepared: str = ""
    taken: str = ""


@dataclass
class Asked:
    """A write to the register that is under way."""

    decide: Decide
    then: Then
    newest: Claim | None = None
    has_read: bool = False


class Machine:
    """One machine: a process, and its marks."""

    def __init__(self, number: int, marks: Marks) -> None:
        self.number, self.marks = number, marks
        self.start()

    def start(self) -> None:
        marks = self.marks
        self.giving = Giving.resumed(
            is_given=marks.given is not None, has_standby=marks.standby is not None
        )
        self.taking = Taking.resumed(marks.prepared, marks.taken)
        if marks.prepared != "":
            self.taking = Taking(Taker.PREPARED, marks.prepared)
        self.asked: Asked | None = None
        self.to: int | None = None
        self.move = ""
        self.kept = 0  # Updates that the other machine has.
        self.is_whole = False  # Whether answers wait for that.
        self.target: list[int] | None = None
        if marks.standby is not None:
            self.to, self.move = marks.standby
        if marks.given is not None:
            self.to, self.move = marks.given

    @property
    def serves(self) -> bool:
        return self.marks.journal is not None and self.giving.serves


class World:
    """Three machines, a register, and the answers that clients got."""

    def __init__(self, seed: int, mutant: str = "") -> None:
        self.rng = random.Random(f"standby {seed}")
        self.mutant = mutant
        self.register = Register()
        self.machines = [Machine(number, Marks(f"m{number}")) for number in range(NUM_MACHINES)]
        self.machines[0].marks.journal = []
        self.cut: set[tuple[int, int]] = set()  # Sender and receiver; NUM_MACHINES: the register.
        self.answered: list[int] = []
        self.num_updates, self.num_moves, self.num_names = 0, 0, NUM_MACHINES
        self.trace: list[str] = []

    # ----- what happens to machines and links

    def disturb(self) -> None:
        rng, machine = self.rng, self.rng.choice(self.machines)
        kind = rng.random()
        if kind < 0.4:
            ends = rng.sample(range(NUM_MACHINES + 1), 2)
            self.cut.symmetric_difference_update({(ends[0], ends[1])})
            if rng.random() < 0.5:
                self.cut.symmetric_difference_update({(ends[1], ends[0])})
        elif kind < 0.5:
            self.cut.clear()
        elif kind < 0.8:
            # A standby's process must live until it has begun to take over: a second fault.
            if machine.taking.phase is not Taker.FOLLOWING or self.is_spare(machine):
                self.note(machine, "is killed")
                machine.start()
        elif self.is_spare(machine):
            self.note(machine, "is lost")
            self.num_names += 1
            machine.marks = Marks(f"m{self.num_names}")
            machine.start()

    def is_spare(self, machine: Machine) -> bool:
        """Whether all that was answered is elsewhere: a shard without a standby must stay."""
        newest = self.register.newest()
        others = [it for it in self.machines if it is not machine]
        if machine.marks.journal is None and machine.marks.incoming is None:
            return True
        if newest is None:
            return machine.marks.journal is None
        heirs = (newest.holder, newest.heir)
        return any(self.holds(it, one) for it in others for one in heirs if one)

    def holds(self, machine: Machine, name: str) -> bool:
        """Whether a machine has the shard under a name, in a way that a loss elsewhere leaves."""
        marks, taking = machine.marks, machine.taking
        if marks.journal is not None and name == marks.name and marks.given is None:
            return True
        if taking.id != name or marks.incoming is None:
            return False
        return marks.prepared == name or taking.phase in (Taker.FOLLOWING, Taker.PREPARED)

    # ----- what machines do

    def step(self, machine: Machine) -> None:
        """Makes one step of a machine, drawn from those that its state allows."""
        if machine.asked is not None:
            self.ask(machine)
            return
        phase = machine.giving.phase
        if machine.marks.journal is not None:
            {
                Giver.SERVING: self.serve,
                Giver.COPYING: self.copy,
                Giver.FOLLOWED: self.followed,
                Giver.ASKING: self.part,
                Giver.GIVEN: self.begin_there,
            }.get(phase, lambda _: None)(machine)
        elif machine.taking.waits_for(machine.taking.id) and self.rng.random() < 0.15:
            self.take_over(machine)

    def reaches(self, sender: int, receiver: int) -> bool:
        return (sender, receiver) not in self.cut and self.rng.random() > 0.05

    def settle(
        self, machine: Machine, decide: Decide, then: Callable[[Claim | None], None]
    ) -> None:
        machine.asked = Asked(decide, then)

    def ask(self, machine: Machine) -> None:
        """Reads the register, or writes what was decided; each may fail, done or not."""
        asked, own = machine.asked, machine.number
        assert asked is not None
        if not self.reaches(own, NUM_MACHINES):
            asked.has_read = False
            return
        newest = self.register.newest()
        if not asked.has_read:
            if self.reaches(NUM_MACHINES, own):
                asked.newest, asked.has_read = newest, True
            return
        try:
            wanted = asked.decide(asked.newest)
        except ConfigError:
            wanted = None
        asked.has_read = False
        if wanted is not None and wanted != asked.newest:
            is_free = wanted.epoch not in self.register.claims
            if is_free or self.mutant == "the register replaces claims":
                self.register.claims[wanted.epoch] = wanted
                self.note(machine, f"writes {wanted}")
            elif self.reaches(NUM_MACHINES, own):
                return  # It was told so, and reads again.
            if not self.reaches(NUM_MACHINES, own) or not is_free:
                return
        machine.asked = None
        asked.then(wanted)

    def serve(self, machine: Machine) -> None:
        if self.rng.random() < 0.6:
            self.push(machine)
            return
        others = [it for it in self.machines if it is not machine]
        other = self.rng.choice(others)

        def claimed(claim: Claim | None) -> None:
            if claim is not None and machine.giving.phase is Giver.SERVING:
                self.offer(machine, other, claim)

        own = machine.marks.name
        self.settle(machine, lambda newest: alone(newest, own, own, "it is to get one"), claimed)

    def offer(self, machine: Machine, other: Machine, claim: Claim) -> None:
        if not self.reaches(machine.number, other.number) or other.marks.journal is not None:
            return
        self.num_moves += 1
        move = f"move {self.num_moves}"
        if self.register.newest() != claim:
            return  # The other machine sees that the offer is an old one.
        other.taking.offer(move, has_jobs=False)
        other.asked = None
        other.marks.incoming, other.marks.prepared = [], ""
        if self.reaches(other.number, machine.number):
            machine.giving.start()
            machine.to, machine.move, machine.kept, machine.is_whole = other.number, move, 0, False

    def put(self, machine: Machine) -> bool:
        """Sends all that the other machine lacks; returns whether that was answered."""
        assert machine.to is not None
        assert machine.marks.journal is not None
        other = self.machines[machine.to]
        if not self.reaches(machine.number, machine.to):
            return False
        try:
            if self.mutant != "any move's pieces":
                other.taking.require(machine.move)
            elif other.marks.incoming is None:
                return False
        except RemoteProtocolError:
            return False
        other.marks.incoming = list(machine.marks.journal)
        if not self.reaches(machine.to, machine.number):
            return False
        machine.kept = len(machine.marks.journal)
        return True

    def copy(self, machine: Machine) -> None:
        if self.rng.random() < 0.2:
            self.push(machine)
        elif self.put(machine) or self.mutant == "pairs before the standby has everything":
            assert machine.to is not None
            machine.is_whole = True
            machine.giving.copied()
            machine.marks.standby = machine.to, machine.move
            own, move = machine.marks.name, machine.move
            self.settle(
                machine, lambda newest: pair(newest, own, own, move, move),
                lambda claim: self.tell_followed(machine, claim),
            )  # fmt: skip
        else:
            machine.giving.give_up()

    def tell_followed(self, machine: Machine, claim: Claim | None) -> None:
        assert machine.to is not None
        other = self.machines[machine.to]
        if claim is None:
            self.part(machine)
        elif self.reaches(machine.number, machine.to):
            try:
                other.taking.follow(machine.move)
            except RemoteProtocolError:
                self.part(machine)

    def followed(self, machine: Machine) -> None:
        chance = self.rng.random()
        if chance < 0.5:
            self.push(machine)
        elif chance < 0.95:
            if not self.put(machine) and self.rng.random() < 0.5:
                self.part(machine)
        else:
            self.part(machine)

    def push(self, machine: Machine) -> None:
        """Counts a new update or one that was not answered, and answers what it may."""
        journal = machine.marks.journal
        assert journal is not None
        waits_on = machine.is_whole and self.mutant != "answers before the standby has it"
        for update in journal[: machine.kept] if waits_on else journal:
            self.answer(machine, update)
        known = {*journal, *self.answered}
        update = self.rng.choice([*set(range(self.num_updates)) - known, self.num_updates])
        self.num_updates = max(self.num_updates, update + 1)
        journal.append(update)
        if not machine.is_whole:
            self.answer(machine, update)

    def answer(self, machine: Machine, update: int) -> None:
        journal = machine.marks.journal
        assert journal is not None
        if update in self.answered:
            return  # An answer that was lost is repeated.
        self.answered.append(update)
        missing = [it for it in self.answered if it not in journal]
        if missing:
            raise LostError(f"machine {machine.number} answers {update}, and lacks {missing}")

    def part(self, machine: Machine) -> None:
        """Asks the register for the shard alone."""

        def known(claim: Claim | None) -> None:
            marks = machine.marks
            if claim is not None:
                machine.giving.give_up()
                machine.is_whole, marks.standby = False, None
            else:
                assert machine.to is not None
                machine.giving.lose()
                marks.given = machine.to, machine.move

        own = machine.marks.name
        if self.mutant == "goes on without a claim":
            machine.giving.give_up()
            machine.is_whole, machine.marks.standby = False, None
            return
        machine.giving.phase = Giver.ASKING  # It answers nothing meanwhile.
        self.settle(machine, lambda newest: alone(newest, own, own, "it is away"), known)

    def begin_there(self, machine: Machine) -> None:
        assert machine.to is not None
        other = self.machines[machine.to]
        if not self.reaches(machine.number, machine.to):
            return
        try:
            if other.taking.begin(machine.move):
                self.take_up(other)
        except RemoteProtocolError:
            if machine.move not in (other.marks.taken, other.marks.prepared):
                self.reset(machine)  # That machine was lost since: a person empties this one.
            return
        if self.reaches(machine.to, machine.number):
            self.reset(machine)

    def reset(self, machine: Machine) -> None:
        """Empties a machine whose shard is elsewhere, as `psserver stop` and a new start do."""
        self.num_names += 1
        machine.marks = Marks(f"m{self.num_names}")
        machine.start()

    def take_over(self, machine: Machine) -> None:
        """Tries to get the shard that this machine follows."""
        move, marks, taking = machine.taking.id, machine.marks, machine.taking

        def known(claim: Claim | None) -> None:
            if not taking.waits_for(move) or machine.taking is not taking:
                return
            if claim is None:
                taking.release()
                marks.prepared, marks.incoming = "", None
            else:
                taking.begin(move)
                self.take_up(machine)

        if taking.phase is Taker.FOLLOWING:
            taking.prepare(move)
            if self.mutant != "forgets that it was about to take over":
                marks.prepared = move
        if self.mutant == "takes without a claim":
            taking.begin(move)
            self.take_up(machine)
        else:
            self.settle(machine, lambda newest: take(newest, move, "silence"), known)

    def take_up(self, machine: Machine) -> None:
        """Serves what has arrived."""
        marks, move = machine.marks, machine.taking.id
        self.note(machine, "takes over")
        marks.journal, marks.incoming = marks.incoming or [], None
        marks.name, marks.prepared, marks.taken = move, "", move
        marks.standby = marks.given = None
        machine.giving, machine.asked = Giving(Giver.SERVING), None
        machine.is_whole = False

    # ----- the run

    def note(self, machine: Machine, text: str) -> None:
        self.trace.append(f"machine {machine.number} {text}")

    def run(self) -> None:
        for _ in range(NUM_EVENTS):
            if self.rng.random() < 0.1:
                self.disturb()
            self.step(self.rng.choice(self.machines))
        self.cut.clear()
        for _ in range(SETTLE_ROUNDS):
            for machine in self.machines:
                self.step(machine)
        servers = [it for it in self.machines if it.serves and it.giving.phase is not Giver.ASKING]
        whole = [it for it in self.machines if it.marks.journal is not None and it.serves]
        if not (servers or any(it.asked for it in self.machines)):
            raise LostError("no machine serves at the end")
        for machine in whole:
            journal = machine.marks.journal or []
            if len(set(journal)) != len(journal):
                raise LostError(f"an update counts twice on machine {machine.number}")


def find_failure(seed: int, mutant: str = "") -> str:
    """Runs one seed; returns its failure with the events before it, or nothing."""
    world = World(seed, mutant)
    try:
        world.run()
    except (LostError, AssertionError) as problem:
        return f"seed {seed}: {problem}\n" + "\n".join(world.trace)
    return ""
