"""The engine in one thread on virtual time: no event loop, no executor, no clock of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.compressors.randomk import RandomK
from pscore.errors import RemoteProtocolError
from pscore.pb.ps.v1 import data_pb2
from pscore.rules import SSGD, LocalSGD
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, FloatArray, TensorSpec
from psserver.decisions.membership import Member
from psserver.decisions.orders import Update
from psserver.decisions.shard import Actions, Job, Shard
from psserver.engine.engine import Engine
from psserver.engine.placement import Placement
from tests.unit.psserver.front import HYPER

NUMEL = (
    2 * Placement().inline_numel_max
)  # A slice whose work a shard's process leaves to its executor.
LEASE_S = 10.0
SPEC = TableSpec(
    name="model",
    tensors=(TensorSpec(name="w", shape=(NUMEL,), dtype="float32"),),
    num_shards=1,
    rule=SSGD(),
    compressor=NoCompression(),
    optimizer="sgd",
    num_groups=1,
)


class Reply:
    """Keeps the answers to its requests."""

    def __init__(self) -> None:
        self.pushes: list[data_pb2.PushReply] = []
        self.pulls: list[tuple[data_pb2.PullReply, list[FloatArray | ByteArray]]] = []

    def pushed(self, reply: data_pb2.PushReply) -> None:
        self.pushes.append(reply)

    def pulled(
        self,
        reply: data_pb2.PullReply,
        arrays: Sequence[FloatArray | ByteArray],
        release: Callable[[], None] | None,
    ) -> None:
        self.pulls.append((reply, [array.copy() for array in arrays]))
        if release is not None:
            release()


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("the engine started a thread or read a clock")


def test_it_makes_steps_and_ends_waits_on_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    decided: list[str] = []

    def note(job: Job, actions: Actions) -> None:
        decided.extend(f"version {a.version}" for _, a in actions if isinstance(a, Update))

    for owner, name in (
        (threading.Thread, "start"),
        (time, "monotonic"),
        (time, "perf_counter"),
        (asyncio, "get_running_loop"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    engine = Engine(Shard(0, 1, LEASE_S), now=lambda: now_s, on_decided=note)
    workers = [
        Member(rank=rank, incarnation=rank, restart=0, host="a", pid=1, heard_s=now_s)
        for rank in (0, 1)
    ]
    job, _ = [engine.join("run", 2, member) for member in workers]
    table = engine.define(job, SPEC)
    senders = [data_pb2.Sender(job="run", worker=rank, incarnation=rank) for rank in (0, 1)]
    grads = np.ones(NUMEL, np.float32)
    engine.share(job, table.index, 1, grads)
    reply = Reply()
    start = data_pb2.PushHeader(sender=senders[0], role=data_pb2.ROLE_WEIGHTS)
    engine.requests.on_push(start, np.zeros(4 * NUMEL, np.uint8), reply)
    first = data_pb2.PushHeader(sender=senders[0], samples=1.0, hyper=HYPER)
    engine.requests.on_push(first, grads.view(np.uint8), reply)
    second = data_pb2.PushHeader(sender=senders[1], samples=1.0, hyper=HYPER, shared=True)
    engine.requests.on_push(second, np.empty(0, np.uint8), reply)
    assert (len(reply.pushes), decided, engine.is_busy) == (3, ["version 1"], False)
    for clock in (1, 2):
        pull = data_pb2.PullHeader(sender=senders[0], clock=clock, min_version=clock)
        engine.requests.on_pull(pull, reply, 3.0)
    (answer, (weights,)), *later = reply.pulls
    assert (answer.version, weights[0], later) == (1, -1.0, [])
    now_s = 3.0
    assert engine.tick() == []
    assert not reply.pulls[1][0].ready
    now_s = LEASE_S + 1.0
    assert [member.rank for _, member in engine.tick()] == [0, 1]


def test_a_compressed_payload_in_shared_memory_is_refused() -> None:
    """Its worker could change it between the check and the use."""
    engine, numel = Engine(Shard(0, 1, LEASE_S), now=lambda: 0.0), 16
    member = Member(rank=0, incarnation=7, restart=0, host="a", pid=1, heard_s=0.0)
    job = engine.join("run", 1, member)
    tensor = TensorSpec(name="w", shape=(numel,), dtype="float32", compress=True)
    spec = replace(SPEC, tensors=(tensor,), compressor=RandomK(ratio=0.875))
    table = engine.define(job, spec)
    sender = data_pb2.Sender(job="run", worker=0, incarnation=7)
    grads = np.ones(numel, np.float32)  # As bytes it is a payload: a seed and 14 values.
    engine.share(job, table.index, 0, grads)
    start = data_pb2.PushHeader(sender=sender, role=data_pb2.ROLE_WEIGHTS)
    engine.requests.on_push(start, np.zeros(4 * numel, np.uint8), Reply())
    push = data_pb2.PushHeader(
        sender=sender, samples=1.0, hyper=HYPER, shared=True, compressor=RandomK.name
    )
    with pytest.raises(RemoteProtocolError, match=r"compressed by 'randomk' in shared memory"):
        engine.requests.on_push(push, np.empty(0, np.uint8), Reply())
    assert job.job.table(0).clock(0).version == 0


def test_windows_are_asked_for_only_while_a_table_has_some() -> None:
    """A shard without them need not wake fifty times a second."""
    engine = Engine(Shard(0, 1, LEASE_S), now=lambda: 0.0)
    assert not engine.tick_windows()
    for number, rule in enumerate((SSGD(), LocalSGD(quorum=1, window=0.5))):
        name = f"job-{number}"
        member = Member(rank=0, incarnation=7, restart=0, host="a", pid=1, heard_s=0.0)
        engine.define(engine.join(name, 1, member), replace(SPEC, rule=rule))
        assert engine.tick_windows() == (number == 1)
