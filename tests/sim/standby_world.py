"""Machines that hand a shard to each other through a register: losses, cuts and crashes, by seed.

The decisions are the product's (psserver/standby/handover.py, succession.py); the order of steps is
that of its drivers (mover.py, parting.py, heir.py). Each step of a machine is an event: it reads
the register or writes to it, sends pieces, or answers. Between two events anything may happen: a
link is cut in one direction, an answer is lost, a process is killed and comes back with its marks,
a machine is lost with all that it had. The ledger checks what clients were told.

Where the shard has two places (process/pairing.py), the machine that does not have it asks the
other one, after each loss and each move, and a first place that has lost its marks asks the
register. Else the machine that has it chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pscore.errors import ConfigError, RemoteProtocolError
from psserver.standby.handover import Giver, Giving, Taker, Taking, is_free
from psserver.standby.succession import Claim, alone, give, left_to, pair, take

NUM_MACHINES = 3
NUM_PLACES = 2
NUM_EVENTS = 150
CALM_ROUNDS, SETTLE_ROUNDS = 40, 300
MUTANTS = (
    "answers before the standby has it", "takes without a claim", "goes on without a claim",
    "pairs before the standby has everything", "the register replaces claims",
    "forgets that it was about to take over", "any move's pieces",
    "pairs again with an old journal", "begins before the shard is given",
)  # fmt: skip
PLACES_MUTANTS = (
    "an empty first place does not ask the register", "stands by while the shard is on its way",
    "the register does not learn who has the shard",
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
    is_down: bool = False  # Whether its process has not started yet.


@dataclass
class Asked:
    """A write to the register that is under way."""

    decide: Decide
    then: Then
    newest: Claim | None = None
    has_read: bool = False


@dataclass
class Pieces:
    """The newest updates of a journal, on their way."""

    to: int
    move: str
    begin: int
    updates: list[int]


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
        self.confirms: Asked | None = None  # Beside all else.
        if marks.taken and marks.journal is not None:
            self.confirm()
        self.to: int | None = None  # Where it moves, or is followed, or was last.
        self.move = ""
        self.kept = 0  # Updates that the other machine has.
        self.is_whole = False  # Whether answers wait for that.
        self.target: list[int] | None = None
        if marks.standby is not None:
            self.to, self.move = marks.standby
        if marks.given is not None:
            self.to, self.move = marks.given

    def confirm(self) -> None:
        """Begins to write that this machine has got the shard."""
        move = self.marks.taken
        self.confirms = Asked(lambda newest: take(newest, move, "it was moved"), lambda _: None)

    @property
    def serves(self) -> bool:
        return self.marks.journal is not None and self.giving.serves


class World:
    """Three machines, a register, and the answers that clients got."""

    def __init__(self, seed: int, mutant: str = "", *, has_places: bool = False) -> None:
        self.rng = random.Random(f"standby {seed}")
        self.mutant, self.has_places = mutant, has_places
        self.register = Register()
        count = NUM_PLACES if has_places else NUM_MACHINES
        self.machines = [Machine(number, Marks(f"m{number}")) for number in range(count)]
        self.machines[0].marks.journal = []
        self.cut: set[tuple[int, int]] = set()  # Sender and receiver; NUM_MACHINES: the register.
        self.late: list[Pieces] = []
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
            self.reset(machine)
            machine.marks.is_down = self.has_places and machine.number == 0

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
        if machine.confirms is not None and self.rng.random() < 0.5:
            if self.ask(machine, machine.confirms):
                machine.confirms = None
            return
        if (asked := machine.asked) is not None:
            if self.ask(machine, asked) and machine.asked is asked:
                machine.asked = None
            return
        phase = machine.giving.phase
        if machine.marks.is_down:
            self.start_first_place(machine)
        elif self.has_places and self.wants_to_stand_by(machine):
            self.ask_to_stand_by(machine)
        elif machine.taking.waits_for(machine.taking.id) and self.rng.random() < 0.15:
            self.take_over(machine)
        elif machine.marks.journal is not None or phase is Giver.GIVEN:
            {
                Giver.SERVING: self.serve,
                Giver.COPYING: self.copy,
                Giver.FOLLOWED: self.followed,
                Giver.FROZEN: self.give,
                Giver.ASKING: self.part,
                Giver.GIVEN: self.begin_there,
            }.get(phase, lambda _: None)(machine)

    def reaches(self, sender: int, receiver: int) -> bool:
        is_down = receiver < len(self.machines) and self.machines[receiver].marks.is_down
        return not is_down and (sender, receiver) not in self.cut and self.rng.random() > 0.05

    def settle(
        self, machine: Machine, decide: Decide, then: Callable[[Claim | None], None]
    ) -> None:
        machine.asked = Asked(decide, then)

    def ask(self, machine: Machine, asked: Asked) -> bool:
        """Reads the register, or writes the decision; each may fail, done or not.

        Returns:
            Whether it is known to be written, or needless.
        """
        own = machine.number
        if not self.reaches(own, NUM_MACHINES):
            asked.has_read = False
            return False
        newest = self.register.newest()
        if not asked.has_read:
            if self.reaches(NUM_MACHINES, own):
                asked.newest, asked.has_read = newest, True
            return False
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
                return False  # It was told so, and reads again.
            if not self.reaches(NUM_MACHINES, own) or not is_free:
                return False
        asked.then(wanted)
        return True

    def serve(self, machine: Machine) -> None:
        others = [it for it in self.machines if it is not machine]
        is_alone = self.has_places and machine.to is None
        if is_alone or self.rng.random() < 0.6:
            self.push(machine)
        else:
            self.get_standby(machine, self.rng.choice(others))  # Again, where it was one.

    def get_standby(self, machine: Machine, other: Machine) -> None:
        def claimed(claim: Claim | None) -> None:
            if claim is not None and machine.giving.phase is Giver.SERVING:
                self.offer(machine, other, claim)

        own, at = machine.marks.name, str(machine.number)
        self.settle(machine, lambda newest: alone(newest, own, at, "it is to get one"), claimed)

    # ----- two places

    def start_first_place(self, machine: Machine) -> None:
        """Starts the process of the first place, which has no marks."""
        if self.mutant != "an empty first place does not ask the register":
            if not self.reaches(machine.number, NUM_MACHINES):
                return  # It ends with an error, and is started again.
            try:
                there = left_to(self.register.newest(), "1")
            except ConfigError:
                return
            if there is not None:
                machine.marks.given = 1, there.holder
        machine.marks.is_down = False
        if machine.marks.given is None:
            machine.marks.journal = []
        machine.start()

    def wants_to_stand_by(self, machine: Machine) -> bool:
        giving, journal = machine.giving, machine.marks.journal
        if self.mutant == "stands by while the shard is on its way":
            if giving.phase is Giver.GIVEN:
                giving = Giving(Giver.MOVED)
            if machine.taking.phase is Taker.PREPARED:
                return True
        return is_free(
            giving, machine.taking, begins_here=not machine.number, has_jobs=journal is not None
        )

    def ask_to_stand_by(self, machine: Machine) -> None:
        machine.marks.journal = None
        other = self.machines[1 - machine.number]
        is_there = self.reaches(machine.number, other.number) and other.serves
        if is_there and other.giving.phase is Giver.SERVING and other.asked is None:
            self.get_standby(other, machine)

    # ----- a pair

    def offer(self, machine: Machine, other: Machine, claim: Claim) -> None:
        if not self.reaches(machine.number, other.number) or other.marks.journal is not None:
            return
        self.num_moves += 1
        move = f"move {self.num_moves}"
        if self.register.newest() != claim:
            return  # The other machine sees that the offer is an old one.
        other.taking.offer(move, has_jobs=False)
        other.asked = None
        is_old = self.mutant == "pairs again with an old journal" and other.marks.incoming
        if not is_old:
            other.marks.incoming = []
        other.marks.prepared = ""
        if self.reaches(other.number, machine.number):
            machine.giving.start()
            machine.to, machine.move, machine.kept, machine.is_whole = other.number, move, 0, False
            if is_old:
                machine.kept = len(machine.marks.journal or [])

    def put(self, machine: Machine) -> bool:
        """Sends all that the other machine lacks; returns whether that was answered.

        A call that is given up may still arrive, later.
        """
        assert machine.to is not None
        assert machine.marks.journal is not None
        pieces = Pieces(
            to=machine.to,
            move=machine.move,
            begin=machine.kept,
            updates=machine.marks.journal[machine.kept :],
        )
        if not self.reaches(machine.number, machine.to):
            if self.rng.random() < 0.5:
                self.late.append(pieces)
            return False
        if not self.arrive(pieces) or not self.reaches(machine.to, machine.number):
            return False
        machine.kept = len(machine.marks.journal)
        return True

    def arrive(self, pieces: Pieces) -> bool:
        other = self.machines[pieces.to]
        try:
            if self.mutant != "any move's pieces":
                other.taking.require(pieces.move)
        except RemoteProtocolError:
            return False
        incoming = other.marks.incoming
        if incoming is None:
            return False
        incoming[pieces.begin :] = pieces.updates
        return True

    def copy(self, machine: Machine) -> None:
        if self.rng.random() < 0.2:
            self.push(machine)
        elif (
            (self.mutant == "pairs again with an old journal" and machine.kept)
            or self.put(machine)
            or self.mutant == "pairs before the standby has everything"
        ):
            assert machine.to is not None
            machine.is_whole = True
            machine.giving.copied()
            machine.marks.standby = machine.to, machine.move
            own, move, at, there = machine.marks.name, machine.move, machine.number, machine.to
            self.settle(
                machine, lambda newest: pair(newest, own, str(at), move, str(there)),
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
        elif chance < 0.9:
            if not self.put(machine):
                self.part(machine)
        elif chance < 0.95:
            self.note(machine, "is drained")
            machine.giving.freeze()
        else:
            self.part(machine)

    def give(self, machine: Machine) -> None:
        """Sends the newest changes, makes the target complete, and gives the shard away."""
        assert machine.to is not None
        other, is_early = (
            self.machines[machine.to],
            self.mutant == "begins before the shard is given",
        )
        if not self.put(machine):
            self.part(machine)
            return
        try:
            if not self.reaches(machine.number, machine.to):
                raise RemoteProtocolError("no answer")
            if other.taking.phase is not Taker.PREPARED:
                other.taking.prepare(machine.move)
                other.marks.prepared = machine.move
            if is_early:
                self.take_up(other)
            if not self.reaches(machine.to, machine.number):
                raise RemoteProtocolError("no answer")
        except RemoteProtocolError:
            self.part(machine)
            return
        machine.marks.given, machine.marks.standby = (machine.to, machine.move), None
        machine.giving.give()

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

        own, at = machine.marks.name, str(machine.number)
        if self.mutant == "goes on without a claim":
            machine.giving.give_up()
            machine.is_whole, machine.marks.standby = False, None
            return
        machine.giving.phase = Giver.ASKING  # It answers nothing meanwhile.
        self.settle(machine, lambda newest: alone(newest, own, at, "it is away"), known)

    def begin_there(self, machine: Machine) -> None:
        assert machine.to is not None
        other = self.machines[machine.to]
        if not self.reaches(machine.number, machine.to):
            return
        try:
            if other.taking.begin(machine.move):
                self.take_up(other)
                if self.mutant != "the register does not learn who has the shard":
                    other.confirm()
        except RemoteProtocolError:
            known = (other.marks.taken, other.marks.prepared)
            if not self.has_places and machine.move not in known:
                self.reset(machine)  # That machine was lost since: a person empties this one.
            return
        if self.reaches(machine.to, machine.number):
            own, move, there = machine.marks.name, machine.move, str(machine.to)
            self.settle(machine, lambda newest: give(newest, own, move, there), lambda _: gone())

        def gone() -> None:
            if self.has_places:
                machine.giving.begun()
            else:
                self.reset(machine)  # A person stops it, and starts another one.

    def reset(self, machine: Machine) -> None:
        """Deletes all that a machine has."""
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
        machine.is_whole, machine.to = False, None

    def is_paired(self) -> bool:
        """Whether one place has the shard, and the register lets the other one take it."""
        newest = self.register.newest()
        phases = {it.giving.phase for it in self.machines}
        return newest is not None and bool(newest.heir) and Giver.FOLLOWED in phases

    # ----- the run

    def note(self, machine: Machine, text: str) -> None:
        self.trace.append(f"machine {machine.number} {text}")

    def run(self) -> None:
        for _ in range(NUM_EVENTS):
            if self.rng.random() < 0.1:
                self.disturb()
            if self.late and self.rng.random() < 0.1:
                self.arrive(self.late.pop(self.rng.randrange(len(self.late))))
            self.step(self.rng.choice(self.machines))
        self.cut.clear()
        is_served, is_paired, number = False, not self.has_places, 0
        while number < SETTLE_ROUNDS and not (is_served and is_paired):
            for machine in self.machines:
                self.step(machine)
            number += 1
            is_late = number > CALM_ROUNDS
            is_served = is_served or (is_late and any(it.serves for it in self.machines))
            is_paired = is_paired or (is_late and self.is_paired())
        if not is_served:
            raise LostError("no machine serves at the end")
        if not is_paired:
            raise LostError("the shard has no standby at the end")
        whole = [it for it in self.machines if it.marks.journal is not None and it.serves]
        for machine in whole:
            journal = machine.marks.journal or []
            if len(set(journal)) != len(journal):
                raise LostError(f"an update counts twice on machine {machine.number}")


def find_failure(seed: int, mutant: str = "", *, has_places: bool = False) -> str:
    """Runs one seed; returns its failure with the events before it, or nothing."""
    world = World(seed, mutant, has_places=has_places)
    try:
        world.run()
    except (LostError, AssertionError) as problem:
        return f"seed {seed}: {problem}\n" + "\n".join(world.trace)
    return ""
