"""A pipeline whose workers are killed or stopped: the drivers' own code, one thread at a time.

Each worker is a `ContinuingDriver` (psworker/pipeline/run/continuing.py) in a thread that stops at
every message and every answer; the world draws the thread that goes on. So a seed gives the same
run each time, and a worker can be killed at every point, or stopped until it is declared lost in
both of its jobs. The stages are slices of the product
(`SliceClock`), and the workers meet through its `Directory`. Time does not pass: a lost worker is
declared so to each job some drawn number of actions after its death.

`run` raises an AssertionError if a slice counts a minibatch not at all or twice, if all wait, or if
a checkpoint that a worker has saved does not hold just the minibatches before it in every slice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Generator
from concurrent import futures
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pscore.errors import ReplacedError
from pscore.pb.ps.v1 import control_pb2
from pscore.rules import SSGD
from pscore.types import FloatArray, Pull, Push, Role
from psserver.decisions.directory import Directory, Peer
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Update
from psserver.decisions.slice_clock import SliceClock
from psworker.connection.membership.session import Session
from psworker.gossip.base import Gathering, Meet, Tag, Want
from psworker.peers.peers import Peers
from psworker.pipeline.run.checkpoint import Tensors
from psworker.pipeline.run.continuing import ContinuingDriver
from psworker.pipeline.run.driver import Work
from psworker.pipeline.run.members import ENDED
from psworker.pipeline.run.schedule import Place, Stash
from tests.inside import has_members

JOB, NUM_SLICES, ACTIONS_MAX = "sim", 2, 20_000
SAVE_EVERY = 3  # Minibatches from checkpoint to checkpoint.
THREADS_MAX = 64  # Workers of a run, those that start again included.
DELAY_MAX = 60  # Actions from a death until a job knows of it, and until the next start.
STAGE, ALL = "stage", "all"  # The jobs of a worker: that of its stage, and that of all stages.
HYPER = np.array([[0.1]])


class KilledError(Exception):
    """The worker is killed where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A death."""

    at: int  # Number of the action before which it happens.
    rank: int
    returns: bool = True  # Whether it starts again.
    # Whether it is only stopped, and continues where it was when it has been lost.
    is_stop: bool = False


@dataclass
class Actor:
    """A thread of which the world decides when it goes on."""

    rank: int
    incarnation: int  # Number of its process.
    member: int  # Number of its part in the job of all stages.
    is_stopped: bool = False
    lost: set[str] = field(default_factory=set)  # Jobs in which it has yet to learn of its loss.
    asks: str = ""  # The job whose shards it asks.
    ready: Callable[[], bool] = field(default=lambda: True)
    has_begun: bool = False  # Whether it has met the others.
    is_killed: bool = False
    is_over: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class StageWorkers:
    """The workers of a stage's job."""

    num_workers: int
    live: set[int]
    aside: set[int] = field(default_factory=set)
    is_elastic: bool = False

    def ranks(self) -> list[int]:
        """Returns the replicas that a step waits for."""
        return sorted(self.live - self.aside)

    def resting(self) -> frozenset[int]:
        """Returns none: no replica waits at a barrier."""
        return frozenset()

    def least(self) -> int:
        """Returns 0: any number counts."""
        return 0


class StageShards:
    """The slices of a stage.

    Attributes:
        counted: Additions with a weight, by slice and minibatch.
        acknowledged: Tokens of pushes.
        answers: By token of the pull.
        pulled: Minibatches in the weights of an answer, likewise.
        has_ended: Whether its workers have left, the last of them when it had finished.
    """

    def __init__(self, num_replicas: int) -> None:
        self.members = StageWorkers(num_replicas, set(range(num_replicas)))
        self.clocks = [SliceClock(SSGD(), self.members) for _ in range(NUM_SLICES)]
        self.counted: Counter[tuple[int, int]] = Counter()
        self.acknowledged: set[Any] = set()
        self.answers: dict[Any, Answer] = {}
        self.pulled: dict[Any, frozenset[int]] = {}
        self.has_ended = False
        self._sums: dict[tuple[int, int], set[int]] = {}  # By slice and open step.
        self._weights: list[set[int]] = [set() for _ in range(NUM_SLICES)]
        weights = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
        for index, clock in enumerate(self.clocks):
            self.note(index, clock.push(weights, "weights"))

    def note(self, index: int, actions: list[Action]) -> None:
        """Carries out the actions of a slice."""
        for action in actions:
            if isinstance(action, Add) and action.weight > 0:
                self.counted[index, action.push.minibatch] += 1
                sums = self._sums.setdefault((index, action.open_step), set())
                sums.add(action.push.minibatch)
            elif isinstance(action, Update):
                self._weights[index] |= self._sums.pop((index, action.open_step), set())
            elif isinstance(action, Acknowledge):
                self.acknowledged.add(action.token)
            elif isinstance(action, Answer):
                self.answers[action.token] = action
                self.pulled[action.token] = frozenset(self._weights[index])

    def recheck(self) -> None:
        """Decides again, after the workers have changed."""
        for index, clock in enumerate(self.clocks):
            self.note(index, clock.recheck())


