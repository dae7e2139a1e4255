"""Workers that exchange models, in one thread and in simulated time: the real state machines.

Gossips (psworker/gossip) and the directory of peers (psserver/decisions/directory.py) are driven
here as `psworker/peers` and the first shard drive them. Messages take a random time, so they arrive
in any order; some are lost and sent again, some come twice; workers are killed, and found lost
after a lease. All of it follows from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from psserver.decisions.directory import Directory, Meeting, Peer
from pssim.sums import WorldSums
from psworker.gossip import GOSSIPS
from psworker.gossip.base import Gathering, Meet, Model, Tag, TorchSum, Wait, Waits, Want
from psworker.peers.patience import has_no_end, is_cut_off, silence_limit_s

LEASE_S, HEARTBEAT_S, POLL_S = 1.0, 0.2, 0.05
TIMEOUT_S = 2.0  # Longest wait for an acknowledgement, behind a lease.
DIRECTORY = -1  # In place of a rank.
EVENTS_MAX = 2_000_000
Gradient = Callable[[int, int, FloatArray], FloatArray]  # Arguments: rank, step, weights.
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Faults of the network and of workers."""

    lost: float = 0.0  # Share of messages whose first sending is lost.
    twice: float = 0.0  # Share of messages that come twice.
    # Time at which each worker is killed, in seconds, by rank.
    kills: Mapping[int, float] = field(default_factory=dict)
    # Time from which nothing passes on the connection that a worker has opened to another, in
    # either direction, by their ranks; `DIRECTORY` in place of the other's.
    cuts: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One event at a worker's model, for a replay."""

    # `offer` (a snapshot is taken), `half` (moved to another's snapshot), `answer` (moved by the
    # answer), `read` or `write` (the optimizer's move is added).
    what: str
    rank: int  # The worker.
    other: int = -1  # The other worker of an exchange.
    number: int = -1  # Number of the exchange; the step of a read or write.


class PeersStuckError(AssertionError):
    """Workers are there, and no event is left or too many were needed."""


