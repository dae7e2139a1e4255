"""The worker's edge of the simulated network: what `Exchange` takes for links and a session."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Origin, Role, Verdict
from pssim.shard import JOB, Server
from psworker.transports.base import PullCall, PushCall, Transport

if TYPE_CHECKING:
    from pssim.worker import Worker


def is_load(header: data_pb2.PushHeader) -> bool:
    """Whether a push brings weights and not a gradient."""
    return Role(int(header.role)) in (Role.WEIGHTS, Role.STATE)


class SimTransport(Transport):
    """The data plane from one worker to one shard."""

    name: ClassVar[str] = "simulated"

    def __init__(self, worker: "Worker", server: Server) -> None:
        self._worker = worker
        self._server = server

    def push(self, call: PushCall) -> None:
        """Sends a push."""
        header, parts = call.make()
        self._worker.about_to_push(header, b"".join(parts))
        if parts and self._worker.lay_down(header, b"".join(parts)):
            parts = ()
        frame = wire.encode(header.SerializeToString(), *parts)
        kind = "load" if is_load(header) else f"push of step {header.step},"
        what = f"{kind} slice {header.slice}"

        def land(answer: bytes) -> None:
            reply = data_pb2.PushReply.FromString(bytes(wire.decode(answer)[0]))
            self._worker.pushed(header, Verdict(int(reply.verdict)))
            call.done.set_result(reply)

        self._worker.insist(self._server, what, partial(self._server.push, frame), land)

    def pull(self, call: PullCall) -> None:
        """Sends a pull."""
        frame = wire.encode(call.header.SerializeToString())
        header = call.header
        what = f"pull of version {header.min_version}, slice {header.slice}"
        self._worker.about_to_pull(header)

        def land(answer: bytes) -> None:
            raw, payload = wire.decode(answer)
            reply = data_pb2.PullReply.FromString(bytes(raw))
            if not reply.ready:
                self.pull(call)
                return
            call.land(reply, payload)
            assert call.settle(reply), f"{what}: the estimate is not the shard's"
            weights = call.weights.copy()
            is_estimate = bool(reply.fingerprint)
            self._worker.landed(header, reply.version, weights, is_estimate=is_estimate)
            call.done.set_result(reply)

        self._worker.insist(self._server, what, partial(self._server.pull, frame), land)

    def close(self) -> None:
        """Nothing is open."""


class SimLink:
    """What `Exchange` knows of a link."""

    def __init__(self, transport: SimTransport, address: str) -> None:
        self.transport = transport
        self.address = address
        self.control = SimpleNamespace(Claim="Claim")

    def call(self, method: str, request: pb.ClaimRequest) -> pb.ClaimReply:
        """Answers that no checkpoint has anything of this worker: none is restored here."""
        assert method == "Claim"
        return pb.ClaimReply()


class SimSession:
    """What `Exchange` knows of a session; the table has been declared before."""

    job = JOB
    timeline = None

    def __init__(self, rank: int, incarnation: int, links: Sequence[SimLink]) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.links = links
        self.debtors: dict[int, object] = {}

    def define(self, *table: object, **options: object) -> tuple[int, Origin]:
        """Returns the table's number, and where its steps are counted from."""
        return 0, Origin()

    def require_own(self) -> None:
        """Accepts the process: there is only one."""

    def check(self) -> None:
        """Raises: nothing may block in a simulation."""
        raise AssertionError("a worker of the simulation waits without yielding")
