"""Calls to one shard: repeated while the network fails, never when the shard refuses."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pscore.errors import (
    ConfigError,
    PacelineError,
    RankTakenError,
    ReplacedError,
    ServerUnavailableError,
    TransportError,
)
from pscore.net import rpc
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from psworker.connection import shard_link
from psworker.connection.shard_link import Link
from psworker.transports import retry
from psworker.transports.retry import RetryPolicy
from tests.integration.command import taken_port

ADDRESS = "127.0.0.1:1"  # Nobody may listen there.


class Failure(grpc.RpcError, grpc.Call):
    """An error as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str = "", error: str = "") -> None:
        super().__init__()
        self._code, self._details, self._error = code, details, error

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return ((rpc.ERROR_KEY, self._error),) if self._error else ()

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


class Clock:
    """Time that advances only by sleeping."""

    def __init__(self) -> None:
        self.now_s = self.stopped_s = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr(retry, "awake_s", lambda: clock.now_s - clock.stopped_s)
    monkeypatch.setattr(retry, "random", SimpleNamespace(uniform=lambda low, high: high))
    return clock


def fails(*failures: BaseException) -> Callable[[], str]:
    """Returns a call that fails in turn, and then answers."""
    left = list(failures)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


DOWN = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
REFUSED = Failure(grpc.StatusCode.ABORTED, "no such worker", "ReplacedError")


def test_a_call_is_repeated_while_nobody_answers_less_and_less_often(clock: Clock) -> None:
    assert RetryPolicy(ADDRESS, 30.0).call(fails(*[DOWN] * 7)) == "answer"
    assert clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


@pytest.mark.parametrize(
    "failure", [Failure(grpc.StatusCode.DEADLINE_EXCEEDED), TransportError("connection broke")]
)
def test_a_connection_that_broke_is_tried_again(clock: Clock, failure: BaseException) -> None:
    assert RetryPolicy(ADDRESS, 30.0).call(fails(failure)) == "answer"


def test_a_worker_that_was_stopped_in_a_call_tries_again(clock: Clock) -> None:
    down, answers = fails(DOWN), fails()

    def call() -> str:
        if clock.now_s == 0.0:
            clock.now_s = clock.stopped_s = 3600.0
            raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED)
        return down() and answers()

    assert RetryPolicy(ADDRESS, 30.0).call(call) == "answer"


def test_a_call_may_wait_for_as_long_as_the_shard_is_heard(clock: Clock) -> None:
    """A push waits until there is room, or more workers, however long that takes."""
    policy, left = RetryPolicy(ADDRESS, 30.0), [True] * 20 + [False] * 20

    def waits() -> str:
        clock.now_s += 20.0
        if left.pop(0):
            policy.heard_s = clock.now_s - 1.0
        raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED)

    with pytest.raises(ServerUnavailableError, match=r"no shard answers at .* after \d\d.\d s"):
        policy.call(waits)
    assert len(left) == 18


def test_patience_ends_and_says_where_how_long_and_what_to_do(clock: Clock) -> None:
    message = (
        r"no shard answers at 127.0.0.1:1 after 3.1 s \(127.0.0.1:1: connection refused\); "
        r"start one with `psserver start --port 1`; its address comes from PACELINE_SERVERS"
    )
    with pytest.raises(ServerUnavailableError, match=message):
        RetryPolicy(ADDRESS, 2.0).call(fails(*[DOWN] * 100))


def test_a_silence_is_told_before_patience_ends(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ServerUnavailableError):
        RetryPolicy(ADDRESS, 24.0).call(fails(*[DOWN] * 100))
    said = [record.message for record in caplog.records]
    assert said[:2] == [
        "nothing listens on 127.0.0.1:1; this side waits 24 s for a shard to start there",
        "127.0.0.1:1 has not answered for 5 s; this side waits 19 s more",
    ]
    assert len(said) == 4


def test_a_shard_that_has_answered_is_not_told_to_be_missing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is being started again, and workers need not talk about every such second."""
    policy = RetryPolicy(ADDRESS, 24.0)
    policy.call(fails())
    policy.call(fails(DOWN))
    assert not caplog.records


def test_a_refusal_is_raised_at_once_as_what_it_is(clock: Clock) -> None:
    refused = Failure(grpc.StatusCode.ALREADY_EXISTS, "rank 0 is held", "RankTakenError")
    with pytest.raises(RankTakenError, match="rank 0 is held"):
        RetryPolicy(ADDRESS, 30.0).call(fails(refused))
    assert clock.slept == []


def test_nothing_is_repeated_when_the_link_is_closed(clock: Clock) -> None:
    policy = RetryPolicy(ADDRESS, 30.0)
    policy.is_over = True
    with pytest.raises(ServerUnavailableError, match="connection refused"):
        policy.call(fails(DOWN))
    assert clock.slept == []


class Control:
    """A control service whose heartbeat fails as the test says."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure
        self.timeouts: list[float] = []
        self.known: list[int] = []
        self.next_address, self.instance = "", 7
        self.answer: Callable[[], None] = lambda: None  # Called before an answer.

    def Heartbeat(  # noqa: N802 - gRPC's name
        self, request: pb.HeartbeatRequest, timeout: float
    ) -> pb.HeartbeatReply:
        self.timeouts.append(timeout)
        self.known.append(request.instance)
        self.answer()
        if self.failure is not None:
            raise self.failure
        return pb.HeartbeatReply(
            instance=self.instance, former_instance=5, next_address=self.next_address
        )


def beat(failure: BaseException | None, joined: int = 7) -> list[float]:
    link = Link(ADDRESS, patience_s=0.0)
    link.instance = joined
    control = Control(failure)
    link.control = control  # type: ignore[assignment]
    try:
        link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    finally:
        link.close()
    return control.timeouts