class SimulatedPeer:
    """One worker: the driver of its gossip, and its `Post`."""

    def __init__(self, world: PeerWorld, rank: int, start: FloatArray) -> None:
        """Starts with weights `start`, `(numel,)`."""
        self.world, self.rank = world, rank
        self.incarnation = 1 + next(world.numbers)
        self.weights = torch.from_numpy(start.copy())
        self._parameter = torch.nn.Parameter(self.weights)  # The same memory.
        self._optimizer = world.make_optimizer([self._parameter])
        self._step = 0  # The step of the newest gradient.
        self.grad: FloatArray | None = None
        self.epoch = self.since = self.heard_epoch = 0
        self.is_dead = self.has_ended = self.is_short = False
        self.is_stopped = False  # It waits for the directory, or for more workers.
        self.finished_s: list[float] = []
        self.spans: list[tuple[float, float]] = []  # Times of its gradients.
        self.path: list[FloatArray] = []
        self.mailbox: dict[tuple[int, Tag], FloatArray] = {}
        self.taken: set[tuple[int, Tag]] = set()
        self.peers: dict[int, int] = {}  # Incarnations, by rank.
        self.met: dict[int, int] = {}  # The same, with those that are gone.
        self.open: Counter[int] = Counter()  # Arrays that have not arrived, by rank.
        self.waits: Waits | None = None
        self.wanted: Wait | None = None
        self.wanted_s = 0.0  # Time from which it has waited for that.
        self._asked: Meet | None = None  # The last one that the directory knows of.
        model = Model(
            weights=self.weights,
            first_step=0,
            update=self._update,
            gather=lambda: np.append(self._own_grad(), np.float32(1)),
            scatter=self._scatter,
            pack=lambda: self.weights.numpy().copy(),
            unpack=self._unpack,
            lock=nullcontext(),
        )
        self.gossip = GOSSIPS[world.rule.exchange_name](world.rule, rank, model, self)

    # ----- Post

    @property
    def has_moved(self) -> bool:
        """Whether a heartbeat has brought a newer epoch."""
        return self.heard_epoch > self.epoch

    def members(self) -> list[int]:
        """Returns the ranks of the members that this worker knows."""
        return sorted(self.peers)

    def open_store(self) -> int:
        """Returns a port, as of a store."""
        return 1

    def is_far(self, to: int) -> bool:
        """Returns the same for the two directions; some workers are far from each other."""
        return (self.rank + to) % 3 == 0

    def give(self, to: int, tag: Tag, values: FloatArray) -> None:
        """Sends an array, repeated until it arrives, perhaps more than once."""
        key, kept = (self.incarnation, tag), values.copy()
        target = self.world.at(to, self.peers.get(to, 0))

        is_open = True
        self.open[to] += 1
        limit_s = silence_limit_s(self.rank, to, LEASE_S, TIMEOUT_S)

        def require() -> None:
            """Ends this worker if the other is a member still, and has not acknowledged it."""
            nonlocal is_open
            if is_open and target is not None and self.peers.get(to) == target.incarnation:
                self.world.kill(self.rank)
            self.open[to] -= is_open
            is_open = False

        if self.world.trouble.cuts:
            self.world.at_time(limit_s, require)

        def arrive() -> None:
            nonlocal is_open
            self.open[to] -= is_open
            is_open = False
            if target is not None and not target.is_dead and key not in target.taken:
                target.mailbox.setdefault(key, kept)
                target.proceed()

        if not self.world.is_cut(self.rank, to):
            self.world.send(self.rank, to, arrive)

    def offer(self, to: int, number: int, part: int, values: FloatArray) -> None:
        """Sends a snapshot; the answer comes back, or None if the other is gone."""
        kept, target = values.copy(), self.world.at(to, self.peers.get(to, 0))
        self.world.log.append(Entry("offer", self.rank, to, number))

        def give_up() -> None:
            self.world.at_time(LEASE_S, lambda: self._answered(to, number, part, None))

        def arrive() -> None:
            if target is None or target.is_dead or target.has_ended:
                give_up()
                return
            before = target.gossip.stats.partner, target.world.mixes(target)
            own = target.gossip.on_offer(self.rank, self.incarnation, number, part, kept)
            if target.world.mixes(target) != before[1]:
                self.world.log.append(Entry("half", target.rank, self.rank, number))
            answer = None if own is None else own.copy()
            if self.world.is_cut(self.rank, to):  # It answers on the connection of the offer.
                give_up()
                return
            self.world.send(
                target.rank, self.rank, lambda: self._answered(to, number, part, answer)
            )

        if self.world.is_cut(self.rank, to):
            give_up()
        else:
            self.world.send(self.rank, to, arrive)

    def _answered(self, other: int, number: int, part: int, values: FloatArray | None) -> None:
        if self.is_dead:
            return
        before = self.world.mixes(self)
        self.gossip.on_answer(number, part, values)
        if self.world.mixes(self) != before:
            self.world.log.append(Entry("answer", self.rank, other, number))
        self.proceed()

    # ----- training

    def start(self) -> None:
        """Meets the others."""
        self._drive(self.gossip.start(), self._begin)

    def _begin(self) -> None:
        """Reads the weights, and computes a gradient."""
        if self.gossip.number >= self.world.steps:
            self._flush(lambda: self._drive(self.gossip.part(), lambda: self._flush(self._end)))
            return
        self.gossip.begin()
        if self.world.keeps_paths:
            self.path.append(self.weights.numpy().copy())
        self.world.log.append(Entry("read", self.rank, number=self.gossip.number))
        # Some gossips have counted the step already when they update.
        step = self._step = self.gossip.number
        began_s = self.world.now_s

        def computed() -> None:
            self.is_stopped = self.world.is_cut_off(self)
            if self.is_stopped:
                self.world.at_time(POLL_S, computed)
            elif not self.is_dead:
                self.spans.append((began_s, self.world.now_s))
                self.grad = self.world.gradient(self.rank, step, self.weights.numpy().copy())
                self._drive(self.gossip.step(), self._ended)

        self.world.at_time(self.world.compute_s[self.rank], computed)

    def _flush(self, then: Callable[[], None]) -> None:
        """Does something when all that was sent to members has arrived."""
        if self.has_moved:
            self._learn()
        if any(self.open[rank] for rank in self.peers) and not self.is_dead:
            self.world.at_time(POLL_S, lambda: self._flush(then))
        elif not self.is_dead:
            then()

    def _end(self) -> None:
        self.has_ended = True

    def _ended(self) -> None:
        self.finished_s.append(self.world.now_s)
        self._begin()

    def _update(self) -> None:
        self.world.log.append(Entry("write", self.rank, number=self.gossip.number))
        self._parameter.grad = torch.from_numpy(self._own_grad())
        for group in self._optimizer.param_groups:
            group["lr"] = self.world.lr_at(self._step)
        self._optimizer.step()

    def _unpack(self, values: FloatArray) -> None:
        self.weights.copy_(torch.from_numpy(values))

    def _own_grad(self) -> FloatArray:
        assert self.grad is not None
        return self.grad.astype(np.float32)

    def _scatter(self, total: FloatArray) -> None:
        self.grad = total[:-1] / total[-1]

    # ----- the driver

    def _drive(self, waits: Waits, then: Callable[[], None]) -> None:
        self.waits, self._then = waits, then
        self._resume(None)

    def _resume(self, answer: Any) -> None:
        assert self.waits is not None
        try:
            self.wanted, self.wanted_s = self.waits.send(answer), self.world.now_s
        except StopIteration:
            self.waits = self.wanted = None
            self._then()
            return
        self.proceed()

    def proceed(self) -> None:
        """Resumes the gossip if what it waits for is there."""
        wanted = self.wanted
        if self.is_dead or self.waits is None or wanted is None:
            return
        self.wanted = None
        if isinstance(wanted, Want):
            key = self.met.get(wanted.source, 0), wanted.tag
            if key in self.mailbox:
                self.taken.add(key)
                self._resume(self.mailbox.pop(key))
                return
            if self.has_moved or not wanted.waits:
                self._resume(None)
                return
        elif isinstance(wanted, Meet):
            if self._meet(wanted):
                return
            self.world.at_time(POLL_S, self.proceed)
        elif isinstance(wanted, TorchSum):
            found = self.world.sums.ask(self.rank, wanted, self.proceed)
            if found is not None or self.has_moved:
                self._resume(found)
                return
        elif wanted.is_over() or self.has_moved:
            self._resume(None)
            return
        self.wanted = wanted

    def _learn(self) -> None:
        """Reads the members in the directory."""
        self.peers = {one.rank: one.incarnation for one in self.world.directory.members()}
        self.met |= self.peers

    def _meet(self, wanted: Meet) -> bool:
        """Asks the directory; returns whether the gossip was resumed."""
        directory = self.world.directory
        self.is_stopped = self.world.is_cut(self.rank, DIRECTORY)
        if self.is_stopped:
            return False
        directory.keep(self.world.live())
        host = f"worker {self.rank}"
        peer = Peer(
            rank=self.rank,
            incarnation=self.incarnation,
            host=host,
            port=1,
            position=wanted.position,
            parts=wanted.parts,
            stays=wanted.stays,
        )
        if wanted.parts and not wanted.waits:
            directory.part(self.rank, self.incarnation)
            self._resume([])
            return True
        first = 0
        for again in (wanted is not self._asked and wanted.again, False):
            # The second time under the epoch of the first answer.
            expected, self.is_short = self.world.expected(), self.world.is_short
            directory.arrive(
                peer, self.epoch, expected, self.since, is_short=self.is_short, again=again
            )
            self.epoch = directory.epoch
            first = self._first_meeting() if wanted.is_first else 0
            if first:  # The members may have changed since.
                break
        self._asked = wanted
        self._learn()
        meetings = [one for one in directory.since(self.since) if one.epoch <= (first or one.epoch)]
        gatherings = [_gathering(meeting) for meeting in meetings]
        if first:
            self.epoch = self.since = first
            self._resume(gatherings)
            return True
        has_left = wanted.parts and any(self.rank in found.leaving for found in gatherings)
        if wanted.waits and not has_left and directory.newest != directory.epoch:
            self.is_stopped = self.is_short
            return False
        if wanted.needs_least and self.is_short:
            self.is_stopped = True
            return False
        self.since = directory.newest
        self._resume(gatherings)
        return True

    def _first_meeting(self) -> int:
        """Returns the epoch of the first meeting with this worker that it has not read; else 0."""
        return next(
            (
                meeting.epoch
                for meeting in self.world.directory.since(self.since)
                if any(one.incarnation == self.incarnation for one in meeting.peers)
            ),
            0,
        )


