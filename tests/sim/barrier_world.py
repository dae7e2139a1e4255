"""Barriers on a faulty network: requests and answers are lost, doubled and late, workers die.

Each worker passes round after round of one barrier of a real shard, and repeats a request until it
is answered. The ledger checks each answer: no worker passes before all have arrived, and all get
the same number. Between each second round and the next the workers change their job together: one
that comes in a dead one's place may not begin there.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pscore.errors import PacelineError
from psserver.decisions.membership import Member
from pssim.cluster import quiet
from pssim.network import NO_FAULTS, FaultyNetwork, Loop, Message, MessageFaults, StuckError
from pssim.shard import JOB, SimulatedShard

NAME = "round"
LIMIT_S = 300.0  # Seconds of virtual time.
LEASE_S = 3.0
DEATH = 0.2  # Probability that a worker falls silent.
RETURN = 0.7  # Probability that another process then comes in its place.
TICK_S = 0.5
RETRY_S = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierCase:
    """One simulated job whose workers meet at a barrier."""

    seed: int  # Seed of the network, and of the workers' numbers and paces.
    num_workers: int
    num_rounds: int  # Rounds that each worker passes before it leaves.
    dies_s: tuple[float | None, ...]  # Time when each worker falls silent; None: it does not.
    comes_s: tuple[float | None, ...] = ()  # Time when another takes its place; None: none does.
    crashes_s: tuple[float, ...] = ()  # Times when the shard is killed and started again.
    faults: MessageFaults = NO_FAULTS  # Faults of each message.


def draw(seed: int) -> BarrierCase:
    """Returns the case of a seed."""
    rng = random.Random(f"barrier {seed}")
    num_workers = rng.randint(2, 4)
    num_rounds = rng.randint(3, 6)
    dies_s = [rng.uniform(0.0, 3.0) if rng.random() < DEATH else None for _ in range(num_workers)]
    return BarrierCase(
        seed=seed,
        num_workers=num_workers,
        num_rounds=num_rounds,
        dies_s=tuple(dies_s),
        comes_s=tuple(
            None if at_s is None or rng.random() > RETURN else at_s + rng.uniform(0.1, LEASE_S + 2)
            for at_s in dies_s
        ),
        crashes_s=tuple(rng.uniform(0.0, 3.0) for _ in range(rng.choice((0, 0, 1, 3)))),
        faults=MessageFaults(
            drop=rng.choice((0.0, 0.1, 0.2)),
            duplicate=rng.choice((0.0, 0.1, 0.3)),
            delay_s_max=rng.choice((0.01, 0.1, 0.4)),
            until_s=rng.uniform(1.0, 8.0),
        ),
    )


@dataclass(slots=True)
class BarrierLedger:
    """Arrivals at each round as the workers sent them, and the number that each round gave."""

    brought: dict[int, dict[int, float]] = field(default_factory=dict)  # By round and incarnation.
    given: dict[int, float] = field(default_factory=dict)  # By round.
    num_came: int = 0  # Workers that came in a dead one's place while others were live.

    def came(self, rank: int, number: int) -> None:
        """A worker comes while others are live, and begins with a round."""
        self.num_came += 1
        assert number % 2 == 0, f"worker {rank} came in a change, at round {number}"

    def arrived(self, worker: int, number: int, value: float) -> None:
        """A worker sends its first request of a round; workers have their incarnations here."""
        values = self.brought.setdefault(number, {})
        assert worker not in values, f"worker {worker} arrives twice at round {number}"
        values[worker] = value

    def passed(self, worker: int, number: int, largest: float, expected: Sequence[int]) -> None:
        """A worker is told that a round is open, and the largest number.

        Args:
            largest: The number that it is given.
            expected: Workers that have not died, been lost or left, and were there at that round.
        """
        values = self.brought[number]
        early = [other for other in expected if other not in values]
        assert not early, f"worker {worker} passed round {number} before workers {early} arrived"
        given = self.given.setdefault(number, largest)
        assert largest == given, f"round {number} gave {given}, and {largest} to worker {worker}"
        least = max(values[other] for other in [worker, *expected])
        assert largest >= least, f"round {number} gave {largest}, and {least} was brought"
        assert largest in values.values(), f"no worker brought {largest} to round {number}"


class BarrierWorker:
    """One worker: it computes, arrives, and passes."""

    def __init__(self, rank: int, cluster: "BarrierCluster", incarnation: int) -> None:
        """Joins; its first round begins after a while.

        Raises:
            PacelineError: It cannot join yet.
        """
        self.rank = rank
        self.is_over = False  # Whether it has died, was declared lost, or has left.
        self.incarnation = incarnation
        self._cluster = cluster
        self._rng = random.Random(f"{cluster.case.seed} {incarnation}")
        self._value = 0.0
        cluster.shard.join(
            Member(
                rank=rank,
                incarnation=incarnation,
                restart=0,
                host="host",
                pid=rank,
                heard_s=cluster.loop.now_s,
            ),
            cluster.case.num_workers,
        )
        rounds = cluster.shard.engine.jobs[JOB].job.barriers.next_rounds()
        self.number = self.first = rounds.get(NAME, 0)  # The round that it is in, and the first.
        self._beat()
        self._compute()

    def die(self) -> None:
        """Falls silent."""
        self.is_over = True

    def _compute(self) -> None:
        self._cluster.loop.after(self._rng.uniform(0.01, 0.5), self._arrive)

    def _arrive(self) -> None:
        if not self.is_over:
            self._value = float(self._rng.randint(1, 100))
            self._cluster.ledger.arrived(self.incarnation, self.number, self._value)
            self._request(self.number)

    def _request(self, number: int) -> None:
        """Sends the request of a round, and again until it is answered."""
        if not self.is_over and number == self.number:
            self._send(f"round {number}", partial(self._ask, number, self._value))
            self._cluster.loop.after(RETRY_S, partial(self._request, number))

    def _ask(self, number: int, value: float) -> None:
        """Arrives at the shard, as `service/barrier_wait.py` does; answers when it is open."""
        cluster = self._cluster
        engine = cluster.shard.engine

        def wake() -> None:
            cluster.loop.after(0.0, look)

        def look() -> None:
            if engine is not cluster.shard.engine:
                return  # The process that waited was killed.
            holds = number % 2 == 0
            arrival = job.barriers.arrive(NAME, number, self.rank, value, wake, holds=holds)
            if arrival.is_open:
                job.barriers.stop_waiting(NAME, wake)
                answer = partial(self._passed, number, arrival.largest)
                self._send(f"answer to round {number}", answer, is_answer=True)

        try:
            engine.heard(JOB, self.rank, self.incarnation)
        except PacelineError:
            self.is_over = True  # It was silent for a lease, and was declared lost.
            return
        job = engine.jobs[JOB]
        look()

    def _passed(self, number: int, largest: float) -> None:
        if self.is_over or number != self.number:
            return  # The answer has come before.
        cluster = self._cluster
        lost = cluster.shard.lost()
        expected = [
            w.incarnation
            for w in cluster.workers
            if not (w.is_over or w.rank in lost or w.first > number)
        ]
        cluster.ledger.passed(self.incarnation, number, largest, expected)
        self.number += 1
        if self.number >= cluster.case.num_rounds:
            self.is_over = True
            cluster.shard.leave(self.rank, self.incarnation)
        else:
            self._compute()

    def _beat(self) -> None:
        """Renews the lease until the worker is over."""
        if not self.is_over:
            self._send("heartbeat", self._heard)
            self._cluster.loop.after(LEASE_S / 5, self._beat)

    def _heard(self) -> None:
        try:
            self._cluster.shard.heartbeat(self.rank, self.incarnation)
        except PacelineError:
            self.is_over = True

    def _send(self, what: str, deliver: Callable[[], None], *, is_answer: bool = False) -> None:
        message = Message(worker=self.rank, shard=0, is_answer=is_answer, what=what)
        self._cluster.network.send(message, deliver)


class BarrierCluster:
    """One shard and its workers."""

    def __init__(self, case: BarrierCase, folder: Path) -> None:
        """Makes them; the shard's journals lie in `folder`, which is empty."""
        self.case = case
        self.loop = Loop()
        self.network = FaultyNetwork(self.loop, case.faults, (), random.Random(case.seed))
        self.ledger = BarrierLedger()
        self.shard = SimulatedShard(
            0, 1, now=lambda: self.loop.now_s, lease_s=LEASE_S, folder=folder
        )
        self.workers: list[BarrierWorker] = []
        self._is_over = False  # All seemed dead after a restart of the shard: another job began.

    def run(self) -> BarrierLedger:
        """Runs until every worker has left, died or been lost; returns the books.

        Raises:
            AssertionError: The ledger has found an error, or a worker waits for ever.
        """
        with quiet():
            for rank in range(self.case.num_workers):
                self.workers.append(BarrierWorker(rank, self, 100 + rank))
            for worker, dies_s in zip(self.workers, self.case.dies_s, strict=True):
                if dies_s is not None:
                    self.loop.after(dies_s, worker.die)
            for rank, comes_s in enumerate(self.case.comes_s):
                if comes_s is not None:
                    self.loop.after(comes_s, partial(self._come, rank))
            for at_s in self.case.crashes_s:
                self.loop.after(at_s, partial(self.shard.crash, lambda store: None))
            self.loop.after(TICK_S, self._tick)
            try:
                is_done = self.loop.run(LIMIT_S)
            finally:
                self.shard.close()
        waiting = [f"worker {w.rank} at round {w.number}" for w in self.workers if not w.is_over]
        if waiting or not is_done:
            raise StuckError(f"after {LIMIT_S:g} virtual seconds: {', '.join(waiting)}")
        return self.ledger

    def _come(self, rank: int) -> None:
        """Starts a worker in a dead one's place, once it may join; none if no other is left."""
        job = self.shard.engine.jobs[JOB].job
        others = set(job.membership.live()) - {rank}
        if not others or self._is_over or all(w.is_over for w in self.workers):
            return
        try:
            worker = BarrierWorker(rank, self, 200 + rank)
        except PacelineError:
            self.loop.after(RETRY_S, partial(self._come, rank))
            return
        if self.shard.engine.jobs[JOB].job is not job:
            worker.die()
            self._is_over = True
            return
        self.workers.append(worker)
        self.ledger.came(rank, worker.number)

    def _tick(self) -> None:
        self.shard.tick()
        if not all(worker.is_over for worker in self.workers):
            self.loop.after(TICK_S, self._tick)
