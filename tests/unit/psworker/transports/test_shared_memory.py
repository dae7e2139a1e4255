"""A push and its pull in one request, and the answers that one request can get."""

import socket
from collections.abc import Callable

import numpy as np
import pytest

from pscore.errors import TransportError
from pscore.net import sockets, wire
from pscore.pb.ps.v1 import data_pb2 as pb
from psworker.transports.base import OutgoingPush, PullCall
from psworker.transports.daemon_threads import DaemonExecutor
from psworker.transports.shared_memory import SharedMemoryTransport
from psworker.transports.socket_base import PushConnection

ACCEPTED, LATE = pb.PushReply(version=8), pb.PushReply(verdict=pb.VERDICT_TOO_LATE, version=9)
READY, WAITING = pb.PullReply(ready=True, version=8), pb.PullReply(waiting_for="worker 1")


class Notices:
    """Keeps the requests of a transport."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, pb.Envelope]] = []

    def request(self, call: object, envelope: pb.Envelope, payload: object = ()) -> None:
        self.sent.append((call, envelope))

    def hold(self) -> None:
        """Keeps nothing back."""

    def let_go(self) -> None:
        """Sends nothing, as nothing is kept."""


class AtOnce(DaemonExecutor):
    """Makes each call before `start` returns."""

    def __init__(self) -> None:
        """Starts no thread."""

    def start(self, call: Callable[[], None], on_failure: object) -> None:
        """Makes the call."""
        call()


class Plane(SharedMemoryTransport):
    """A data plane without connections."""

    def __init__(self, *, is_within_host: bool = False) -> None:
        self._attachments = {}
        self._kept, self._is_holding, self._is_within_host = None, False, is_within_host
        self.notices = self._notices = Notices()  # type: ignore[assignment]
        self.frames = Notices()
        self._push_connections = [PushConnection(self.frames, AtOnce())]  # type: ignore[arg-type]

    @property
    def kinds(self) -> list[tuple[str, int, bool]]:
        """Kind and slice of each request, and whether a pull is along."""
        return [
            (kind := str(envelope.WhichOneof("body")), getattr(envelope, kind).slice,
             kind == "push" and envelope.push.HasField("pull"))
            for _, envelope in self.notices.sent
        ]  # fmt: skip

    def answer(self, call: OutgoingPush, reply: pb.PullReply) -> pb.Envelope | None:
        """Passes an answer without a payload to a push that has a pull along."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(wire.encode(b""))
            incoming = sockets.read_header(ours)
            assert incoming is not None
            return self._on_answered(pb.Envelope(pulled=reply), call, incoming)

    def _land(self, call: PullCall, reply: pb.PullReply, incoming: sockets.Incoming) -> bool:
        incoming.read_into()
        return reply.buffer == 0  # Buffer 2 changes while it is copied.


def push_of(index: int, *, may_wait: bool = True, shared: bool = True) -> OutgoingPush:
    sender = pb.Sender(job="j")
    header = pb.PushHeader(sender=sender, slice=index, shared=shared, may_wait=may_wait)
    return OutgoingPush(header=header, payload=lambda: ())


def pull_of(index: int) -> PullCall:
    header = pb.PullHeader(sender=pb.Sender(job="j"), slice=index, clock=8, min_version=8)
    return PullCall(header=header, weights=np.zeros(1, np.float32), state=[])


def test_a_push_leaves_with_its_pull_while_requests_are_held() -> None:
    plane = Plane()
    plane.hold()
    plane.push(push_of(5))
    assert plane.kinds == []
    plane.pull(pull_of(5))
    plane.push(push_of(4))
    plane.pull(pull_of(3))  # Of another slice.
    plane.push(push_of(2, may_wait=False))
    plane.push(push_of(1))
    plane.let_go()
    plane.push(push_of(0))
    assert plane.kinds == [
        ("push", 5, True),
        ("push", 4, False),
        ("pull", 3, False),
        ("push", 2, False),
        ("push", 1, False),
        ("push", 0, False),
    ]
    along = plane.notices.sent[0][1].push.pull
    assert along == pb.PullHeader(clock=8, min_version=8), "sender and slice are the push's"


def test_a_gradient_that_is_sent_to_another_host_leaves_before_its_pull() -> None:
    plane, push = Plane(), push_of(5, shared=False)
    plane.hold()
    plane.push(push)
    assert [call for call, _ in plane.frames.sent] == [push]
    plane.pull(pull_of(5))
    assert plane.kinds == [("pull", 5, False)]


def test_a_gradient_that_is_sent_within_the_host_brings_its_pull_too() -> None:
    plane, push, pull = Plane(is_within_host=True), push_of(5, shared=False), pull_of(5)
    plane.hold()
    plane.push(push)
    plane.pull(pull)
    assert plane.kinds == []
    ((call, envelope),) = plane.frames.sent
    assert call is push
    assert envelope.push.pull == pb.PullHeader(clock=8, min_version=8)
    assert plane.answer(push, with_push(READY, ACCEPTED)) is None
    assert pull.done.result(0).version == 8


def sent_together() -> tuple[Plane, OutgoingPush, PullCall]:
    plane, push, pull = Plane(), push_of(5), pull_of(5)
    plane.hold()
    plane.push(push)
    plane.pull(pull)
    plane.notices.sent.clear()
    return plane, push, pull


def with_push(reply: pb.PullReply, pushed: pb.PushReply | None) -> pb.PullReply:
    whole = pb.PullReply()
    whole.CopyFrom(reply)
    if pushed is not None:
        whole.pushed.CopyFrom(pushed)
    return whole


@pytest.mark.parametrize("pushed", [ACCEPTED, LATE])
def test_one_answer_completes_both(pushed: pb.PushReply) -> None:
    plane, push, pull = sent_together()
    assert plane.answer(push, with_push(READY, pushed)) is None
    assert push.done.result(0) == pushed
    assert pull.done.result(0).version == 8
    assert plane.kinds == []


def test_a_push_and_its_pull_are_sent_again_alone_if_neither_is_answered() -> None:
    plane, push, pull = sent_together()
    assert plane.answer(push, WAITING) == pb.Envelope(push=push.header)
    assert plane.notices.sent == [(pull, pb.Envelope(pull=pull.header))]
    assert not push.done.done()
    assert not pull.done.done()


@pytest.mark.parametrize("reply", [WAITING, pb.PullReply(ready=True, buffer=2)])
def test_only_the_pull_is_asked_again_once_the_push_is_counted(reply: pb.PullReply) -> None:
    plane, push, pull = sent_together()
    assert plane.answer(push, with_push(reply, ACCEPTED)) is None
    assert push.done.result(0) == ACCEPTED
    assert not pull.done.done()
    assert plane.notices.sent == [(pull, pb.Envelope(pull=pull.header))]


def test_only_the_push_is_sent_again_once_the_pull_is_answered() -> None:
    plane, push, pull = sent_together()
    further = plane.answer(push, READY)
    assert further == pb.Envelope(push=push.header)
    assert pull.done.done()
    assert not push.done.done()
    push.done.set_exception(TransportError("closed"))
    assert pull.done.result(0).version == 8, "it has its answer"


def test_an_error_of_the_push_is_one_of_its_pull() -> None:
    _, push, pull = sent_together()
    error = TransportError("closed")
    push.done.set_exception(error)
    assert pull.done.exception(0) is error
