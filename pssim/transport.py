"""The worker's edge of the simulated network: the links and the session that `Exchange` uses."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, Protocol

from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Origin, Role, Verdict
from pssim.shard import JOB, Respond, SimulatedShard
from psworker.connection.accounts.pace import Pace
from psworker.connection.exchange.residuals import Residuals
from psworker.transports.base import OutgoingPush, PullCall, Transport

PULL_WAIT_S = 1.0  # A pull that cannot be answered by then gets the reason, if the shard ticks.


def is_load(header: data_pb2.PushHeader) -> bool:
    """Returns whether a push brings weights, not a gradient."""
    return Role(int(header.role)) in (Role.WEIGHTS, Role.STATE)


class WorkerSender(Protocol):
    """The worker of a transport (worker.py): sends requests and gets the answers."""

    pushes: dict[int, Future[data_pb2.PushReply]]
    pull_wait_s: float

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
        """Sends a request."""

    def begin_push(self, header: data_pb2.PushHeader, payload: bytes) -> None:
        """Called with a push that is about to be sent."""

    def share(self, header: data_pb2.PushHeader, payload: bytes) -> bool:
        """Puts a gradient where its shard can read it; returns whether that is possible."""

    def end_push(self, header: data_pb2.PushHeader, verdict: Verdict) -> None:
        """Called with the answer to a push."""

    def begin_pull(self, header: data_pb2.PullHeader) -> None:
        """Called with a pull that is about to be sent."""

    def end_pull(self, call: PullCall, reply: data_pb2.PullReply) -> None:
        """Called when weights have landed."""

    def send_residual(self, shard: SimulatedShard, request: pb.SendResidualRequest) -> None:
        """Sends a residual to a shard."""


class SimulatedTransport(Transport):
    """The data plane from one worker to one shard."""

    name: ClassVar[str] = "simulated"

    def __init__(self, worker: WorkerSender, shard: SimulatedShard) -> None:
        """Connects a worker and a shard."""
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
        """Links to the shard at `address`."""
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

    def define(self, *table: object, **options: object) -> tuple[int, Origin]:
        """Returns the table's number, and the origin of its steps."""
        return 0, Origin()

    def require_own(self) -> None:
        """Accepts the process: there is only one."""

    def check(self) -> None:
        """Raises: a wait that blocks would never end."""
        raise AssertionError("a worker of the simulation waits without yielding")
