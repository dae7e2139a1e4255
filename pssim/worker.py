"""One simulated worker: the real `Replica`, `Exchange` and `Feedback` over a simulated data plane.

Its program is the training loop of `DistributedOptimizer` as a generator: it yields what it waits
for, and is resumed when that has happened. Every request is repeated until it is answered.
"""

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from pscore.errors import PacelineError, ReplacedError
from pscore.optimizers import hyper_rows
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.types import FloatArray, Role, Verdict
from psserver.decisions.table import TableSpec
from psserver.slices.store import Payload
from pssim.case import GRADIENT, HALF, RAW, STEPS_MAX, Case
from pssim.events import Recorder, What
from pssim.ledger import Ledger, Sent
from pssim.network import Loop, Network
from pssim.shard import LEASE_S, PULL_WAIT_S, Respond, Result, Server
from pssim.transport import SimLink, SimSession, SimTransport, is_load
from psworker.connection.exchange import Exchange
from psworker.connection.session import Session
from psworker.replica.replica import Replica

RETRY_S = 0.7
GROUP = {
    "lr": 1.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
QUADRATIC_GROUP = {**GROUP, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}

Condition: TypeAlias = Callable[[], bool]
Program: TypeAlias = Generator[Condition | float, None, None]


class Worker:
    """One worker's program, and its requests."""

    def __init__(
        self,
        rank: int,
        case: Case,
        layout: Layout,
        optimizer: Optimizer,
        spec: TableSpec,
        servers: Sequence[Server],
        ledger: Ledger,
        loop: Loop,
        network: Network,
        recorder: Recorder,
    ) -> None:
        self.rank = rank
        self.name = f"worker {rank}"
        self.case = case
        self.layout = layout
        self.optimizer = optimizer
        self.incarnation = 100 + rank
        self._former: list[int] = []  # Of the same process.
        self.is_over = False  # Finished, or dead for good.
        self.is_dead = False
        self.num_returns = 0
        self.waits_for = "its start"
        self._restart = 0
        self._step_now = 0
        self._has_begun = False
        self.has_come = False  # For the first time.
        self._lost: ReplacedError | None = None  # To be told to the program.
        self._spec = spec
        self._servers = servers
        self._ledger = ledger
        self._loop = loop
        self._network = network
        self._recorder = recorder
        self._rng = random.Random(case.seed * 31 + rank)
        self._grads = [torch.zeros(part.numel) for part in layout.slices]
        self._elements: list[int] = []  # Those of the steps since the last push.
        self._ready: Condition = lambda: True
        self.others: Sequence[Worker] = ()
        self._begin()

    def _begin(self) -> None:
        """What a process has when it starts."""
        layout, rule, optimizer = self.layout, self.case.rule, self.optimizer
        self.replica = Replica(layout, rule, optimizer, 1, torch.zeros(layout.numel), self.rank)
        self._segment = np.zeros(layout.numel, np.float32)
        links = [SimLink(SimTransport(self, server), server.name) for server in self._servers]
        self._session = SimSession(self.rank, self.incarnation, links)
        session = cast(Session, self._session)
        self.exchange = Exchange(
            session,
            "model",
            layout,
            rule,
            self.case.compressor,
            optimizer,
            1,
            pull_compressor=self.case.pull_compressor,
        )
        self._program = self._train()

    # ----- the program

    def start(self) -> None:
        """Schedules the begin of the program."""
        comes_s = self.case.comes_s[self.rank] if self.case.comes_s else 0.0
        if comes_s:  # Its clocks begin where the others are.
            self._ledger.came_back.add(self.rank)
        self._loop.after(comes_s, self._advance)

    def die(self) -> None:
        """The process is killed; perhaps it is started again later."""
        if self.is_over:
            return
        self._network.note(f"{self.name} dies")
        self.is_dead = True
        self._grow_older()
        back_s = self.case.back_s[self.rank]
        if back_s is None:
            self.is_over = True
        else:
            self._loop.after(back_s, self._revive)

    def _revive(self) -> None:
        self._network.note(f"{self.name} is started again")
        self.is_dead = False
        self._restart += 1
        self._former.clear()
        self._step_now += 1
        self._begin()
        self.replica.step = self._step_now
        self._wake()

    def _grow_older(self) -> None:
        """Whatever is under way belongs to the former incarnation."""
        self._former.append(self.incarnation)
        self.incarnation += 1000
        self._ledger.came_back.add(self.rank)
        self._lost = None
        self._has_begun = False
        self._elements.clear()

    def _train(self) -> Program:
        yield from self._join(returns=self._restart > 0)
        yield from self._define()
        if self.rank == 0 and not self._restart:
            yield from self._upload()
        self._set_hyper()
        yield from self._drive(self.replica.begin(self.exchange))
        self._has_begun = self.has_come = True
        if self._loop.now_s < self.case.begins_s:
            yield self.case.begins_s - self._loop.now_s
        dies_s = self.case.dies_s[self.rank]
        if dies_s is not None and not self._restart:
            self._loop.after(dies_s, self.die)
        while self._step_now < self.case.steps[self.rank]:
            try:
                yield from self._compute()
                yield from self._step()
            except ReplacedError as problem:
                yield from self._come_back(problem)
            self._step_now += 1
        stays = self.case.min_workers and self.rank == 0
        while stays and not all(other.has_come for other in self.others):
            self.waits_for = "all to come"
            yield 0.1
        try:
            yield from self._finish()
        except ReplacedError as problem:
            if self.case.min_workers:  # The others may wait for it.
                yield from self._come_back(problem)
                yield from self._finish()
            else:
                self._network.note(f"{self.name} was lost at its end: {problem}")
                self.is_dead = True
                self._grow_older()
        self.is_over = True

    def _compute(self) -> Program:
        note, step = self._recorder.note, self._step_now
        note(self.name, What.COMPUTE_STARTED, worker=self.rank, step=step)
        pace = 1.0 if self.case.is_steady else self._rng.uniform(0.5, 1.5)
        yield self.case.compute_s[self.rank] * pace
        note(self.name, What.COMPUTE_ENDED, worker=self.rank, step=step)

    def _finish(self) -> Program:
        yield from self._flush()
        has_round = self.replica.num_inner > 0
        self.replica.end_round(self._grads, self.exchange)
        yield from self._flush()
        if has_round:
            self._ended_step()
        yield from self._drive(self.replica.settle())
        self._recorder.leave_out(self.rank)
        yield from self._drive(self.replica.fetch(None, self.exchange))
        self._network.note(f"{self.name} leaves")
        yield from self._all("leave", lambda server: server.leave(self.rank, self.incarnation))

    def _join(self, *, returns: bool) -> Program:
        self._session.incarnation = self.incarnation
        request = partial(
            _join,
            rank=self.rank,
            incarnation=self.incarnation,
            former=tuple(self._former),
            restart=self._restart,
            returns=returns,
        )
        for server in self._servers:
            yield from self._call("join", server, request)
            self._beat(server, self.incarnation)

    def _define(self) -> Program:
        yield from self._all(
            "define", lambda server: server.define(self.rank, self.incarnation, self._spec)
        )

    def _come_back(self, problem: ReplacedError) -> Program:
        """Joins anew after having been declared lost, as `DistributedOptimizer` does."""
        self._network.note(f"{self.name} comes back: {problem}")
        self.num_returns += 1
        self._grow_older()
        yield from self._join(returns=True)
        yield from self._define()
        self.exchange.restart()
        self.replica.restart()
        yield from self._drive(self.replica.begin(self.exchange))
        self._has_begun = True
        self.replica.step += 1

    def _step(self) -> Program:
        """One step, as `DistributedOptimizer.step` makes it."""
        self._set_hyper()
        plan = self.replica.plan()
        self._make_grads(self._step_now)
        weights = self.replica.weights[self.layout.slices[0].stop :].clone()
        if plan.push is Role.GRADIENT:
            for index in self.replica.front_first():
                yield from self._drive(self.replica.land(index))
                yield from self._acknowledged(index)
                present = self._present(index)
                grad, samples, early = self._grads[index], self.case.samples[self.rank], index > 0
                self.replica.push(index, grad, present, samples, self.exchange, in_backward=early)
                yield 0.0
        # The first slice leaves when backward is over; until then it reads those of the others.
        assert torch.equal(self.replica.weights[self.layout.slices[0].stop :], weights)
        if plan.inner:
            for spec in self.layout.slices:
                self.replica.weights[spec.start : spec.stop] -= self._grads[spec.index]
        if plan.push is Role.DELTA:
            yield from self._flush()
        samples = self.case.samples[self.rank]
        yield from self._drive(self.replica.finish(self._grads, self.exchange, samples))
        self.replica.take_reference()
        if plan.push is not None:
            self._elements.clear()
            self._ended_step()

    def _ended_step(self) -> None:
        self._ledger.stepped.add((self.rank, self.incarnation, self._step_now))

    def _upload(self) -> Program:
        start = start_weights(self.layout)
        for spec in self.layout.slices:
            self.exchange.load(spec.index, Role.WEIGHTS, [start[spec.start : spec.stop]], [])
        yield from self._flush()

    # ----- gradients

    def _set_hyper(self) -> None:
        group = QUADRATIC_GROUP if self.case.quadratic else GROUP
        outer = self.case.rule.outer_group(self.replica.step, group)
        rows = hyper_rows(self.optimizer, [outer])
        for part in self.replica.parts:
            part.hyper = rows

    def _make_grads(self, step: int) -> None:
        """An element of its own for each worker and step; or a quadratic's slope, and noise."""
        element = self.rank * STEPS_MAX + step
        self._elements.append(element)
        noise = np.random.default_rng((self.rank, step))
        self._grads = [torch.zeros(spec.numel) for spec in self.layout.slices]
        for spec, grad in zip(self.layout.slices, self._grads, strict=True):
            if self.case.quadratic:
                slope = self.replica.weights[spec.start : spec.stop] - 1.0
                scatter = noise.standard_normal(spec.numel, dtype=np.float32)
                grad.copy_(slope + torch.from_numpy(scatter))
            else:
                grad[element] = GRADIENT

    def _present(self, index: int) -> int:
        """Returns the segments with the element in them, and some others."""
        if self.case.quadratic:
            return -1
        present = 0
        for position, segment in enumerate(self.layout.slices[index].segments):
            is_in = segment.start <= self._elements[-1] < segment.stop
            present |= (is_in or self._rng.random() < HALF) << position
        part = self.replica.parts[index]
        part.active[:] = [present >> i & 1 for i in range(len(part.active))]
        return present

    # ----- waiting

    def _drive(self, waits: Iterable[int]) -> Program:
        """Runs a generator of the replica."""
        for index in waits:
            call, _ = self.exchange._pulls[index]
            self.waits_for = f"slice {index}"
            yield call.done.done
            self.exchange.run((index,))

    def _acknowledged(self, index: int) -> Program:
        if index in self.exchange._pushes:
            self.waits_for = f"the acknowledgement of slice {index}"
            yield self.exchange._pushes[index].done
            self.exchange.acknowledged(index)

    def _flush(self) -> Program:
        for index in list(self.exchange._pushes):
            yield from self._acknowledged(index)

    def _all(self, what: str, request: Callable[[Server], None]) -> Program:
        """Makes a control call to every shard, one after the other."""
        for server in self._servers:
            yield from self._call(what, server, request)

    def _call(self, what: str, server: Server, request: Callable[[Server], None]) -> Program:
        answered: list[bytes] = []
        self.insist(server, what, partial(_answered, request, server), answered.append)
        self.waits_for = f"{what} at {server.name}"
        yield partial(bool, answered)

    def _advance(self) -> None:
        """Goes on as far as the program can."""
        while not self.is_dead and not self.is_over and self._ready():
            problem, self._lost = self._lost, None
            try:
                wanted = self._program.throw(problem) if problem else next(self._program)
            except StopIteration:
                return
            if isinstance(wanted, float):
                self._ready = lambda: False
                self._loop.after(wanted, partial(self._wake, self.incarnation))
            else:
                self._ready = wanted

    def _wake(self, incarnation: int = 0) -> None:
        if incarnation in (0, self.incarnation):
            self._ready = lambda: True
            self._advance()

    def _is_told(self, problem: ReplacedError) -> None:
        """Learns that the shards go on without this worker."""
        self._lost = problem
        self._wake()

    # ----- requests

    def insist(
        self,
        server: Server,
        what: str,
        request: Callable[[Respond], None],
        land: Callable[[bytes], None],
    ) -> None:
        """Sends a request again and again until it is answered; only the first answer counts.

        Before a worker has begun nothing of it is lost: a job whose workers are not all there, or
        that has no weights yet, waits for them whatever happens, and that is as it is meant.
        """
        name = f"{self.name}: {what}, {server.name}"
        done: list[bool] = []

        incarnation = self.incarnation

        def receive(result: Result) -> None:
            if done or self.is_over or incarnation != self.incarnation:
                return
            done.append(True)
            if isinstance(result, PacelineError):
                assert isinstance(result, ReplacedError), f"{name}: {result!r}"
                self._is_told(result)
                return
            land(result)
            self._advance()

        surely = not self._has_begun

        def answer(result: Result) -> None:
            deliver = partial(receive, result)
            self._network.send(self.rank, server.index, deliver, f"answer to {name}", surely=surely)

        def arrive() -> None:
            self._network.note(f"{name} arrives")
            try:
                request(answer)
            except PacelineError as problem:
                answer(problem)
            server.check()

        def attempt() -> None:
            if not done and not self.is_over and incarnation == self.incarnation:
                self._network.send(self.rank, server.index, arrive, name, surely=surely)
                self._loop.after(RETRY_S + PULL_WAIT_S, attempt)

        attempt()

    def _beat(self, server: Server, incarnation: int) -> None:
        """Renews a lease until the program is over."""
        if not self.is_over and incarnation == self.incarnation:
            beat = partial(self._heartbeat, server, incarnation)
            surely = not self._has_begun
            self._network.send(self.rank, server.index, beat, "heartbeat", surely=surely)
            self._loop.after(LEASE_S / 5, partial(self._beat, server, incarnation))

    def _heartbeat(self, server: Server, incarnation: int) -> None:
        try:
            server.heartbeat(self.rank, incarnation)
        except ReplacedError as problem:
            if incarnation == self.incarnation and not self.is_over:
                self._is_told(problem)

    # ----- the ledger

    def about_to_push(self, header: data_pb2.PushHeader, data: bytes) -> None:
        """Enters a push in the ledger."""
        if is_load(header):
            return
        step, index = header.step, header.slice
        self._recorder.note(self.name, What.PUSH_SENT, worker=self.rank, step=step, slice=index)
        payload = np.frombuffer(data, dtype=np.uint8)
        book = self._ledger.books[header.slice]
        compressor = self.case.compressor if header.compressor else RAW
        identity = (self.rank, header.step, self.incarnation)
        assert identity not in book.sent, f"push {identity} is made twice"
        book.sent[identity] = Sent(
            payload=Payload(data=payload, compressor=compressor),
            base_version=header.base_version,
            samples=header.samples,
            elements=list(self._elements),
            made=self._step_now,
        )

    def lay_down(self, header: data_pb2.PushHeader, data: bytes) -> bool:
        """Lays a gradient where its shard reads it, if it can; then only a notice is sent."""
        is_near = bool(self.case.shares) and self.case.shares[self.rank]
        if not is_near or header.compressor or Role(int(header.role)) is not Role.GRADIENT:
            return False
        spec = self.layout.slices[header.slice]
        self._segment[spec.start : spec.stop] = np.frombuffer(data, np.float32)
        self._servers[spec.shard].segments[self.rank, self.incarnation] = self._segment
        plan = self.case.rule.plan(header.step)
        header.shared, header.may_wait = True, plan.block and plan.pull
        return True

    def pushed(self, header: data_pb2.PushHeader, verdict: Verdict) -> None:
        """Enters the answer to a push."""
        what = f"step {header.step}, slice {header.slice}"
        self._network.note(f"{self.name}: {what}: {verdict.name}")
        identity = (self.rank, header.step, self.incarnation)
        if not is_load(header):
            self._ledger.books[header.slice].sent[identity].verdict = verdict

    def about_to_pull(self, header: data_pb2.PullHeader) -> None:
        """Records that a pull is sent."""
        index, version = header.slice, header.min_version
        self._recorder.note(
            self.name, What.PULL_SENT, worker=self.rank, slice=index, version=version
        )

    def landed(
        self,
        header: data_pb2.PullHeader,
        version: int,
        weights: FloatArray,
        *,
        is_estimate: bool,
    ) -> None:
        """Enters weights that have landed."""
        self._network.note(f"{self.name}: version {version}, slice {header.slice} lands")
        index = header.slice
        self._recorder.note(
            self.name, What.PULL_LANDED, worker=self.rank, slice=index, version=version
        )
        self._ledger.books[header.slice].landed(
            self.rank, self.incarnation, header.clock, version, weights, is_estimate=is_estimate
        )


def _answered(request: Callable[[Server], None], server: Server, answer: Respond) -> None:
    request(server)
    answer(b"")


def _join(server: Server, *, rank: int, incarnation: int, **options: Any) -> None:
    server.join(rank, incarnation, **options)


def start_weights(layout: Layout) -> FloatArray:
    """Returns small whole numbers, `(layout.numel,) float32`."""
    return (np.arange(layout.numel) % 7).astype(np.float32)
