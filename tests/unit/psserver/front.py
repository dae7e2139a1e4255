"""One shard behind its gRPC services, without a network: requests in, replies or refusals out.

Everything from the servicer on is the daemon's own; only the sockets and the clock are missing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from pscore.net import wire
from pscore.net.rpc import DATA_SERVICE
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.types import FloatArray, Verdict
from psserver.decisions.shard import Job, Shard
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob
from psserver.engine.placement import Placement
from psserver.service.control import ControlServicer, data_handler
from psserver.service.refusals import refusing
from psserver.slices.store import SliceStore
from tests.unit.psserver.owned import Engines, owned

T = TypeVar("T")
P = ParamSpec("P")
LEASE_S = 10.0
JOB = "run"
NUMEL = 32  # Of the model below: one slice of two segments.
HYPER = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # Plain SGD with learning rate 1.


engines = Engines()  # Of the scene that is being played.


class Refused(Exception):  # noqa: N818 - it is what the peer is told, not an error of ours
    """A call ended with a status code of ours."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Context:
    """The parts of a call that a servicer uses."""

    async def abort(self, code: object, details: str, metadata: Sequence[tuple[str, str]]) -> None:
        raise Refused(metadata[0][1], details)


class Refusing:
    """A servicer behind the interceptor that answers refusals."""

    def __init__(self, servicer: object) -> None:
        self.servicer = servicer

    def __getattr__(self, name: str) -> Any:
        return refusing(getattr(self.servicer, name))


class Front:
    """A shard, its services, and time."""

    placement = Placement()

    def __init__(self, journals: JournalDir | None = None) -> None:
        """Must be made inside an event loop."""
        self.now_s = 0.0
        self.problems: list[BaseException] = []
        shard = Shard(0, 1, LEASE_S)
        self.executor = ThreadPoolExecutor(1)
        self.engine = Engine(
            shard,
            now=lambda: self.now_s,
            executor=self.executor,
            placement=self.placement,
            journals=journals,
            broke=self.problems.append,
        )
        engines.add(self.engine)
        servicer = ControlServicer(self.engine, "cluster", 7, lambda grace_s: grace_s)
        self.servicer = servicer
        self.control: Any = Refusing(servicer)
        handler: Any = data_handler(self.engine)
        self._push, self._pull = (
            refusing(handler.service(SimpleNamespace(method=f"/{DATA_SERVICE}/{name}")).unary_unary)
            for name in ("Push", "Pull")
        )

    @property
    def job(self) -> Job:
        return self.engine.shard.jobs[JOB]

    @property
    def running(self) -> RunningJob:
        return self.engine.jobs[JOB]

    def weights(self) -> FloatArray:
        """Returns the weights of the model's only slice."""
        (store,) = stores_of(self.running)
        return store.weights

    def version(self) -> int:
        return self.job.table(0).clock(0).version

    # ----- control

    async def join(self, rank: int, num_workers: int = 2, **fields: Any) -> pb.JoinReply:
        values: dict[str, Any] = {"incarnation": 100 + rank, "protocol": wire.PROTOCOL, "host": "a"}
        values |= {"job": JOB, **fields}
        request = pb.JoinRequest(rank=rank, num_workers=num_workers, **values)
        reply: pb.JoinReply = await self.control.Join(request, Context())
        return reply

    async def define(self, rank: int = 0, **fields: Any) -> pb.DefineReply:
        request = pb.DefineRequest(
            job=JOB, worker=rank, incarnation=100 + rank, table=table(**fields)
        )
        reply: pb.DefineReply = await self.control.Define(request, Context())
        return reply

    async def ready(self, num_workers: int = 2, **fields: Any) -> None:
        """Makes a job whose weights are zeros."""
        for rank in range(num_workers):
            await self.join(rank, num_workers)
        await self.define(**fields)
        zeros = np.zeros(NUMEL, np.float32)
        await self.push(push_header(0, 0, role=data_pb2.ROLE_WEIGHTS, hyper=[]), zeros)
        # The push is answered before its queue is idle; where the next one runs depends on that.
        await asyncio.wrap_future(self.executor.submit(lambda: None))

    # ----- data

    async def push(self, header: data_pb2.PushHeader, *payload: FloatArray) -> data_pb2.PushReply:
        parts = [wire.as_bytes(array) for array in payload]
        return await self.push_frame(wire.encode(header.SerializeToString(), *parts))

    async def push_frame(self, frame: bytes) -> data_pb2.PushReply:
        answer = await self._push(frame, Context())
        return data_pb2.PushReply.FromString(bytes(wire.decode(answer)[0]))

    async def pull(self, header: data_pb2.PullHeader) -> tuple[data_pb2.PullReply, FloatArray]:
        return await self.pull_frame(wire.encode(header.SerializeToString()))

    async def pull_frame(self, frame: bytes) -> tuple[data_pb2.PullReply, FloatArray]:
        raw, payload = wire.decode(await self._pull(frame, Context()))
        return data_pb2.PullReply.FromString(bytes(raw)), np.frombuffer(payload, np.float32)


