"""A push that brings its pull: one answer for both, and each step counted once."""

from typing import Any

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.errors import RemoteProtocolError
from pscore.pb.ps.v1 import data_pb2
from pscore.rules import SSGD
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard
from psserver.engine.engine import Engine
from psserver.engine.requests import NO_BYTES
from psserver.service.data_socket import SocketReply
from tests.unit.psserver.front import HYPER

NUMEL = 16
WAIT_S = 3.0


class Line:
    """Keeps what is sent on a connection."""

    def __init__(self) -> None:
        self.sent: list[data_pb2.Envelope] = []

    def send(self, envelope: data_pb2.Envelope, arrays: Any = (), release: Any = None) -> None:
        self.sent.append(envelope)
        if release is not None:
            release()


class Job:
    """Two workers of this host on one shard, in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.engine = Engine(Shard(0, 1, 100.0), now=lambda: self.now_s)
        self.line = Line()
        members = [
            Member(rank=rank, incarnation=rank, restart=0, host="a", pid=1, heard_s=0.0)
            for rank in (0, 1)
        ]
        job, _ = [self.engine.join("run", 2, member) for member in members]
        spec = TableSpec(
            name="model",
            tensors=(TensorSpec(name="w", shape=(NUMEL,), dtype="float32"),),
            num_shards=1,
            rule=SSGD(),
            compressor=NoCompression(),
            optimizer="sgd",
            num_groups=1,
        )
        self.table = self.engine.define(job, spec)
        self.senders = [data_pb2.Sender(job="run", worker=r, incarnation=r) for r in (0, 1)]
        for rank in (0, 1):
            self.engine.share(job, self.table.index, rank, np.ones(NUMEL, np.float32))
        self.counters = job.job.counters
        start = data_pb2.PushHeader(sender=self.senders[0], role=data_pb2.ROLE_WEIGHTS)
        zeros = np.zeros(4 * NUMEL, np.uint8)
        self.engine.requests.on_push(start, zeros, self.reply(0))
        self.line.sent.clear()

    def reply(self, number: int, *, is_for_both: bool = False) -> SocketReply:
        return SocketReply(self.line, number, is_for_both=is_for_both)  # type: ignore[arg-type]

    def push(self, rank: int, step: int, number: int, **pull: Any) -> None:
        """Pushes a step together with the pull of the version that follows."""
        header = data_pb2.PushHeader(
            sender=self.senders[rank], step=step, samples=1.0, hyper=HYPER, shared=True,
            may_wait=True,
            pull=data_pb2.PullHeader(clock=step + 1, min_version=step + 1, shared=True, **pull),
        )  # fmt: skip
        reply = self.reply(number, is_for_both=True)
        self.engine.requests.on_push(header, NO_BYTES, reply, pull_wait_s=WAIT_S)

    def taken(self) -> dict[int, data_pb2.PullReply]:
        """Returns the answers since the last call, by request; each is one to a pull."""
        sent, self.line.sent = self.line.sent, []
        assert all(envelope.WhichOneof("body") == "pulled" for envelope in sent)
        assert len({envelope.id for envelope in sent}) == len(sent)
        return {envelope.id: envelope.pulled for envelope in sent}


def verdict_of(reply: data_pb2.PullReply) -> int | None:
    return reply.pushed.verdict if reply.HasField("pushed") else None


def test_each_worker_gets_one_answer_once_the_step_is_complete() -> None:
    job = Job()
    for step in range(3):
        job.push(0, step, 10)
        assert job.taken() == {}
        job.push(1, step, 11)
        answers = job.taken()
        assert [(a.version, a.buffer, verdict_of(a)) for a in answers.values()] == [
            (step + 1, 1, data_pb2.VERDICT_ACCEPTED)
        ] * 2
    assert job.counters.num_updates == 3


def test_a_push_that_waits_too_long_is_reported_and_counts_once_when_it_comes_again() -> None:
    job = Job()
    job.push(0, 0, 10)
    job.now_s = WAIT_S
    job.engine.tick()
    waiting = job.taken()[10]
    assert (waiting.ready, verdict_of(waiting)) == (False, None)
    assert "worker 1" in waiting.waiting_for
    job.push(0, 0, 12)
    job.push(1, 0, 11)
    assert {n: verdict_of(a) for n, a in job.taken().items()} == {11: 0, 12: 0}
    job.push(0, 0, 13)  # As after a broken connection: the answer was lost.
    assert {n: verdict_of(a) for n, a in job.taken().items()} == {13: data_pb2.VERDICT_DUPLICATE}
    assert job.counters.num_updates == 1


def test_a_repeated_request_does_not_answer_for_a_push_that_was_replaced() -> None:
    """Its sender asks again for the missing part."""
    job = Job()
    job.push(0, 0, 10)
    job.push(0, 0, 12)
    job.push(1, 0, 11)
    assert {n: verdict_of(a) for n, a in job.taken().items()} == {10: None, 11: 0, 12: 0}


def test_a_request_whose_pull_is_refused_counts_nothing() -> None:
    job = Job()
    with pytest.raises(RemoteProtocolError, match="whose pulls are not compressed"):
        job.push(0, 0, 10, estimate=True)
    job.push(1, 0, 11)
    assert job.taken() == {}
