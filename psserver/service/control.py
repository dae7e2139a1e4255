"""Proto messages to types and back, without decisions; refusals.py answers errors.

Two services on one port: `ps.v1.Control` (proto/ps/v1/control.proto), and `ps.v1.Data` whose two
methods, Push and Pull, carry frames (pscore/net/wire.py) as raw bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np
import psutil
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message

from pscore.errors import DecodeError, PacelineError, ProtocolVersionError, RemoteProtocolError
from pscore.net import faults, wire
from pscore.net.listener import Listener
from pscore.net.rpc import DATA_SERVICE
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, data_pb2
from pscore.pb.ps.v1.publish_pb2 import WatchReply
from pscore.table_spec import TableSpec, content_to_proto, rule_from_proto
from pscore.text import printable
from pscore.types import ByteArray, FloatArray, Origin
from pscore.version import VERSION
from psserver.access.authorizer import Authorizer
from psserver.decisions.directory import PeerReport
from psserver.decisions.membership import WORKERS_MAX, Member
from psserver.decisions.passed_calls import NOTHING
from psserver.decisions.shard import TABLES_MAX, require_name
from psserver.engine import reading
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob
from psserver.engine.taking_part import (
    begin_without,
    come_back,
    part_with_absent,
    part_with_late,
)
from psserver.service.barrier_wait import WAIT_S_MAX, wait_at_barrier
from psserver.service.messages import (
    from_proto,
    job_status,
    pace_of,
    peer_of,
    report_of,
    stage_of,
    to_proto,
)
from psserver.service.shared_view import SharedView
from psserver.standby.menders import Menders
from psserver.stores import kind_of

TEXT_LENGTH_MAX = 512  # Longest text from workers: their waits, their reasons for leaving.
HOST_LENGTH_MAX = 256
RUN_ID_LENGTH_MAX = 256
PLANE_LENGTH_MAX = 16
PROCESSES_MAX = 1024
COUNTS = ("round", "minibatch", "epoch", "since", "clock", "step")  # Fields of requests.
COUNT_MAX = (1 << 63) - 1  # Rounds of attempts have the life of a job in their upper bits.
H = TypeVar("H", data_pb2.PushHeader, data_pb2.PullHeader)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Method = Callable[[bytes, Context], Awaitable[bytes]]


class GrpcReply:
    """Answers one request of the portable data plane, from any thread."""

    def __init__(self) -> None:
        """Must be made on the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self.frame: asyncio.Future[bytes] = self._loop.create_future()

    def pushed(self, reply: data_pb2.PushReply) -> None:
        """Answers a push."""
        self._resolve(wire.encode(reply.SerializeToString()))

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        """Answers a pull; the arrays are copied here."""
        parts = [wire.as_bytes(array) for array in arrays]
        self._resolve(wire.encode(reply.SerializeToString(), *parts))
        if release is not None:
            release()

    def _resolve(self, frame: bytes) -> None:
        self._loop.call_soon_threadsafe(self._set, frame)

    def _set(self, frame: bytes) -> None:
        if not self.frame.done():
            self.frame.set_result(frame)


def data_handler(
    engine: Engine, authorizer: Authorizer | None = None
) -> grpc.GenericRpcHandler[Any, Any]:
    """Returns the service that carries frames as raw bytes; None: every peer is authorized."""

    def require(header: data_pb2.PushHeader | data_pb2.PullHeader, context: Context) -> None:
        if authorizer is not None:
            metadata: Any = context.invocation_metadata()
            authorizer.admit_call(metadata).require(header.sender.job)

    async def push(frame: bytes, context: Context) -> bytes:
        reply = GrpcReply()
        try:
            header, payload = _parse(frame, data_pb2.PushHeader())
            require(header, context)
            engine.requests.on_push(header, np.frombuffer(payload, dtype=np.uint8), reply)
        except PacelineError:
            engine.requests.note_refused()
            raise
        return await reply.frame

    async def pull(frame: bytes, context: Context) -> bytes:
        reply = GrpcReply()
        header, payload = _parse(frame, data_pb2.PullHeader())
        require(header, context)
        data = np.frombuffer(payload, dtype=np.uint8)
        engine.requests.on_pull(header, reply, min(header.wait_ms / 1000, WAIT_S_MAX), data)
        try:
            return await reply.frame
        finally:
            if not reply.frame.done() or reply.frame.cancelled():
                engine.requests.forget(lambda other: other is reply)

    wanted = faults.from_environment()
    handlers = {
        "Push": grpc.unary_unary_rpc_method_handler(_faulty(push, wanted.at("pushed"))),
        "Pull": grpc.unary_unary_rpc_method_handler(_faulty(pull, wanted.at("pulled"))),
    }
    return grpc.method_handlers_generic_handler(DATA_SERVICE, handlers)


