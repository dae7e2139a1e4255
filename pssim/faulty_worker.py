"""A worker on a faulty network: it repeats requests, renews its lease, dies and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from pscore.errors import PacelineError, ReplacedError
from pscore.types import Role
from psserver.decisions.membership import Member
from pssim.booked import BookedWorker, WatchedJob, start_weights
from pssim.events import What
from pssim.network import Message
from pssim.shard import Respond, Result, SimulatedShard
from pssim.worker import Program
from psworker.replica.slice_ends import OF_ROUNDS

LEASE_S = 3.0
PULL_WAIT_S = 1.0
RETRY_S = 0.7


class RepeatedRequest:
    """One request of a worker, sent until it is answered.

    Those of a worker's start are lost once at most: a worker that hears nothing for a lease before
    it has begun is not part of the job.
    """

    def __init__(
        self,
        worker: FaultyWorker,
        shard: SimulatedShard,
        what: str,
        ask: Callable[[Respond], None],
        land: Callable[[bytes], None],
    ) -> None:
        """Sends nothing yet; the arguments are those of `Worker.request`."""
        self._worker = worker
        self._shard = shard
        self._name = f"{worker.name}: {what}, {shard.name}"
        self._ask = ask
        self._land = land
        self._incarnation = worker.incarnation
        self._is_first = not worker.has_begun
        self._is_answered = False
        self._num_sent = 0

    def send(self) -> None:
        """Sends the request, and again after a while."""
        if self._is_wanted:
            self._num_sent += 1
            self._worker.network.send(self._message(self._name), self._arrive)
            self._worker.loop.after(RETRY_S + PULL_WAIT_S, self.send)

    @property
    def _is_wanted(self) -> bool:
        is_same = self._incarnation == self._worker.incarnation
        return is_same and not (self._is_answered or self._worker.is_over)

    def _message(self, what: str, *, is_answer: bool = False) -> Message:
        return Message(
            worker=self._worker.rank,
            shard=self._shard.index,
            is_answer=is_answer,
            what=what,
            is_first=self._is_first,
            surely=self._is_first and self._num_sent > 1,
        )

    def _arrive(self) -> None:
        self._worker.network.note(f"{self._name} arrives")
        try:
            self._ask(self._respond)
        except PacelineError as problem:
            self._respond(problem)
        self._worker.check(self._shard)

    def _respond(self, result: Result) -> None:
        answer = self._message(f"answer to {self._name}", is_answer=True)
        self._worker.network.send(answer, partial(self._receive, result))

    def _receive(self, result: Result) -> None:
        if self._is_wanted:
            self._is_answered = True
            self._worker.receive(self._name, result, self._land)


class FaultyWorker(BookedWorker):
    """A worker that may die, return, and be cut off.

    Attributes:
        has_begun: Whether this incarnation has had its first weights.
        has_come: Whether any incarnation has had its first weights.
        check: Called with a shard after each request that has arrived there.
        is_dead: Whether its process has been killed.
        num_returns: How often it has returned after the shards had declared it lost.
        others: The other workers of the job.
    """

    pull_wait_s = PULL_WAIT_S

    def __init__(self, rank: int, job: WatchedJob) -> None:
        """Makes the worker and its first process; `start` starts it."""
        super().__init__(rank, job)
        self.has_begun = self.has_come = False
        self.check: Callable[[SimulatedShard], None] = lambda shard: None
        self.is_dead = False
        self.num_returns = 0
        self.others: Sequence[FaultyWorker] = ()
        self._former: list[int] = []  # Incarnations of the same process.
        self._restart = 0
        self._start_process()

    def _start_process(self) -> None:
        self.segment = np.zeros(self.layout.numel, np.float32)
        self.start_process(
            self._train(),
            self.spec,
            self.layout,
            self.optimizer,
            torch.zeros(self.layout.numel),
            self.case.num_workers,
        )
        share = 1.0 / (1 + self.rank)
        self.replica.speed = lambda: share

    # ----- life and death

    def start(self) -> None:
        """Schedules the begin of the program."""
        comes_s = self.case.comes_s[self.rank] if self.case.comes_s else 0.0
        if comes_s:  # Its clocks begin where the others are.
            self.ledger.came_back.add(self.rank)
        self.loop.after(comes_s, self.resume)

    def die(self) -> None:
        """Kills the process; it may be started again later."""
        if self.is_over:
            return
        self.network.note(f"{self.name} is killed")
        self.is_dead = True
        self._begin_incarnation()
        back_s = self.case.back_s[self.rank]
        if back_s is None:
            self.is_over = True
        else:
            self.loop.after(back_s, self._revive)

    def advance(self) -> None:
        """Runs the program until it has to wait, while its process lives."""
        if not self.is_dead:
            super().advance()

    def _revive(self) -> None:
        self.network.note(f"{self.name} is started again")
        self.is_dead = False
        self._restart += 1
        self._former.clear()
        self.step_now += 1
        self._start_process()
        self.replica.step = self.step_now
        self.resume()

    def _begin_incarnation(self) -> None:
        """Leaves all requests under way to the incarnation that ends."""
        self._former.append(self.incarnation)
        self.incarnation += 1000
        self.ledger.came_back.add(self.rank)
        self._problem = None
        self.has_begun = False
        self.clear(range(len(self.elements)))
        self.pushes.clear()

    # ----- the program

    def _train(self) -> Program:
        yield from self._join(returns=self._restart > 0)
        yield from self._define()
        if self.rank == 0 and not self._restart:
            yield from self._upload()
        self.set_hyper()
        yield from self.wait_for_pulls(self.replica.begin(self.exchange))
        self.has_begun = self.has_come = True
        if self.loop.now_s < self.case.begins_s:
            yield self.case.begins_s - self.loop.now_s
        dies_s = self.case.dies_s[self.rank]
        if dies_s is not None and not self._restart:
            self.loop.after(dies_s, self.die)
        while self.step_now < self.case.steps[self.rank]:
            try:
                yield from self._compute()
                yield from self._step()
            except ReplacedError as problem:
                yield from self._come_back(problem)
            self.step_now += 1
        stays = self.case.min_workers and self.rank == 0
        while stays and not all(other.has_come for other in self.others):
            self.waits_for = "all to join"
            yield 0.1
        try:
            yield from self._finish()
        except ReplacedError as problem:
            if self.case.min_workers:  # The others may wait for it.
                yield from self._come_back(problem)
                yield from self._finish()
            else:
                self.network.note(f"{self.name} was lost at its end: {problem}")
                self.is_dead = True
                self._begin_incarnation()

    def _compute(self) -> Program:
        note, step = self.recorder.note, self.step_now
        note(self.name, What.COMPUTE_STARTED, worker=self.rank, step=step)
        pace = 1.0 if self.case.is_steady else self.rng.uniform(0.5, 1.5)
        yield self.case.compute_s[self.rank] * pace
        note(self.name, What.COMPUTE_ENDED, worker=self.rank, step=step)

    def _finish(self) -> Program:
        yield from self.wait_for_pushes()
        is_open = [index for index, touched in enumerate(self.elements) if touched]
        self.replica.end_round(self.grads, self.exchange)
        yield from self.wait_for_pushes()
        if self.case.rule.outer_optimizer and is_open:
            self._ended_step(is_open)
        yield from self.wait_for_pulls(self.replica.settle())
        self.recorder.leave_out(self.rank)
        yield from self.wait_for_pulls(self.replica.fetch(None, self.exchange))
        self.network.note(f"{self.name} leaves")
        yield from self._leave()

    def _come_back(self, problem: ReplacedError) -> Program:
        """Joins again after having been declared lost, as `DistributedOptimizer` does."""
        self.network.note(f"{self.name} returns: {problem}")
        self.num_returns += 1
        self._begin_incarnation()
        yield from self._join(returns=True)
        yield from self._define()
        self.exchange.restart()
        self.replica.restart()
        yield from self.wait_for_pulls(self.replica.begin(self.exchange))
        self.has_begun = True
        if self.replica.clocks.num_fragments == 1:  # Else their rounds have set it.
            self.replica.step += 1

    def _step(self) -> Program:
        """Makes one step, as `DistributedOptimizer.step` does."""
        self.set_hyper()
        plan, pushed = self.replica.plan(), self.replica.clocks.slices_pushed(self.replica.step)
        self.make_grads(self.step_now)
        weights = self.replica.weights[self.layout.slices[0].stop :].clone()
        samples = self.case.samples[self.rank]
        if plan.push is Role.GRADIENT:
            for index in self.replica.front_first():
                yield from self.wait_for_pulls(self.replica.land(index))
                yield from self.wait_for_push(index)
                present, grad, early = self.present(index), self.grads[index], index > 0
                self.replica.push(index, grad, present, samples, self.exchange, in_backward=early)
                yield 0.0
        # The first slice leaves when backward is over; until then it reads those of the others.
        assert torch.equal(self.replica.weights[self.layout.slices[0].stop :], weights)
        if plan.push is Role.GRADIENT:
            for index in self.replica.front_first()[::2]:  # `finish` ends the others.
                self.replica.end_slice(index, self.grads[index], self.exchange)
        if plan.inner:
            for spec in self.layout.slices:
                self.replica.weights[spec.start : spec.stop] -= self.grads[spec.index]
        if plan.push in OF_ROUNDS:
            yield from self.wait_for_pushes()
        yield from self.wait_for_pulls(self.replica.finish(self.grads, self.exchange, samples))
        if plan.push is not None:
            self.clear(pushed)
            self._ended_step(pushed)

    def _ended_step(self, pushed: Iterable[int]) -> None:
        self.ledger.stepped[self.rank, self.incarnation, self.step_now] = set(pushed)

    def _upload(self) -> Program:
        start = start_weights(self.layout)
        for spec in self.layout.slices:
            self.exchange.load(spec.index, Role.WEIGHTS, [start[spec.start : spec.stop]], [])
        yield from self.wait_for_pushes()

    # ----- the job

    def _join(self, *, returns: bool) -> Program:
        self.session.incarnation = self.incarnation
        for shard in self.shards:
            yield from self._call("join", shard, partial(self._join_one, returns=returns))
            self._beat(shard, self.incarnation)

    def _join_one(self, shard: SimulatedShard, *, returns: bool) -> None:
        member = Member(
            rank=self.rank,
            incarnation=self.incarnation,
            former=tuple(self._former),
            restart=self._restart,
            host="host",
            pid=self.rank,
            heard_s=self.loop.now_s,
            returns=returns,
        )
        shard.join(member, self.case.num_workers, self.case.min_workers)

    def _define(self) -> Program:
        for shard in self.shards:
            yield from self._call(
                "define", shard, lambda shard: shard.define(self.rank, self.incarnation, self.spec)
            )

    def _leave(self) -> Program:
        for shard in self.shards:
            yield from self._call(
                "leave", shard, lambda shard: shard.leave(self.rank, self.incarnation)
            )

    # ----- requests

    def request(
        self,
        shard: SimulatedShard,
        what: str,
        ask: Callable[[Respond], None],
        land: Callable[[bytes], None],
        *,
        index: int = -1,
        nbytes: int = 0,
        is_pull: bool = False,
    ) -> None:
        """Sends a request again and again until it is answered; only the first answer counts."""
        RepeatedRequest(self, shard, what, ask, land).send()

    def receive(self, name: str, result: Result, land: Callable[[bytes], None]) -> None:
        """Handles the first answer to a request."""
        if isinstance(result, PacelineError):
            assert isinstance(result, ReplacedError), f"{name}: {result!r}"
            self.resume(result)
            return
        land(result)
        self.advance()

    def _call(
        self, what: str, shard: SimulatedShard, request: Callable[[SimulatedShard], object]
    ) -> Program:
        """Makes a control call."""
        answers: list[bytes] = []

        def ask(respond: Respond) -> None:
            request(shard)
            respond(b"")

        self.request(shard, what, ask, answers.append)
        self.waits_for = f"{what} at {shard.name}"
        yield partial(bool, answers)

    # ----- the lease

    def _beat(self, shard: SimulatedShard, incarnation: int) -> None:
        """Renews a lease until the program is over."""
        if not self.is_over and incarnation == self.incarnation:
            beat = Message(
                worker=self.rank,
                shard=shard.index,
                is_answer=False,
                what="heartbeat",
                surely=not self.has_begun,
            )
            self.network.send(beat, partial(self._heartbeat, shard, incarnation))
            self.loop.after(LEASE_S / 5, partial(self._beat, shard, incarnation))

    def _heartbeat(self, shard: SimulatedShard, incarnation: int) -> None:
        try:
            requests = shard.heartbeat(self.rank, incarnation)
        except ReplacedError as problem:
            if incarnation == self.incarnation and not self.is_over:
                self.resume(problem)
            return
        if incarnation == self.incarnation and not self.is_over:
            for wanted in requests:
                if sender := self.session.residual_senders.get(wanted.table):
                    sender.send_after(wanted.step, wanted.slices)