def _gathering(meeting: Meeting) -> Gathering:
    return Gathering(
        meeting.epoch,
        {one.rank: one.position for one in meeting.peers},
        frozenset(one.rank for one in meeting.peers if one.parts),
    )


class PeerWorld:
    """All workers, the directory, the network and the clock.

    Attributes:
        log: Events at models, in their order.
        min_workers: Least number of workers of an elastic job; 0: it is not elastic.
        messages: Times of sending and arriving, sender and receiver of each array.
        workers: The workers, by rank; a killed one stays.
    """

    def __init__(
        self,
        rule: Decentralised,
        gradient: Gradient,
        start: FloatArray,
        *,
        num_workers: int,
        steps: int,
        lr: float | Callable[[int], float],
        make_optimizer: MakeOptimizer = torch.optim.SGD,
        seed: int = 0,
        compute_s: Sequence[float] | None = None,
        latency_s: float = 0.05,
        trouble: Trouble | None = None,
        starts: Sequence[FloatArray] | None = None,
        keeps_paths: bool = True,
        min_workers: int = 0,
    ) -> None:
        """Makes the workers; nothing runs yet.

        Args:
            start: Weights with which all workers begin, `(numel,) float32`.
            lr: Learning rate, or that of each step.
            make_optimizer: Makes each worker's optimizer; plain SGD if left out.
            compute_s: Seconds of each worker's gradient; None: 0.1 for all.
            latency_s: Longest time of a message; each takes a random part of it.
            trouble: Faults; None: none.
            starts: Weights with which each worker begins, in place of `start`.
            keeps_paths: Whether workers keep the weights of each step in `path`.
            min_workers: Least number of workers of an elastic job; 0: it is not elastic.
        """
        self.rule, self.gradient, self.steps = rule, gradient, steps
        self.lr_at = lr if callable(lr) else lambda step: lr
        self.make_optimizer, self.keeps_paths = make_optimizer, keeps_paths
        self.numbers = itertools.count()
        self.compute_s = compute_s or [0.1] * num_workers
        self.trouble, self.min_workers = trouble or Trouble(), min_workers
        self.now_s = 0.0
        self.log: list[Entry] = []
        self.messages: list[tuple[float, float, int, int]] = []
        self.directory = Directory()
        self._random = random.Random(seed)
        self._latency_s = latency_s
        self.sums = WorldSums(self._random, self.at_time, latency_s, self.trouble.lost)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        models = starts or [start] * num_workers
        self.workers = [SimulatedPeer(self, rank, models[rank]) for rank in range(num_workers)]
        self._lost: set[int] = set()  # Ranks whose lease is over.

    def run(self) -> PeerWorld:
        """Runs until all workers that live have ended, or wait without end as they should.

        Raises:
            StuckError: They do not come to their end.
        """
        for worker in self.workers:
            self.at_time(self._random.random() * 0.1, worker.start)
            self._beat(worker)
        for rank, when_s in self.trouble.kills.items():
            self.at_time(when_s, partial(self.kill, rank))
        for (rank, other), when_s in self.trouble.cuts.items():
            if other == DIRECTORY:
                self.at_time(when_s + LEASE_S, partial(self._lost.add, rank))
        for _ in range(EVENTS_MAX):
            if all(w.is_dead or w.has_ended or w.is_stopped for w in self.workers):
                return self
            if not self._events:
                break
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        waiting = {w.rank: w.wanted for w in self.workers if not (w.is_dead or w.has_ended)}
        raise PeersStuckError(f"at {self.now_s:.1f} s workers wait: {waiting}")

    def at_time(self, after_s: float, act: Callable[[], None]) -> None:
        """Does something later."""
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), act))

    def send(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        """Delivers a message, late, again, or at the second attempt."""
        draw = self._random
        delay_s = draw.random() * self._latency_s
        if draw.random() < self.trouble.lost:
            delay_s += 0.3
        self.messages.append((self.now_s, self.now_s + delay_s, source, target))
        self.at_time(delay_s, arrive)
        if draw.random() < self.trouble.twice:
            self.at_time(delay_s + draw.random(), arrive)

    def at(self, rank: int, incarnation: int) -> SimulatedPeer | None:
        """Returns the worker of an incarnation, dead or not."""
        worker = self.workers[rank]
        return worker if worker.incarnation == incarnation else None

    def live(self) -> dict[int, int]:
        """Returns the incarnations of the workers whose lease is not over, by rank."""
        return {w.rank: w.incarnation for w in self.workers if w.rank not in self._lost}

    def expected(self) -> list[int]:
        """Returns the ranks for which a meeting waits."""
        live = self.live()
        return [rank for rank in live if not self.directory.has_parted(live[rank])]

    @property
    def is_short(self) -> bool:
        """Whether the job has fewer workers than its least; those at their end count."""
        return len(self.live()) < self.min_workers

    def is_cut(self, rank: int, other: int) -> bool:
        """Returns whether nothing passes on the connection of a worker to another."""
        return self.now_s >= self.trouble.cuts.get((rank, other), math.inf)

    def is_cut_off(self, worker: SimulatedPeer) -> bool:
        """Returns whether a worker waits for the directory before its next step."""
        rank = worker.rank
        reached = [
            other for other in worker.peers if other != rank and not self.is_cut(rank, other)
        ]
        return is_cut_off(self._silent_s(rank), LEASE_S, len(reached), self.min_workers)

    def _silent_s(self, rank: int) -> float:
        """Returns the seconds since the directory has answered a worker."""
        return max(0.0, self.now_s - self.trouble.cuts.get((rank, DIRECTORY), self.now_s))

    def _require_news(self, worker: SimulatedPeer) -> None:
        """Ends a worker that waits for another, where nobody would tell that it is gone."""
        waited_s = 0.0 if worker.wanted is None else self.now_s - worker.wanted_s
        if has_no_end(waited_s, self._silent_s(worker.rank), LEASE_S, TIMEOUT_S):
            self.kill(worker.rank)

    def model(self, worker: SimulatedPeer) -> npt.NDArray[np.float64]:
        """Returns a worker's model as pairs mix it, or as it trains on it."""
        shared = getattr(worker.gossip, "shared", None)
        found: FloatArray = worker.weights.numpy() if shared is None else shared
        return np.array(found, dtype=np.float64)

    def mixes(self, worker: SimulatedPeer) -> int:
        """Returns how often a worker's model was changed."""
        return sum(getattr(worker.gossip, "versions", ()))

    def kill(self, rank: int) -> None:
        """Ends a worker, which is found lost a lease later."""
        self.workers[rank].is_dead = True
        self.sums.kill(rank)

        def lose() -> None:
            self._lost.add(rank)

        self.at_time(LEASE_S, lose)

    def _beat(self, worker: SimulatedPeer) -> None:
        if worker.is_dead or worker.has_ended:
            return
        self.directory.keep(self.live())
        if self.is_cut(worker.rank, DIRECTORY):
            self._require_news(worker)
        else:
            worker.heard_epoch = self.directory.epoch
        worker.proceed()
        self.at_time(HEARTBEAT_S, lambda: self._beat(worker))