def sender(rank: int, **fields: Any) -> data_pb2.Sender:
    values: dict[str, Any] = {"job": JOB, "worker": rank, "incarnation": 100 + rank}
    return data_pb2.Sender(**values | fields)


def push_header(rank: int, step: int, **fields: Any) -> data_pb2.PushHeader:
    values: dict[str, Any] = {"sender": sender(rank), "step": step, "samples": 1.0, "hyper": HYPER}
    return data_pb2.PushHeader(**values | fields)


def pull_header(rank: int, clock: int, min_version: int, **fields: Any) -> data_pb2.PullHeader:
    values: dict[str, Any] = {"clock": clock, "min_version": min_version}
    return data_pb2.PullHeader(**values | {"sender": sender(rank)} | fields)


def table(**fields: Any) -> pb.Table:
    """Returns the declaration of a model in one slice: the bias, a gap to 16, and the weight."""
    values: dict[str, Any] = {
        "name": "model",
        "tensors": [
            pb.Tensor(name="weight", shape=[4, 4], dtype="float32"),
            pb.Tensor(name="bias", shape=[10], dtype="float32"),
        ],
        "num_shards": 1,
        "rule": pb.Plugin(name="ssgd"),
        "compressor": pb.Plugin(name="none"),
        "optimizer": "sgd",
        "num_groups": 1,
    }
    return pb.Table(**values | fields)


def stores_of(job: RunningJob) -> list[SliceStore]:
    """Returns the numbers of all flat slices of a job."""
    stores = [queue.store for table in job.tables.values() for queue in table.queues.values()]
    return [store for store in stores if isinstance(store, SliceStore)]


def grad(value: float) -> FloatArray:
    return np.full(NUMEL, value, np.float32)


def play(scene: Callable[[Front], Awaitable[T]]) -> T:
    """Runs a scene in an event loop of its own; nothing may have broken in it.

    Nor may anything of the shard have read a state machine without its lock.
    """

    async def run() -> T:
        front = Front()
        with owned(engines) as unguarded:
            result = await scene(front)
        engines.end_scene()
        assert not front.problems, front.problems
        assert not unguarded, "\n".join(sorted(set(unguarded)))
        front.executor.shutdown()
        return result

    return asyncio.run(run())


def played(scene: Callable[Concatenate[Front, P], Awaitable[None]]) -> Callable[P, None]:
    """Makes a test of a scene, which gets a front before the arguments of the test."""

    @functools.wraps(scene)
    def test(*args: P.args, **named: P.kwargs) -> None:
        play(lambda front: scene(front, *args, **named))

    signature = inspect.signature(scene)
    own = list(signature.parameters.values())[1:]
    test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return test


def told(reply: data_pb2.PushReply) -> tuple[str, int]:
    """Returns what a push was answered with."""
    return Verdict(int(reply.verdict)).name, reply.version


async def settle() -> None:
    """Runs all callbacks that are ready now."""
    for _ in range(10):
        await asyncio.sleep(0)