def _faulty(method: Method, line: faults.FaultyLine | None) -> Method:
    """Returns a method; with PACELINE_FAULTS its answers are lost, late or damaged."""
    if line is None:
        return method

    async def answer(frame: bytes, context: Context) -> bytes:
        drawn = line.draw()
        sent = line.damaged(await method(frame, context), drawn)
        await asyncio.sleep(line.wait_s(drawn))
        if "drop" in drawn or "disconnect" in drawn:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "an answer was lost on purpose")
        return sent

    return answer


def _parse(frame: bytes, header: H) -> tuple[H, memoryview]:
    raw, payload = wire.decode(frame)
    try:
        header.ParseFromString(bytes(raw))
    except ProtobufDecodeError as problem:
        raise DecodeError(f"header of {len(raw)} bytes is not a message") from problem
    return header, payload


class ControlServicer(control_pb2_grpc.ControlServicer):
    """The control service of one shard."""

    def __init__(
        self,
        engine: Engine,
        cluster: str,
        instance: int,
        drain: Callable[[float], float],
        data: Listener | None = None,
        set_aside: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Serves `engine`.

        Args:
            cluster: Name that all shards of one start share.
            instance: Random number of this start of this shard.
            drain: Called with the seconds of grace when a client asks the shard to stop;
                returns those after which it has ended.
            data: The listener of data sockets, if this shard has one.
            set_aside: Called with the name of a job that was forgotten; moves its checkpoints
                aside, and returns where they are, or nothing if there are none.
        """
        self._set_aside = set_aside
        self._engine = engine
        self._cluster = cluster
        self._instance = instance
        self._drain = drain
        self._data = data
        self._process = psutil.Process()
        self._status = SharedView(self._make_status)
        self._compiled: dict[tuple[str, str], asyncio.Task[None]] = {}  # By content and optimizer.
        self.closed = ""  # Why workers cannot join yet; empty if they can.
        self.told: set[tuple[str, int]] = set()  # Jobs and incarnations that know `_next`.
        self._told_processes: dict[tuple[str, int], set[int]] = {}  # Of groups: local ranks.
        self.menders = Menders()
        self._next = ""  # Where this shard will soon be, or its standby is.
        self._former = 0  # Number of the shard before `renew`.
        self.moving: Callable[[], str] = lambda: ""  # How its move to another process is.
        self.stands_by: Callable[[], bool] = lambda: False  # Whether it is a standby.
        self.shares_memory: Callable[[], bool] = lambda: True  # Whether workers may, from now on.
        self._changed = asyncio.Event()  # Set, and replaced, when it serves as another one.
        self.tell_readers: Callable[[str], None] = lambda _: None  # Of published weights.
        self.mends = False  # Whether this start restores jobs that another shard has lost.

    def renew(self, instance: int) -> None:
        """Describes this shard with another number; workers know it from `told` on."""
        self._former, self._instance = self._instance, instance
        self._forget_told()

    def serve_as(self, instance: int, data: Listener | None) -> None:
        """Describes this shard with another instance, and another listener of data sockets."""
        self._instance, self._data = instance, data
        self._changed.set()
        self._changed = asyncio.Event()

    def announce(self, address: str) -> None:
        """Names the address at which this shard will be in heartbeats; empty: it stays."""
        if address == self._next:  # Workers of a shard with a standby know its address already.
            return
        self._next = address
        self.tell_readers(address)
        self._forget_told()

    def _forget_told(self) -> None:
        self.told.clear()
        self._told_processes.clear()

    def _note_told(self, request: pb.HeartbeatRequest) -> None:
        """Notes that a worker knows `_next`, once each process of its group does."""
        worker = request.job, request.incarnation
        processes = self._told_processes.setdefault(worker, set())
        processes.add(min(request.process, PROCESSES_MAX))  # However many somebody makes up.
        if len(processes) >= request.num_processes:
            self.told.add(worker)

    def locate(self, reply: WatchReply) -> None:
        """Adds to an answer for a reader which shard this is, and where it will be."""
        reply.instance, reply.former_instance = self._instance, self._former
        reply.next_address = self._next

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        """Returns the shard's index and cluster, once it serves as the one that is awaited."""
        if request.awaited not in (0, self._instance):
            wait_s = min(request.wait_ms / 1000, WAIT_S_MAX)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return self._describe()

    def _describe(self) -> pb.DescribeReply:
        return pb.DescribeReply(
            cluster=self._cluster,
            shard=self._engine.shard.index,
            num_shards=self._engine.shard.num_shards,
            protocol=wire.PROTOCOL,
            version=VERSION,
            instance=self._instance,
            former_instance=self._former,
            data_port=0 if self._data is None else self._data.port,
            data_local=self._data.local if self._data is not None and self.shares_memory() else "",
            now_s=time.time(),
            stands_by=self.stands_by(),
        )

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Adds a worker to a job."""
        if self.closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.closed)
        if request.protocol != wire.PROTOCOL:
            raise ProtocolVersionError(
                f"worker speaks protocol {request.protocol}, shard "
                f"{self._engine.shard.index} speaks {wire.PROTOCOL}: install one version"
            )
        now_s = self._engine.now()
        member = Member(
            rank=request.rank,
            incarnation=request.incarnation,
            former=tuple(request.former),
            after=request.after,
            restart=request.restart,
            host=printable(request.host, HOST_LENGTH_MAX),
            pid=request.pid,
            run_id=printable(request.run_id, RUN_ID_LENGTH_MAX),
            heard_s=now_s,
            returns=request.returns,
            refills=request.refills,
            continues=request.continues,
            anew=request.anew,
            asked_s=now_s - request.waited_ms / 1000 if request.waited_ms else -math.inf,
        )
        job = self._engine.join(
            request.job, request.num_workers, member, request.min_workers, request.life
        )
        welcome = job.welcome(member)
        return to_proto(pb.JoinReply, welcome, instance=self._instance, mends=self.mends)

    async def Define(self, request: pb.DefineRequest, context: Context) -> pb.DefineReply:
        """Declares a table, or checks that this worker's is the job's."""
        self._heard(request)
        require_name("table", request.table.name)
        origin = Origin(request.clock, request.step)
        spec = replace(TableSpec.from_proto(request.table), origin=origin, is_held=request.held)
        await self._compile(spec)
        number = request.number if request.HasField("number") else None
        table = self._engine.define(
            self._heard(request), spec, adopts=request.adopts, number=number
        )
        return pb.DefineReply(
            table=table.index,
            created=table.is_new,
            clock=table.origin.clock,
            step=table.origin.step,
            has_weights=table.has_weights,
            content=content_to_proto(table.content),
        )

    async def _compile(self, spec: TableSpec) -> None:
        """Compiles the loops of a table, for seconds if the machine has no cache of them.

        A push would do it under the engine's lock, and all other calls would wait for that. A
        worker whose call ends before it repeats the call.
        """
        name = spec.content.name, spec.optimizer
        if name not in self._compiled:
            warm_up = kind_of(spec.content.name).warm_up
            work = asyncio.to_thread(warm_up, spec.content.optimizer(spec.optimizer))
            self._compiled[name] = asyncio.create_task(work)
        await asyncio.wait([self._compiled[name]])

    async def Change(self, request: pb.ChangeRequest, context: Context) -> pb.ChangeReply:
        """Excludes a worker from open steps, records its return, or changes the mode."""
        job = self._heard(request)
        if request.HasField("rule"):
            own = (request.incarnation, request.number)
            part_with_absent(self._engine, job, request.table, request.worker, own)
            self._engine.change(job, request.table, request.worker, rule_from_proto(request.rule))
        elif request.returns:
            own = (request.incarnation, request.number)
            come_back(self._engine, job, request.table, request.worker, own, request.minibatch)
        else:
            change = (request.incarnation, request.number, request.step)
            rule = rule_from_proto(request.next) if request.HasField("next") else None
            self._engine.step_aside(job, request.table, request.worker, change, rule)
        return pb.ChangeReply()

    async def Choose(self, request: pb.ChooseRequest, context: Context) -> pb.ChooseReply:
        """Records a worker's report for the choice of the mode, and answers that choice."""
        job = self._heard(request)
        to = request.table, request.worker, request.step, report_of(request), request.risk
        choice, text = job.choose_mode(*to, decides=request.decides)
        return pb.ChooseReply(choice=choice, text=text)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        """Renews a lease."""
        job = self._heard(request)
        text = printable(request.waiting_for, TEXT_LENGTH_MAX)
        reports = request.left_out[:TABLES_MAX]  # One of each table.
        left_out = {it.table: (it.steps, it.count, it.since) for it in reports}
        peers = [from_proto(PeerReport, report) for report in request.peers[:TABLES_MAX]]
        pace = pace_of(request.pace) if request.HasField("pace") else None
        plane = printable(request.data_plane, PLANE_LENGTH_MAX)
        stage = stage_of(request.stage) if request.HasField("stage") else None
        view = job.heartbeat(
            request.worker, text, left_out, request.reported, peers, pace, plane, stage,
            reached=request.reached[: self._engine.shard.num_shards],
            awaits=request.awaits[:WORKERS_MAX],
        )  # fmt: skip
        if not request.process:  # The first process of a group waits for other workers.
            self._engine.rest(job, request.worker, rests=request.rests)
        # Else it learns the number by this answer, or does not look for an address.
        if request.instance == self._instance:
            self._note_told(request)
        others = job.others_of(request.worker) if request.asks else NOTHING
        wanted = [to_proto(pb.ResidualRequest, item) for item in view.residual_requests]
        live = view.live if request.wants_live else ()
        return to_proto(
            pb.HeartbeatReply,
            view,
            instance=self._instance,
            residual_requests=wanted,
            live=live,
            next_address=self._next,
            former_instance=self._former,
            **others._asdict(),
        )

    async def Meet(self, request: pb.MeetRequest, context: Context) -> pb.MeetReply:
        """Records a worker that exchanges models with its peers, and names them."""
        peer = request.peer
        _require_counts(request)
        job = self._engine.heard(request.job, peer.rank, peer.incarnation)
        if request.parts:
            view = job.part(request.table, peer.rank, peer.incarnation)
        else:
            view = job.meet(
                request.table, peer_of(peer), request.epoch, request.since, again=request.again
            )
        return pb.MeetReply(
            epoch=view.epoch,
            meetings=[
                pb.Meeting(
                    epoch=meeting.epoch, peers=[to_proto(pb.Peer, peer) for peer in meeting.peers]
                )
                for meeting in view.meetings
            ],
            peers=[to_proto(pb.Peer, peer) for peer in view.peers],
            waiting_for=view.waiting_for,
            short=view.is_short,
        )

    async def SendResidual(
        self, request: pb.SendResidualRequest, context: Context
    ) -> pb.SendResidualReply:
        """Receives a worker's residual of a slice."""
        arrays = {array.name: array.data for array in request.arrays}
        self._heard(request).take_residual(
            request.table, request.slice, request.worker, request.step, arrays
        )
        return pb.SendResidualReply()

    async def FetchResidual(
        self, request: pb.FetchResidualRequest, context: Context
    ) -> pb.FetchResidualReply:
        """Returns the residuals that a checkpoint had of a worker's rank."""
        kept = self._heard(request).residuals_for(request.table, request.worker)
        if not request.HasField("slice"):
            return pb.FetchResidualReply(slices=sorted(kept))
        return pb.FetchResidualReply(
            arrays=[
                pb.Array(name=name, data=array.tobytes())
                for name, array in kept.get(request.slice, {}).items()
            ]
        )

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierReply:
        """Waits until all workers of the job are here."""
        require_name("barrier", request.name)
        job = self._heard(request)
        if request.table:
            begin_without(self._engine, job, request.table, request.worker, request.excuses)
            return pb.BarrierReply()
        if request.excuses and request.holds:
            part_with_late(self._engine, job, request.name, request.worker, request.excuses)
        elif request.excuses:
            job.barriers.excuse(request.name, request.round, request.worker, request.excuses)
        if request.withdraws:
            passes = job.barriers.withdraw(request.name, request.round, request.worker)
            return pb.BarrierReply(done=passes)
        to = request.name, request.round, request.worker, request.wait_ms / 1000, request.value
        arrival = await wait_at_barrier(job, self._engine.now, *to, holds=request.holds)
        return pb.BarrierReply(
            done=arrival.is_open,
            waiting_for=arrival.waiting_for,
            value=arrival.largest,
            newest=arrival.newest,
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Removes a worker from its job."""
        self._engine.leave(
            request.job,
            request.worker,
            request.incarnation,
            printable(request.reason, TEXT_LENGTH_MAX),
            failed=request.failed,
        )
        return pb.LeaveReply()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Returns the state of the jobs of this shard."""
        if request.mender and len(request.next_addresses) == self._engine.shard.num_shards:
            there = request.next_addresses[self._engine.shard.index]
            self.menders.note(request.mender, there, self._engine.now())
        reply: pb.StatusReply = await self._status.get()
        return reply

    def _make_status(self) -> pb.StatusReply:
        view = reading.status(self._engine)
        return pb.StatusReply(
            shard=self._describe(),
            jobs=[job_status(job) for job in view.jobs],
            uptime_s=self._engine.now() - self._engine.started_s,
            memory_nbytes=self._process.memory_info().rss,
            pid=os.getpid(),
            under_way_nbytes=view.under_way_nbytes,
            num_recoveries=view.num_recoveries,
            num_mended=view.num_mended,
            moving=self.moving(),
            next_address=self._next,
            copies=None if view.copies is None else to_proto(pb.CopiesStatus, view.copies),
            lost=[pb.LostJob(job=name, reason=reason) for name, reason in view.lost],
        )

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetReply:
        """Frees a job and its journal."""
        found, nbytes = self._engine.forget(request.job, is_forced=request.force)
        folder = await asyncio.to_thread(self._set_aside, request.job)
        return pb.ForgetReply(found=found, memory_nbytes=nbytes, checkpoints=folder)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        """Stops the shard after the requests under way are answered."""
        return pb.DrainReply(limit_s=self._drain(request.grace_s))

    def _heard(
        self,
        request: pb.DefineRequest
        | pb.ChangeRequest
        | pb.ChooseRequest
        | pb.HeartbeatRequest
        | pb.BarrierRequest
        | pb.SendResidualRequest
        | pb.FetchResidualRequest,
    ) -> RunningJob:
        _require_counts(request)
        return self._engine.heard(request.job, request.worker, request.incarnation)


def _require_counts(request: Message) -> None:
    """Raises RemoteProtocolError for a count that no job comes to."""
    for name in COUNTS:
        if (value := getattr(request, name, 0)) > COUNT_MAX:
            raise RemoteProtocolError(f"{name} is {value}, beyond {COUNT_MAX}")
