"""A residual is sent as it was after the push that a shard names, or not at all."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscore.compressors.two_bit import TwoBit
from pscore.errors import ServerUnavailableError
from pscore.partition import make_layout
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ANY_STEP, Push, TensorSpec
from psworker.compression.error_feedback import Feedback
from psworker.connection.exchange.residuals import Residuals

NUMEL = 32
LAYOUT = make_layout([TensorSpec(name="w", shape=(NUMEL,), dtype="float32", compress=True)], 1)
TOO_LATE = data_pb2.VERDICT_TOO_LATE


class FakeWorker:
    """A worker of one slice with a fixed threshold of 1, and the shard that it talks to."""

    def __init__(self, kept: float | None = None) -> None:
        self.kept = kept
        self.sent: list[pb.SendResidualRequest] = []
        self.problem: Exception | None = None
        control = SimpleNamespace(FetchResidual=self.fetch, SendResidual=self.receive)
        link = SimpleNamespace(control=control, call=lambda method, request: method(request))
        self.session: Any = SimpleNamespace(
            job="job", rank=1, incarnation=7, links=[link], residual_senders={}
        )
        self.feedback = Feedback(TwoBit(threshold=1.0), NUMEL, "key")
        self.pushes: dict[int, Future[data_pb2.PushReply]] = {}
        session: Any = self.session
        self.residuals = Residuals(session, 3, LAYOUT, [self.feedback], self.pushes)

    def fetch(self, request: pb.FetchResidualRequest) -> pb.FetchResidualReply:
        assert (request.job, request.worker, request.incarnation, request.table) == ("job", 1, 7, 3)
        if self.kept is None:
            return pb.FetchResidualReply()
        if not request.HasField("slice"):
            return pb.FetchResidualReply(slices=[0])
        data = np.full(NUMEL, self.kept, np.float32).tobytes()
        return pb.FetchResidualReply(arrays=[pb.Array(name="residual", data=data)])

    def receive(self, request: pb.SendResidualRequest) -> pb.SendResidualReply:
        if self.problem is not None:
            raise self.problem
        self.sent.append(request)
        return pb.SendResidualReply()

    def push(self, step: int, value: float) -> None:
        self.residuals.begin(0, step)
        push = Push(worker=1, step=step, base_version=step)
        self.feedback.encode(push, np.full(NUMEL, value, np.float32))
        self.pushes[0] = Future()

    def answer(self, **fields: Any) -> None:
        self.pushes[0].set_result(data_pb2.PushReply(**fields))

    def settle(self) -> None:
        self.residuals.settle(0, self.pushes.pop(0).result())

    def received(self) -> list[tuple[int, float]]:
        """Returns the steps that were sent, each with the first element of the residual."""
        arrays = [{a.name: np.frombuffer(a.data, "<f4") for a in r.arrays} for r in self.sent]
        steps = [request.step for request in self.sent]
        return [(step, float(a["residual"][0])) for step, a in zip(steps, arrays, strict=True)]


def test_a_residual_requested_with_an_acknowledgement_is_sent_before_the_next_push() -> None:
    worker = FakeWorker()
    worker.push(0, 1.25)
    worker.answer()
    worker.settle()
    assert worker.received() == []  # Nobody has asked.
    worker.push(1, 1.25)
    worker.answer(send_residual=True)
    worker.settle()
    assert worker.received() == [(1, 0.5)]
    request = worker.sent[0]
    assert (request.job, request.worker, request.incarnation) == ("job", 1, 7)
    assert (request.table, request.slice) == (3, 0)


def test_a_late_push_returns_to_the_residual_before_that_is_sent() -> None:
    worker = FakeWorker()
    worker.push(0, 1.25)
    worker.answer(send_residual=True, verdict=TOO_LATE)
    worker.settle()
    assert worker.received() == [(0, 1.25)]


def test_a_worker_that_has_stopped_sends_what_a_heartbeat_asks_for() -> None:
    worker = FakeWorker()
    sender = worker.session.residual_senders[3]
    worker.push(4, 1.25)
    sender.send_after(4, [0])
    assert worker.received() == []  # Not answered yet, so it may still come back.
    worker.answer(verdict=TOO_LATE)
    sender.send_after(4, [0])
    sender.send_after(ANY_STEP, [0])
    assert worker.received() == [(4, 1.25)] * 2
    worker.settle()  # When training continues: a gradient that came back is not counted again.
    sender.send_after(4, [0])
    assert worker.received()[2:] == [(4, 1.25)]


def test_a_worker_that_has_gone_on_sends_nothing() -> None:
    worker = FakeWorker()
    for step in range(2):
        worker.push(step, 1.25)
        worker.answer()
        worker.settle()
    worker.session.residual_senders[3].send_after(0, [0])
    assert worker.received() == []


def test_a_new_process_fetches_the_residual_of_its_rank_and_can_send_it() -> None:
    worker = FakeWorker(kept=0.5)
    worker.session.residual_senders[3].send_after(9, [0])
    assert worker.received() == [(9, 0.5)]
    worker.push(0, 0.25)
    worker.answer(send_residual=True)
    worker.settle()
    assert worker.received()[1:] == [(0, 0.75)]


def test_a_shard_that_does_not_take_it_does_not_stop_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = FakeWorker()
    worker.problem = ServerUnavailableError("nobody there")
    worker.push(0, 1.25)
    worker.answer(send_residual=True)
    worker.settle()
    assert "the residual of slice 0 is missing in a checkpoint: nobody there" in caplog.text


def test_the_residual_stays_when_a_worker_comes_back() -> None:
    worker = FakeWorker()
    worker.push(0, 1.25)
    worker.pushes.clear()
    worker.residuals.restart(5)
    assert worker.session.residual_senders[5] is worker.residuals
    worker.push(1, 0.25)
    worker.answer(send_residual=True)
    worker.settle()
    assert worker.received() == [(1, 0.5)]
    assert worker.sent[0].table == 5