class StageSteps:
    """The steps of a stage, as one replica makes them."""

    def __init__(self, world: ContinuedWorld, actor: Actor, shards: StageShards, own: int) -> None:
        self._world, self._actor, self._shards, self._own = world, actor, shards, own
        self._next, self._numbers = 0, itertools.count()
        self._versions = [0] * NUM_SLICES
        self.pulled = [frozenset[int]()] * NUM_SLICES  # Minibatches in the weights of each slice.
        self._is_lost = False

    def join(self) -> None:
        """Joins, and pulls the weights."""
        self._shards.members.live.add(self._own)
        self._shards.has_ended = False
        for clock in self._shards.clocks:
            clock.welcome(self._own)
        self._begin()

    def step_aside(self) -> None:
        """Asks the slices not to wait for this worker's gradients; rejoins first if it is lost."""
        if self._is_lost:
            self._is_lost = False
            self.join()
        self._pause()
        self._shards.members.aside.add(self._own)
        self._shards.recheck()

    def come_back(self, minibatch: int) -> None:
        """Returns to the steps, with the newest weights."""
        self._pause()
        self._shards.members.aside.discard(self._own)
        for clock in self._shards.clocks:
            clock.welcome(self._own)
            clock.minibatches.add_before(minibatch)
        self._begin()

    def step(self, minibatch: int, share: float) -> None:
        """Pushes to each slice, and pulls what follows; a worker that is lost just rejoins."""
        with contextlib.suppress(ReplacedError):
            self._step(minibatch)
        if self._is_lost:
            self._is_lost = False
            self.join()

    def _step(self, minibatch: int) -> None:
        sent = []
        for index, clock in enumerate(self._shards.clocks):
            self._pause()
            token = ("push", self._actor.incarnation, index, next(self._numbers))
            push = Push(
                worker=self._own,
                step=self._next,
                base_version=self._versions[index],
                hyper=HYPER,
                minibatch=minibatch,
            )
            self._shards.note(index, clock.push(push, token))
            sent.append(token)
        self._next += 1
        for index in range(NUM_SLICES):
            self._pull(index, self._next)
        done = self._shards.acknowledged
        self._pause(lambda: done.issuperset(sent))

    def end(self) -> None:
        """Leaves the stage's job."""
        self._world.pause(self._actor)
        self._shards.members.live.discard(self._own)
        self._shards.has_ended = not self._shards.members.live
        self._shards.recheck()

    def _begin(self) -> None:
        clocks = [self._pull(index, 0).clock for index in range(NUM_SLICES)]
        self._next = max(clocks)
        for index, clock in enumerate(clocks):
            if (clock, self._versions[index]) != (self._next, self._next):
                self._pull(index, self._next, begins=True)

    def _pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Gives the turn away."""
        try:
            self._world.pause(self._actor, ready, STAGE)
        except ReplacedError:
            self._is_lost = True
            raise

    def _pull(self, index: int, step: int, *, begins: bool = False) -> Answer:
        self._pause()
        token = ("pull", self._actor.incarnation, index, next(self._numbers))
        pull = Pull(worker=self._own, clock=step, min_version=step, begins=begins)
        clock, answers = self._shards.clocks[index], self._shards.answers
        self._shards.note(index, clock.pull(pull, token))
        self._pause(lambda: token in answers)
        self._versions[index] = answers[token].version
        self.pulled[index] = self._shards.pulled[token]
        return answers[token]


class ShardLink:
    """A worker's connection to the shard that has one slice of each stage."""

    def __init__(self, world: ContinuedWorld, actor: Actor, index: int) -> None:
        self._world, self._actor, self._index = world, actor, index
        self.control = SimpleNamespace(Status=None)

    def call(self, method: None, request: control_pb2.StatusRequest) -> control_pb2.StatusReply:
        """Returns the state of the slices."""
        self._world.pause(self._actor)
        reply = control_pb2.StatusReply()
        for stage, shards in enumerate(self._world.stages):
            counted = shards.clocks[self._index].minibatches.clock
            state = ENDED if shards.has_ended else ""
            job = reply.jobs.add(job=f"{JOB}.s{stage}", state=state)
            job.tables.add(num_slices=1, minibatches=counted)
        return reply


