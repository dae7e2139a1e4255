"""One simulated worker: the product's `Replica`, `Exchange` and error feedback in one thread.

The program of a worker, which a training script and `DistributedOptimizer` make together, is a
generator here. It yields a condition or a number of seconds and resumes when the condition holds or
the time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TypeAlias, cast

import torch

from pscore.contents import FLAT
from pscore.errors import PacelineError
from pscore.net import wire
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import Origin, Role, Verdict
from pssim.network import Loop, Message, Network
from pssim.shard import JOB, Respond, Result, SimulatedShard
from psworker.connection.accounts.pace import Pace
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.exchange.residuals import Residuals
from psworker.connection.membership.session import AgreedTable, Session
from psworker.replica.replica import Replica
from psworker.transports.base import OutgoingPush, PullCall, Transport

REQUEST_NBYTES = 64  # Bytes of a pull's request, and of the header before a payload.
Condition: TypeAlias = Callable[[], bool]
Program: TypeAlias = Generator[Condition | float, None, None]


def is_load(header: data_pb2.PushHeader) -> bool:
    """Returns whether a push brings weights, not a gradient."""
    return Role(int(header.role)) in (Role.WEIGHTS, Role.STATE)


class SimulatedTransport(Transport):
    """The data plane from one worker to one shard."""

    name = "simulated"

    def __init__(self, worker: Worker, shard: SimulatedShard) -> None:
        self._worker = worker
        self._shard = shard

    def push(self, push: OutgoingPush) -> None:
        """Sends a push; `push.done` gets the reply."""
        header = push.header
        self._worker.pushes[header.slice] = push.done
        payload = b"".join(push.payload())
        self._worker.begin_push(header, payload)
        parts = () if self._worker.share(header, payload) else (payload,)
        frame = wire.encode(header.SerializeToString(), *parts)
        kind = "load" if is_load(header) else f"push of step {header.step},"

        def land(answer: bytes) -> None:
            reply = data_pb2.PushReply.FromString(bytes(wire.decode(answer)[0]))
            self._worker.end_push(header, Verdict(int(reply.verdict)))
            push.done.set_result(reply)

        self._worker.request(
            self._shard,
            f"{kind} slice {header.slice}",
            partial(self._shard.push, frame),
            land,
            index=header.slice,
            nbytes=sum(map(len, parts)),
        )

    def pull(self, call: PullCall) -> None:
        """Sends a pull; `call.done` gets the reply when the weights have landed."""
        header = call.header
        frame = wire.encode(header.SerializeToString())
        what = f"pull of version {header.min_version}, slice {header.slice}"
        self._worker.begin_pull(header)

        def land(answer: bytes) -> None:
            raw, payload = wire.decode(answer)
            reply = data_pb2.PullReply.FromString(bytes(raw))
            if not reply.ready:
                self.pull(call)
                return
            call.land(reply, payload)
            assert call.settle(reply), f"{what}: the estimate is not the shard's"
            self._worker.end_pull(call, reply)
            call.done.set_result(reply)

        def ask(respond: Respond) -> None:
            self._shard.pull(frame, respond, self._worker.pull_wait_s)

        self._worker.request(
            self._shard, what, ask, land, index=header.slice, nbytes=0, is_pull=True
        )

    def send_residual(self, request: pb.SendResidualRequest) -> None:
        """Sends a residual for a checkpoint."""
        self._worker.send_residual(self._shard, request)

    def close(self) -> None:
        """Does nothing: there is no connection."""


class SimulatedLink:
    """The link to one shard, as far as `Exchange` uses it."""

    def __init__(self, transport: SimulatedTransport, address: str) -> None:
        self.transport = transport
        self.address = address
        self.control = SimpleNamespace(FetchResidual="FetchResidual", SendResidual="SendResidual")

    def call(
        self, method: str, request: pb.FetchResidualRequest | pb.SendResidualRequest
    ) -> pb.FetchResidualReply | pb.SendResidualReply:
        """Sends a residual, or fetches none: no checkpoint is restored in a simulation."""
        if isinstance(request, pb.SendResidualRequest):
            assert method == "SendResidual"
            self.transport.send_residual(request)
            return pb.SendResidualReply()
        assert method == "FetchResidual"
        return pb.FetchResidualReply()


class SimulatedSession:
    """The session of one worker, as far as `Exchange` uses it."""

    job = JOB
    timeline = None

    def __init__(self, rank: int, incarnation: int, links: Sequence[SimulatedLink]) -> None:
        """Connects rank `rank`; the table is declared before."""
        self.rank = rank
        self.incarnation = incarnation
        self.links = links
        self.residual_senders: dict[int, Residuals] = {}
        self.pace = Pace(now=lambda: 0.0)
        self.pushes: set[Exchange] = set()

    def define(self, *table: object, **options: object) -> AgreedTable:
        """Returns the only table, whose steps have their origin at 0."""
        return AgreedTable(0, Origin(), FLAT, is_new=True, has_weights=False)

    def require_own(self) -> None:
        """Accepts the process: there is only one."""

    def check(self) -> None:
        """Raises: a wait that blocks would never end."""
        raise AssertionError("a worker of the simulation waits without yielding")


class Worker:
    """One worker: its replica, its exchange, and the machinery that runs its program.

    Attributes:
        name: `worker 0`.
        incarnation: Number of its process, and of its return to the job.
        replica: Its copy of the weights.
        exchange: Its pushes and pulls.
        is_over: Whether its program has ended.
        waits_for: Description of the last thing that it waited for.
        pushes: Replies to the pushes that have not been waited for, by slice.
        pull_wait_s: Seconds after which a pull is answered without weights.
        pushed_nbytes: Bytes sent to the shards, with the headers of the messages.
        pulled_nbytes: Bytes that the shards have sent.
    """

    pull_wait_s = float("inf")

    def __init__(
        self, rank: int, shards: Sequence[SimulatedShard], loop: Loop, network: Network
    ) -> None:
        """Starts without a replica; `start_process` makes it."""
        self.rank = rank
        self.name = f"worker {rank}"
        self.incarnation = 100 + rank
        self.is_over = False
        self.waits_for = "its start"
        self.pushed_nbytes = self.pulled_nbytes = 0
        self.shards = shards
        self.loop = loop
        self.network = network
        self.pushes: dict[int, Future[data_pb2.PushReply]] = {}
        self._ready: Condition = lambda: False  # Until `resume` starts the program.
        self._problem: PacelineError | None = None  # To be raised in the program.

    def start_process(
        self,
        program: Program,
        spec: TableSpec,
        layout: Layout,
        optimizer: Optimizer,
        weights: torch.Tensor,
        num_workers: int = 1,
    ) -> None:
        """Creates the objects of a starting process.

        Args:
            weights: `(layout.numel,) float32`, for the replica; changed in place.
        """
        self.layout = layout
        self.replica = Replica(layout, spec.rule, optimizer, 1, weights, self.rank, num_workers)
        links = [
            SimulatedLink(SimulatedTransport(self, shard), shard.name) for shard in self.shards
        ]
        self.session = SimulatedSession(self.rank, self.incarnation, links)
        self.exchange = Exchange(cast(Session, self.session), spec)
        self.exchange.payloads.origin_of = lambda index: self.replica.round.origin(index)
        self.pushes.clear()
        self._program = program

    def connect(self, network: Network) -> None:
        """Sends through another network from now on."""
        self.network = network

    # ----- the program

    def advance(self) -> None:
        """Runs the program until it has to wait."""
        while not self.is_over and self._ready():
            problem, self._problem = self._problem, None
            try:
                wanted = self._program.throw(problem) if problem else next(self._program)
            except StopIteration:
                self.end()
                return
            if isinstance(wanted, float):
                self._ready = lambda: False
                wake = partial(self._wake, self.incarnation)
                self.loop.after(wanted, wake, ("worker", self.rank))
            else:
                self._ready = wanted

    def end(self) -> None:
        """Called when the program has ended."""
        self.is_over = True

    def _wake(self, incarnation: int) -> None:
        """Ends a wait for time, unless the process that waited is gone."""
        if incarnation == self.incarnation:
            self.resume()

    def resume(self, problem: PacelineError | None = None) -> None:
        """Starts the program, or ends its wait, with an error if there is one."""
        self._problem = problem
        self._ready = lambda: True
        self.advance()

    def wait_for_pulls(self, waits: Iterable[int]) -> Program:
        """Runs a generator of the replica: waits for each pull that it yields."""
        for index in waits:
            self.waits_for = f"slice {index}"
            yield partial(self.exchange.has_landed, index)
            self.exchange.run((index,))

    def wait_for_push(self, index: int) -> Program:
        """Waits until the last push of a slice is acknowledged."""
        if index in self.pushes:
            self.waits_for = f"the acknowledgement of slice {index}"
            yield self.pushes[index].done
            del self.pushes[index]
            self.exchange.acknowledged(index)

    def wait_for_pushes(self) -> Program:
        """Waits until all pushes are acknowledged."""
        for index in list(self.pushes):
            yield from self.wait_for_push(index)

    # ----- requests

    def request(
        self,
        shard: SimulatedShard,
        what: str,
        ask: Callable[[Respond], None],
        land: Callable[[bytes], None],
        *,
        index: int,
        nbytes: int,
        is_pull: bool = False,
    ) -> None:
        """Sends a request once.

        Args:
            ask: Called with a function that takes the answer when the request arrives.
            is_pull: Whether the answer has a payload.
        """

        def respond(result: Result) -> None:
            assert isinstance(result, bytes), result
            size = None
            if is_pull:
                size = len(wire.decode(result)[1]) + REQUEST_NBYTES
                self.pulled_nbytes += size
            self.network.send(
                self._message(shard, is_answer=True, nbytes=size, index=index),
                partial(receive, result),
            )

        def receive(answer: bytes) -> None:
            land(answer)
            self.advance()

        size = nbytes + REQUEST_NBYTES
        self.pushed_nbytes += size
        message = self._message(shard, is_answer=False, nbytes=size, index=index)
        self.network.send(message, partial(ask, respond))

    def _message(
        self, shard: SimulatedShard, *, is_answer: bool, nbytes: int | None, index: int
    ) -> Message:
        return Message(
            worker=self.rank, shard=shard.index, is_answer=is_answer, nbytes=nbytes, slice=index
        )

    # ----- called by the transport

    def begin_push(self, header: data_pb2.PushHeader, payload: bytes) -> None:
        """Called with a push that is about to be sent."""

    def share(self, header: data_pb2.PushHeader, payload: bytes) -> bool:
        """Puts a gradient where its shard can read it; returns whether that is possible."""
        return False

    def end_push(self, header: data_pb2.PushHeader, verdict: Verdict) -> None:
        """Called when a push is acknowledged."""

    def send_residual(self, shard: SimulatedShard, request: pb.SendResidualRequest) -> None:
        """Called with a residual that is to be sent to a shard."""
        shard.take_residual(request)

    def begin_pull(self, header: data_pb2.PullHeader) -> None:
        """Called with a pull that is about to be sent."""

    def end_pull(self, call: PullCall, reply: data_pb2.PullReply) -> None:
        """Called when weights have landed."""
