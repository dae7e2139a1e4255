"""Drives one shard inside an event loop: frames in, decisions by `Shard`, numbers by the lanes.

All decisions are made on the event loop's thread, so the state machines need no locks. A request
waits on a future; a lane resolves it when the action that answers it has been carried out.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import structlog
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message

from pscore import wire
from pscore.compressors.none import NoCompression
from pscore.errors import DecodeError, RemoteProtocolError
from pscore.optimizers import warm_up
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Pull, Push, Role, Verdict
from psserver.clock import Acknowledge, Action, Answer, SliceClock, Token, Update
from psserver.lanes import Lane
from psserver.membership import Member
from psserver.shard import Actions, Address, Job, Shard, Table, TableSpec
from psserver.store import Payload, SliceStore
from psserver.tally import Tally

H = TypeVar("H", bound=Message)
log = structlog.get_logger()
RAW = NoCompression()
WAIT_MS_MAX = 10_000
SAMPLES_MAX = 1e12


@dataclass(slots=True, eq=False)
class Request:
    """One push or pull that is under way; it is its own token."""

    job: Job
    answered: asyncio.Future[bytes]
    loop: asyncio.AbstractEventLoop
    payload: Payload | None = None
    clock: SliceClock | None = None  # Of a push, with its worker: for the tally.
    worker: int = -1
    started_s: float = field(default_factory=time.monotonic)
    taken_s: float = 0.0  # When a lane began with the payload.

    def resolve(self, frame: bytes) -> None:
        """Answers, from any thread."""
        self.loop.call_soon_threadsafe(self._set, frame)

    def _set(self, frame: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(frame)


class Driver:
    """One shard in this process's event loop."""

    def __init__(
        self,
        shard: Shard,
        *,
        num_threads: int = 2,
        now: Callable[[], float] = time.monotonic,
        broke: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Starts without jobs.

        Args:
            shard: The decisions.
            num_threads: Threads for the numeric work of large slices.
            now: The clock of leases, in seconds.
            broke: Called from any thread when a lane fails, which only a bug can cause.
        """
        self.shard = shard
        self.now = now
        self.started_s = now()
        self.tally = Tally()
        self._broke = broke
        self._pool: Executor = ThreadPoolExecutor(num_threads, thread_name_prefix="lane")
        self._lanes: dict[tuple[int, int, int], Lane] = {}  # By (id of the job), table, slice.
        self._owners: dict[int, Job] = {}  # Keeps the ids above from being used again.
        self._barriers: dict[tuple[int, str], list[asyncio.Future[bool]]] = {}

    # ----- workers and tables

    def join(self, name: str, num_workers: int, member: Member) -> Job:
        """Takes a worker into a job."""
        job = self.shard.join(name, num_workers, member)
        log.info("worker joined", job=name, worker=member.rank, host=member.host, pid=member.pid)
        return job

    def define(self, job: Job, spec: TableSpec) -> tuple[Table, bool]:
        """Makes or finds a table, and allocates this shard's slices of it."""
        table, created = self.shard.define(job, spec)
        if created:
            self.forget_ended()
            self._owners[id(job)] = job
            for index, part in table.specs.items():
                store = SliceStore(part, spec.rule, table.optimizer)
                self._lanes[id(job), table.index, index] = Lane(store, self, self._pool)
            self._pool.submit(warm_up, table.optimizer)  # While the weights are on their way.
            log.info(
                "table defined",
                job=job.name,
                table=spec.name,
                mode=str(spec.rule),
                compression=str(spec.compressor),
                optimizer=spec.optimizer,
                tensors=len(spec.tensors),
                slices=len(table.specs),
                nbytes=table.nbytes,
            )
        return table, created

    def forget_ended(self) -> None:
        """Frees the numbers of jobs that have been replaced."""
        for key, job in list(self._owners.items()):
            if self.shard.jobs.get(job.name) is not job:
                del self._owners[key]
                for lane in [lane for lane in self._lanes if lane[0] == key]:
                    del self._lanes[lane]

    @property
    def is_busy(self) -> bool:
        """Whether any lane has work."""
        return any(lane.is_busy for lane in self._lanes.values())

    def stores(self, job: Job) -> list[SliceStore]:
        """Returns the slices of a job, for its status."""
        return [lane.store for key, lane in self._lanes.items() if key[0] == id(job)]

    # ----- pushes and pulls

    async def push(self, frame: bytes) -> bytes:
        """Takes a push frame and returns the reply frame once the push is counted.

        Raises:
            PacelineError: The frame is refused; nothing was counted.
        """
        header, payload = self._decode(frame, data_pb2.PushHeader())
        job, table, address = self._address(header)
        role = Role(header.role)
        clock = table.clock(header.slice)
        groups = table.spec.num_groups
        if not 0 <= header.samples <= SAMPLES_MAX:
            raise DecodeError(f"weight of a push is {header.samples}, must be 0..{SAMPLES_MAX:g}")
        push = Push(
            worker=header.sender.worker,
            step=header.step,
            base_version=header.base_version,
            role=role,
            samples=header.samples,
            present=wire.unpack_bits(header.present, len(table.specs[header.slice].segments)),
            hyper=wire.unpack_hyper(header.hyper, groups, len(table.optimizer.hyper_names))
            if role not in (Role.WEIGHTS, Role.STATE)
            else None,
        )
        request = self._request(job)
        request.payload = self._payload(table, header, payload)
        request.clock, request.worker = clock, push.worker
        self._lanes[id(job), address.table, address.slice].store.check(request.payload, role)
        before = clock.version
        actions = self.shard.push(job, address, push, request)
        job.counters.pushed_nbytes += len(frame)
        self.tally.received_nbytes += len(frame)
        self._carry_out(job, actions)
        if clock.version != before and clock.version == 0:
            log.info("weights loaded", job=job.name, table=address.table, slice=address.slice)
        return await request.answered

    async def pull(self, frame: bytes) -> bytes:
        """Takes a pull frame; returns the weights, or after its waiting time what is missing.

        Raises:
            PacelineError: The frame is refused.
        """
        header, _ = self._decode(frame, data_pb2.PullHeader())
        job, _, address = self._address(header)
        pull = Pull(
            worker=header.sender.worker,
            clock=header.clock,
            min_version=header.min_version,
            with_state=header.with_state,
        )
        request = self._request(job)
        self._carry_out(job, self.shard.pull(job, address, pull, request))
        if not request.answered.done():
            await asyncio.wait([request.answered], timeout=min(header.wait_ms, WAIT_MS_MAX) / 1000)
        if not request.answered.done() and job.table(address.table).clock(address.slice).forget(
            request
        ):
            reply = data_pb2.PullReply(
                ready=False, waiting_for=self.shard.waiting_for(job, address)
            )
            self.tally.num_pulls_put_off += 1
            return wire.encode(reply.SerializeToString())
        answer = await request.answered
        job.counters.pulled_nbytes += len(answer)
        self.tally.num_pulls_answered += 1
        self.tally.sent_nbytes += len(answer)
        return answer

    # ----- membership

    def leave(self, name: str, rank: int, incarnation: int, reason: str) -> None:
        """Lets a worker go, and goes on without it."""
        job = self.shard.jobs.get(name)
        actions = self.shard.leave(name, rank, incarnation, reason)
        if job is not None:
            log.info("worker left", job=name, worker=rank, reason=reason)
            self._carry_out(job, actions)
            self._ring(job)

    def tick(self) -> None:
        """Declares silent workers lost; called about once a second."""
        self.tally.settle()
        lost, actions = self.shard.tick(self.now())
        for job, member in lost:
            log.warning(
                "worker lost",
                job=job.name,
                worker=member.rank,
                host=member.host,
                pid=member.pid,
                silent_s=round(self.now() - member.heard_s, 1),
            )
            own = [item for item in actions if item[0].job == job.name]
            actions = [item for item in actions if item[0].job != job.name]
            self._carry_out(job, own)
            self._ring(job)

    async def barrier(
        self, job: Job, name: str, number: int, rank: int, wait_s: float
    ) -> tuple[bool, str]:
        """Arrives at a barrier and waits for the others; returns what is missing after `wait_s`."""
        done, missing = self.shard.barrier(job, name, number, rank)
        deadline_s = self.now() + min(wait_s, WAIT_MS_MAX / 1000)
        if done:
            self._ring(job)
        while not done and (left_s := deadline_s - self.now()) > 0:
            bell: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._barriers.setdefault((id(job), name), []).append(bell)
            await asyncio.wait([bell], timeout=left_s)
            done, missing = self.shard.barrier(job, name, number, rank)
        waiting = ", ".join(job.membership.describe(who) for who in missing[:4])
        return done, "" if done else f"{waiting} at barrier {name!r}"

    def _ring(self, job: Job) -> None:
        """Wakes everybody who waits at a barrier of `job`."""
        for key in [key for key in self._barriers if key[0] == id(job)]:
            for bell in self._barriers.pop(key):
                if not bell.done():
                    bell.set_result(True)

    def waiting_for(self, job: Job, table: Table) -> str:
        """Returns what the slice that waits longest waits for, in words; empty if none does."""
        for index, clock in table.clocks.items():
            if clock.num_waiting:
                return self.shard.waiting_for(job, Address(job.name, table.index, index))
        return ""

    # ----- Desk: what the lanes call

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push."""
        assert isinstance(token, Request)
        assert token.payload is not None
        token.taken_s = time.perf_counter()
        return token.payload

    def hold(self, token: Token) -> None:
        """The request keeps its bytes; nothing has to be copied."""

    def done(self, token: Token) -> None:
        """Lets a payload's memory go."""
        assert isinstance(token, Request)
        token.payload = None
        self.tally.times_s.append(time.perf_counter() - token.taken_s)

    def acknowledge(self, action: Acknowledge) -> None:
        """Answers a push."""
        assert isinstance(action.token, Request)
        reply = data_pb2.PushReply(
            verdict=cast("data_pb2.Verdict", int(action.verdict)),
            version=max(0, action.version),
        )
        action.token.resolve(wire.encode(reply.SerializeToString()))

    def answer(self, action: Answer, store: SliceStore) -> None:
        """Answers a pull; the bytes are copied here, before the next update."""
        assert isinstance(action.token, Request)
        arrays = store.read(action.worker, with_state=action.with_state)
        reply = data_pb2.PullReply(ready=True, version=action.version)
        if action.with_state:
            reply.counts.extend(store.counts.tolist())
        parts = [wire.as_bytes(array) for array in arrays]
        action.token.resolve(wire.encode(reply.SerializeToString(), *parts))

    def broke(self, problem: BaseException | None) -> None:
        """Passes on that a lane has failed."""
        if self._broke is not None and problem is not None:
            self._broke(problem)

    # ----- inside

    def _decode(self, frame: bytes, header: H) -> tuple[H, memoryview]:
        raw, payload = wire.decode(frame)
        try:
            header.ParseFromString(bytes(raw))
        except ProtobufDecodeError as problem:
            raise DecodeError(f"header of {len(raw)} bytes is not a message") from problem
        return header, payload

    def _address(
        self, header: data_pb2.PushHeader | data_pb2.PullHeader
    ) -> tuple[Job, Table, Address]:
        sender = header.sender
        job = self.shard.heard(sender.job, sender.worker, sender.incarnation, self.now())
        table = job.table(sender.table)
        table.clock(header.slice)
        return job, table, Address(sender.job, sender.table, header.slice)

    def _request(self, job: Job) -> Request:
        loop = asyncio.get_running_loop()
        return Request(job=job, answered=loop.create_future(), loop=loop)

    def _payload(self, table: Table, header: data_pb2.PushHeader, payload: memoryview) -> Payload:
        """Returns the payload with its compressor: the job's, or none where a push says so.

        Raises:
            RemoteProtocolError: The push is compressed by another one.
        """
        if header.compressor not in ("", table.spec.compressor.name):
            raise RemoteProtocolError(
                f"worker {header.sender.worker} pushed step {header.step} compressed by "
                f"{header.compressor!r}, the job has {str(table.spec.compressor)!r}"
            )
        return Payload(
            data=np.frombuffer(payload, dtype=np.uint8),
            compressor=table.spec.compressor if header.compressor else RAW,
            counts=tuple(header.counts),
        )

    def _carry_out(self, job: Job, actions: Actions) -> None:
        """Gives each slice's actions to its lane, in order."""
        for address, group in itertools.groupby(actions, key=lambda item: item[0]):
            lane = self._lanes[id(job), address.table, address.slice]
            batch = [action for _, action in group]
            for action in batch:
                self._count(action)
            lane.submit(batch)

    def _count(self, action: Action) -> None:
        if isinstance(action, Update):
            self.tally.num_updates += 1
        elif isinstance(action, Acknowledge):
            self.tally.pushes[action.verdict] += 1
            request = action.token
            assert isinstance(request, Request)
            if action.verdict is Verdict.ACCEPTED and request.clock is not None:
                staleness = request.clock.staleness.get(request.worker)
                if staleness is not None:
                    self.tally.staleness.observe(staleness)