class Line:
    """A worker's connections to the others, and its session."""

    def __init__(self, world: ContinuedWorld, actor: Actor) -> None:
        self._world, self._actor = world, actor
        self.job, self.rank, self.waits, self.timeline = JOB, actor.rank, "", None
        self.epoch = self.since = 0
        self.links = [ShardLink(world, actor, index) for index in range(NUM_SLICES)]

    @property
    def has_moved(self) -> bool:
        """Whether the members have changed."""
        return self._world.directory.epoch > self.epoch

    def run(self, script: Generator[Any, Any, Any]) -> Any:
        """Drives a script to its end, and returns its result."""
        answer = None
        try:
            while True:
                wait = script.send(answer)
                answer = self._want(wait) if isinstance(wait, Want) else self._meet(wait)
        except StopIteration as end:
            return end.value

    def give(self, to: int, tag: Tag, values: FloatArray) -> None:
        """Sends an array."""
        self._world.pause(self._actor)
        self._world.mail[to, self.rank, tag] = values.copy()

    def check(self) -> None:
        """Waits until the members change; a real worker looks now and then."""
        state = self._world.state()
        self._world.pause(self._actor, lambda: self.has_moved or self._world.state() != state, ALL)

    def rejoin(self) -> None:
        """Joins the job of all stages again."""
        self._actor.member = next(self._world.incarnations)
        self._world.live[self.rank] = self._actor.member

    def restart(self, table: int) -> None:
        """Begins again without having met anyone."""
        self.epoch = self.since = 0

    def close(self) -> None:
        """Closes nothing."""

    def leave(self, reason: str = "finished", *, failed: bool = False) -> None:
        """Leaves the job of all stages."""
        if not self._actor.is_killed:
            self._world.pause(self._actor)
            self._world.live.pop(self.rank, None)
            self._world.directory.keep(self._world.live)

    def _want(self, wait: Want) -> FloatArray | None:
        key, mail = (self.rank, wait.source, wait.tag), self._world.mail
        self._world.pause(self._actor, lambda: key in mail or self.has_moved, ALL)
        return mail.pop(key, None)

    def _meet(self, wait: Meet) -> list[Gathering]:
        found, first, directory = [], self.epoch, self._world.directory
        while True:
            self._world.pause(self._actor, of=ALL)
            asked = self.epoch
            peer = Peer(
                rank=self.rank,
                incarnation=self._actor.member,
                host="",
                port=1,
                position=wait.position,
            )
            again = wait.again and asked == first
            directory.arrive(peer, asked, self._world.expected(), self.since, again=again)
            self.epoch = directory.epoch
            for meeting in directory.since(self.since):
                positions = {one.rank: one.position for one in meeting.peers}
                found.append(Gathering(meeting.epoch, positions))
                self.since = meeting.epoch
            if self.since == self.epoch or not (wait.waits or asked != self.epoch):
                return found
            known = self._world.known()
            if asked == self.epoch:
                differs = functools.partial(self._world.differs, known)
                self._world.pause(self._actor, differs, ALL)