def test_a_heartbeat_is_sent_once_whatever_the_network_does() -> None:
    assert beat(None) == [2.0]
    assert beat(DOWN) == [2.0]


def test_a_heartbeat_that_is_refused_is_raised() -> None:
    with pytest.raises(ReplacedError, match="declared lost"):
        beat(Failure(grpc.StatusCode.ABORTED, "rank 1 was declared lost", "ReplacedError"))


def test_a_shard_that_was_started_again_is_not_the_one_joined() -> None:
    with pytest.raises(ReplacedError, match=f"the shard at {ADDRESS} has been restarted"):
        beat(None, joined=6)


def test_a_shard_that_went_on_without_its_standby_is_known_by_its_new_number() -> None:
    link, control = Link(ADDRESS, patience_s=0.0), Control(None)
    link.instance = 5
    link.control = control  # type: ignore[assignment]
    for _ in range(2):
        link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    link.close()
    assert control.known == [5, 7]


def test_a_shard_that_has_been_joined_is_reached_before_its_first_heartbeat() -> None:
    """A first heartbeat that named none let a job be set back beside its standby."""
    link = Link(ADDRESS, patience_s=0.0)
    assert link.reached == 0
    link.joined(7, 0, 1)
    assert link.reached == 7


def test_a_shard_is_reached_while_it_answers_heartbeats_as_the_one_joined() -> None:
    link, control = Link(ADDRESS, patience_s=0.0), Control(None)
    link.instance = 7
    link.control = control  # type: ignore[assignment]
    refused = Failure(grpc.StatusCode.NOT_FOUND, "no job", "UnknownJobError")
    found = [link.reached]
    for control.failure, control.instance in ((None, 7), (DOWN, 7), (None, 7), (refused, 7)):
        with contextlib.suppress(PacelineError):
            link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
        found.append(link.reached)
    control.failure, control.instance = None, 7
    link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    control.instance = 6
    with pytest.raises(ReplacedError):
        link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    link.close()
    assert [*found, link.reached] == [0, 7, 0, 7, 0, 0]


class Awaiting(control_pb2_grpc.ControlServicer):
    """A process that takes over once it is asked for that."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.address = ""

    def Describe(  # noqa: N802 - gRPC's name
        self, request: pb.DescribeRequest, context: object
    ) -> pb.DescribeReply:
        self.asked.append((request.awaited, request.wait_ms > 0))
        return pb.DescribeReply(instance=7 if len(self.asked) > 1 else 3)


@pytest.fixture
def moving() -> Iterator[tuple[Link, Control, Awaiting]]:
    """A link whose shard is about to be at another address, and moves there at once."""
    server, standby = grpc.server(ThreadPoolExecutor(1)), Awaiting()  # type: ignore[abstract]
    control_pb2_grpc.add_ControlServicer_to_server(standby, server)
    standby.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    link, control = Link(ADDRESS, patience_s=5.0), Control(None)
    link.instance, control.next_address = 7, standby.address
    link.control = control  # type: ignore[assignment]
    before = set(threading.enumerate())  # The thread of a link that was closed may yet end.
    link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    started = [one for one in threading.enumerate() if one not in before]
    (thread,) = [one for one in started if one.name == "next-shard"]

    def move() -> None:
        server.start()
        thread.join(60.0)

    control.answer = move
    yield link, control, standby
    link.close()
    server.stop(None)


def test_a_link_awaits_its_shard_at_the_next_address_and_moves_there(
    moving: tuple[Link, Control, Awaiting],
) -> None:
    link, control, standby = moving
    control.answer()
    assert (link.address, standby.asked) == (standby.address, [(7, True)] * 2)


@pytest.mark.parametrize("failure", [None, REFUSED])
def test_an_empty_process_answers_a_heartbeat_while_the_link_moves_to_the_standby(
    failure: BaseException | None, moving: tuple[Link, Control, Awaiting]
) -> None:
    link, control, standby = moving
    control.failure, control.instance = failure, 6
    link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
    assert link.address == standby.address
    assert not link.is_bare


def test_an_empty_process_refuses_a_call_while_the_link_moves_to_the_standby(
    moving: tuple[Link, Control, Awaiting],
) -> None:
    link, control, standby = moving
    control.failure = REFUSED
    asked: list[Callable[..., Any]] = [control.Heartbeat, lambda *_, **__: link.address]

    def method(request: pb.HeartbeatRequest, timeout: float) -> Any:
        return asked.pop(0)(request, timeout=timeout)

    assert link.call(method, pb.HeartbeatRequest()) == standby.address


def test_a_standby_that_does_not_answer_for_a_while_may_still_have_the_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_link, "AWAY_S", 1e6)
    with taken_port() as taken:
        link, control = Link(ADDRESS, patience_s=0.0), Control(None)
        link.instance = 7
        control.next_address = f"127.0.0.1:{taken.getsockname()[1]}"
        link.control = control  # type: ignore[assignment]
        try:
            link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
            control.instance = 6  # An empty process.
            for _ in range(2):
                link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
                assert link.reached == 7
            monkeypatch.setattr(shard_link, "AWAY_S", 0.0)
            with pytest.raises(ReplacedError, match="has been restarted"):
                link.beat(pb.HeartbeatRequest(), timeout_s=2.0)
            assert not link.reached
        finally:
            link.close()


def test_an_unknown_data_plane_is_refused_with_the_right_ones() -> None:
    link = Link(ADDRESS, patience_s=0.0)
    try:
        with pytest.raises(ConfigError, match="data plane is 'udp', must be one of auto, local"):
            link.open("udp")
        with pytest.raises(ServerUnavailableError, match=f"no shard answers at {ADDRESS}"):
            link.open("auto")
    finally:
        link.close()
