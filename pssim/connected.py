"""A worker's place in its job on a faulty network: requests until the answer, and its lease."""

from collections.abc import Callable, Sequence
from functools import partial

from pscore.errors import PacelineError, ReplacedError
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.table_spec import TableSpec
from psserver.decisions.membership import Member
from pssim.booked import BookedWorker
from pssim.case import Case
from pssim.events import Recorder
from pssim.ledger import Ledger
from pssim.network import Loop, Message, Network
from pssim.shard import Respond, Result, SimulatedShard
from pssim.worker import Program

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
        worker: "ConnectedWorker",
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


class ConnectedWorker(BookedWorker):
    """A worker that repeats each request until the answer, and renews its lease.

    Attributes:
        has_begun: Whether this incarnation has had its first weights.
        check: Called with a shard after each request that has arrived there.
    """

    pull_wait_s = PULL_WAIT_S

    def __init__(
        self,
        rank: int,
        case: Case,
        spec: TableSpec,
        layout: Layout,
        optimizer: Optimizer,
        shards: Sequence[SimulatedShard],
        ledger: Ledger,
        loop: Loop,
        network: Network,
        recorder: Recorder,
    ) -> None:
        """Makes the worker, without a process."""
        super().__init__(rank, case, layout, optimizer, shards, ledger, loop, network, recorder)
        self.has_begun = False
        self.check: Callable[[SimulatedShard], None] = lambda shard: None
        self._spec = spec
        self._former: list[int] = []  # Incarnations of the same process.
        self._restart = 0

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
                "define",
                shard,
                lambda shard: shard.define(self.rank, self.incarnation, self._spec),
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