class ContinuedWorld:
    """A pipeline, its shards and its deaths."""

    def __init__(
        self, replicas: tuple[int, ...], minibatches: int, seed: int, kills: list[Kill]
    ) -> None:
        """Prepares the workers.

        Args:
            seed: Seed of the order of all actions.
            kills: The deaths; one of a worker that is dead already does nothing.
        """
        self._replicas, self._rng = replicas, random.Random(seed)
        self.num_minibatches = minibatches  # Minibatches of the training.
        self._kills = sorted(kills, key=lambda kill: kill.at)
        self._events: list[tuple[int, Callable[[], None]]] = []  # By action: later ones.
        self._turn = threading.Semaphore(0)
        self._actors: dict[int, Actor] = {}
        self.incarnations = itertools.count(1)
        self._pool = futures.ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="simulated")
        self._works: dict[int, futures.Future[None]] = {}  # By incarnation.
        self._yet_to_come = set(range(sum(replicas)))
        self.stages = [StageShards(number) for number in replicas]  # Shards of each stage.
        self.directory = Directory()  # The workers that take part.
        # Incarnation of each worker of the job of all stages, by rank.
        self.live: dict[int, int] = {}
        # Arrays under way, by receiver, sender and use.
        self.mail: dict[tuple[int, int, Tag], FloatArray] = {}
        self.num_actions = 0  # Actions so far.
        self.saved: list[int] = []  # Minibatches behind each checkpoint that was written.

    def run(self) -> None:
        """Runs to the end.

        Raises:
            AssertionError: All wait, a worker has failed, or a minibatch is lost or counted twice.
        """
        try:
            for rank in range(sum(self._replicas)):
                self._start(rank)
            while self._events or not all(actor.is_over for actor in self._actors.values()):
                if not self._act():
                    break
        finally:
            for actor in self._actors.values():
                self._kill(actor)
            self._pool.shutdown()
        self._check()

    def state(self) -> tuple[int, ...]:
        """Returns the minibatches that the slices have counted."""
        return tuple(clock.minibatches.clock for one in self.stages for clock in one.clocks)

    def known(self) -> tuple[int, int, list[int]]:
        """Returns what a worker that meets others waits for: an epoch, a meeting, the expected."""
        return self.directory.epoch, self.directory.newest, self.expected()

    def differs(self, known: tuple[int, int, list[int]]) -> bool:
        """Returns whether it has changed."""
        return self.known() != known

    def expected(self) -> list[int]:
        """Returns the workers that take part or have yet to come."""
        return sorted(self._yet_to_come | self.live.keys())

    def pause(self, actor: Actor, ready: Callable[[], bool] = lambda: True, of: str = "") -> None:
        """Gives the turn away; returns when the actor is ready and drawn.

        Args:
            ready: Whether it can go on.
            of: The job whose shards it asks.

        Raises:
            KilledError: It was killed meanwhile.
            ReplacedError: It was declared lost in that job.
        """
        if actor.is_killed:
            raise KilledError
        actor.ready, actor.asks = ready, of
        self._turn.release()
        actor.turn.acquire()
        if actor.is_killed:
            raise KilledError
        if of in actor.lost:
            actor.lost.discard(of)
            raise ReplacedError(f"worker {actor.rank} was stopped for too long")

    def _act(self) -> bool:
        """Resumes one actor, or makes one event happen; returns whether there was one.

        A worker that starts again when all others have ended finds no one, and waits.
        """
        self.num_actions += 1
        assert self.num_actions < ACTIONS_MAX, "the pipeline comes to no end"
        while self._kills and self._kills[0].at <= self.num_actions:
            self._die(self._kills.pop(0))
        due = [event for event in self._events if event[0] <= self.num_actions]
        able = [one for one in self._actors.values() if not (one.is_over or one.is_stopped)]
        ready = [one for one in able if one.asks in one.lost or one.ready()]
        if not ready and not due and self._events:
            due = [min(self._events, key=lambda event: event[0])]
        if due:
            self._events.remove(due[0])
            due[0][1]()
        elif ready:
            self._resume(self._rng.choice(ready))
        else:
            waiting = [actor.rank for actor in self._actors.values() if actor.has_begun]
            waiting = [rank for rank in waiting if not self._actors[rank].is_over]
            assert not waiting, f"workers {waiting} wait for each other"
        return bool(due or ready)

    def _resume(self, actor: Actor) -> None:
        actor.turn.release()
        self._turn.acquire()
        if actor.is_over and (problem := self._works[actor.incarnation].exception()) is not None:
            raise AssertionError(f"worker {actor.rank} failed: {problem!r}") from problem

    def _start(self, rank: int) -> None:
        number = next(self.incarnations)
        actor = Actor(rank, number, number)
        self._actors[rank] = actor
        self._works[actor.incarnation] = self._pool.submit(self._work, actor)

    def _work(self, actor: Actor) -> None:
        """Trains as one worker, in a thread of its own."""
        actor.turn.acquire()
        try:
            if not actor.is_killed:
                self._train(actor)
        except KilledError:
            return
        finally:
            actor.is_over = True
            self._turn.release()

    def _train(self, actor: Actor) -> None:
        place = Place.of_rank(actor.rank, self._replicas)
        line = Line(self, actor)
        steps = StageSteps(self, actor, self.stages[place.stage], place.replica)
        steps.join()
        self.live[actor.rank] = actor.incarnation
        self._yet_to_come.discard(actor.rank)
        module = nn.Linear(1, 1)
        work = Work(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            loss=lambda output, target: output.sum(),
            versions=Stash,
            parts=lambda: ({f"stage {place.stage}": _as_tensor(steps.pulled)}, {}),
        )
        session, peers = cast(Session, line), cast(Peers, line)
        driver = ContinuingDriver(work, place, session, peers, 0, steps, lambda: 0)
        actor.has_begun = True
        for number in range(driver.first, self.num_minibatches):
            driver.step(number, torch.ones(1, 1), None)
            if (behind := number + 1) % SAVE_EVERY == 0:
                driver.save(behind, functools.partial(self._write, behind))
                was_away = actor.member != actor.incarnation or not has_members(driver)
                is_known = was_away or behind in self.saved
                assert is_known, f"the checkpoint of minibatch {behind} is missing"
        driver.finish(self.num_minibatches)

    def _write(self, behind: int, weights: Tensors, state: Tensors) -> None:
        """Checks what a checkpoint holds, of each stage."""
        expected = set(range(behind))
        assert len(weights) == len(self._replicas), f"a checkpoint has {sorted(weights)} only"
        for stage, values in weights.items():
            for index, row in enumerate(values):
                found = set(row.nonzero().flatten().tolist())
                where = f"slice {index} of {stage}"
                assert found == expected, f"minibatch {behind}: {where} has {sorted(found)}"
        self.saved.append(behind)

    def _kill(self, actor: Actor) -> None:
        """Ends an actor's thread where it is."""
        if not actor.is_over:
            actor.is_killed = True
            actor.turn.release()
            self._turn.acquire()

    def _die(self, kill: Kill) -> None:
        actor = self._actors[kill.rank]
        if actor.is_over or actor.is_killed or actor.is_stopped or actor.lost:
            return
        if kill.is_stop and not actor.has_begun:
            return
        if kill.is_stop:
            actor.is_stopped = True
        else:
            self._kill(actor)
            actor.is_over = True
        place = Place.of_rank(kill.rank, self._replicas)
        shards = self.stages[place.stage]

        def lose_replica() -> None:
            shards.members.live.discard(place.replica)
            shards.members.aside.discard(place.replica)
            shards.recheck()

        def lose_worker() -> None:
            self._yet_to_come.discard(kill.rank)
            self.live.pop(kill.rank, None)
            self.directory.keep(self.live)

        delays = [self._rng.randrange(DELAY_MAX) for _ in range(3)]
        self._events.append((self.num_actions + delays[0], lose_replica))
        self._events.append((self.num_actions + delays[1], lose_worker))

        def go_on() -> None:
            actor.is_stopped, actor.lost = False, {STAGE, ALL}

        if kill.returns:
            at = self.num_actions + max(delays[:2]) + 1 + delays[2]
            again = go_on if kill.is_stop else functools.partial(self._start, kill.rank)
            self._events.append((at, again))

    def _check(self) -> None:
        """Asserts that every slice has counted every minibatch once."""
        for stage, shards in enumerate(self.stages):
            for index in range(NUM_SLICES):
                counts = [shards.counted[index, number] for number in range(self.num_minibatches)]
                where = f"slice {index} of stage {stage}"
                assert counts == [1] * self.num_minibatches, f"{where} has counted {counts}"
                assert shards.clocks[index].minibatches.clock == self.num_minibatches, where
                assert not shards.clocks[index].open_steps, where


def _as_tensor(pulled: list[frozenset[int]]) -> torch.Tensor:
    """Returns the minibatches of each slice as ones, shape (slices, largest number + 1)."""
    found = torch.zeros(NUM_SLICES, 1 + max((max(one, default=0) for one in pulled), default=0))
    for index, one in enumerate(pulled):
        found[index, list(one)] = 1
    return found


def draw(seed: int, *, stops: bool = False) -> ContinuedWorld:
    """Returns a world drawn from a seed, with some deaths; `stops`: and as many workers stopped."""
    rng = random.Random(seed)
    replicas = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (2, 1, 1), (1, 1, 1)])
    minibatches = rng.randrange(3, 13)
    span = 40 * minibatches * len(replicas)
    kills = []
    for _ in range(rng.randrange(1, 5)):
        rank = rng.randrange(sum(replicas))
        kills.append(Kill(at=rng.randrange(1, span), rank=rank))
        if stops:
            rank = rng.randrange(sum(replicas))
            kills.append(Kill(at=rng.randrange(1, span), rank=rank, is_stop=True))
    return ContinuedWorld(replicas, minibatches, seed, kills)


def find_failure(seed: int, *, stops: bool = False) -> str:
    """Runs one seed; returns what it breaks, or nothing."""
    try:
        draw(seed, stops=stops).run()
    except AssertionError as problem:
        return f"python -m tests.sim pipelines {seed} {seed + 1}: {problem}"
    return ""
