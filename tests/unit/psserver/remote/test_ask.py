"""The questions of commands to shards: connections that break, and shards that do not answer."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pscore.net.credentials import ANYONE
from pscore.net.rpc import ERROR_KEY
from pscore.pb.ps.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    control_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
)
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.exits import CommandError, Exit
from psserver.remote import ask, readers
from psserver.remote.checkpoint import capture

NUM_CLOSED = 3
WAIT_S = 200.0


class Control(control_pb2_grpc.ControlServicer):
    """A shard that tells its status, and nothing else.

    Attributes:
        is_idle: Cleared while it is busy with other work.
    """

    def __init__(self) -> None:
        self.is_idle = threading.Event()
        self.is_idle.set()

    def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: N802
        self.is_idle.wait(WAIT_S)
        return pb.StatusReply(pid=3)


class Relay(Control):
    """A relay, which refuses what only shards answer."""

    def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.ServicerContext
    ) -> pb.DrainReply:
        context.set_trailing_metadata(((ERROR_KEY, "ConfigError"),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not answered by a relay")
        raise AssertionError


class Published(publish_pb2_grpc.PublicationsServicer):
    """A shard with one publication."""

    def List(  # noqa: N802
        self, request: publish_pb2.ListRequest, context: object
    ) -> publish_pb2.ListReply:
        one = publish_pb2.PublicationStatus(job="night", table="model", newest=7, every=4)
        return publish_pb2.ListReply(publications=[one])


def serve(address: str, control: Control | None = None) -> grpc.Server:
    servicer = health.HealthServicer()
    for name in ("", "liveness", "readiness"):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    control = Control() if control is None else control  # type: ignore[abstract]
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    publish_pb2_grpc.add_PublicationsServicer_to_server(
        Published(),  # type: ignore[abstract]
        server,
    )
    assert server.add_insecure_port(address)
    server.start()
    return server


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a peer that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a shard: it closes three connections, refuses the next, and then answers."""
    monkeypatch.setattr(ask, "ANSWER_S_MAX", WAIT_S)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    started: list[grpc.Server] = []

    def close_some() -> None:
        for _ in range(NUM_CLOSED):
            listener.accept()[0].close()
        listener.close()
        started.append(serve(address))

    thread = threading.Thread(target=close_some)
    thread.start()
    yield address
    thread.join()
    started[0].stop(None).wait()


def test_health_is_asked_again_when_a_connection_is_closed_or_refused(late: str) -> None:
    assert ask.readiness([late]) == [True]


def test_a_scheduled_checkpoint_asks_again_for_the_status(late: str) -> None:
    """Else its job has no checkpoint for a second interval."""
    assert [reply.pid for reply in ask.statuses([late], is_patient=True)] == [3]


def test_a_checkpoint_waits_for_the_status_of_a_shard_that_is_busy(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """Under load a turn had no checkpoints; one that is stopped still has the short limit."""
    control = Control()  # type: ignore[abstract]
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    server = serve(address, control)
    monkeypatch.setattr(ask, "ANSWER_S_MAX", 1.0)
    with pytest.raises(CommandError, match=f"nothing answers at {silent} within 1 s"):
        ask.statuses([silent], is_patient=True)
    monkeypatch.setattr(ask, "BUSY_S_MAX", WAIT_S)
    control.is_idle.clear()
    threading.Timer(2.0, control.is_idle.set).start()
    assert [reply.pid for reply in ask.statuses([address], is_patient=True)] == [3]
    server.stop(None).wait()


class Noted(checkpoint_pb2_grpc.CheckpointsServicer):
    """A shard that hears of the last checkpoint."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def NoteLast(  # noqa: N802
        self, request: checkpoint_pb2.NoteLastRequest, context: object
    ) -> checkpoint_pb2.NoteLastReply:
        self.heard.set()
        return checkpoint_pb2.NoteLastReply()


def test_a_last_checkpoint_is_announced_to_a_shard_that_is_slow_to_talk() -> None:
    """At a load of 30 a connection took longer than a second: the shard ended before it."""
    noted, server = Noted(), grpc.server(ThreadPoolExecutor(2))  # type: ignore[abstract]
    checkpoint_pb2_grpc.add_CheckpointsServicer_to_server(noted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on() -> None:
            near, _ = listener.accept()
            time.sleep(2.0)
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                ends = {near: far, far: near}
                while True:
                    for source in select.select(ends, (), ())[0]:
                        if not (data := source.recv(1 << 16)):
                            return
                        ends[source].sendall(data)

        thread = threading.Thread(target=pass_on)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ask.note_last([address], ANYONE, is_over=False)
        thread.join()
    assert noted.heard.is_set()
    server.stop(None).wait()


def test_the_limit_of_a_silent_shard_is_named_and_no_wait_for_a_closed_port(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr(ask, "ANSWER_S_MAX", 0.5)
    with pytest.raises(CommandError, match=rf"nothing answers at {silent} within 0\.5 s; "):
        ask.statuses([silent])
    with socket.create_server(("127.0.0.1", 0)) as found:
        closed = f"127.0.0.1:{found.getsockname()[1]}"
    with pytest.raises(CommandError, match=f"nothing answers at {closed}; "):
        ask.statuses([closed])


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([1, 0], "a:1 is shard 1 of 2, and the list of servers has it as shard 0 of 2: give all"),
        ([0], "a:1 is shard 0 of 2, and the list of servers has it as shard 0 of 1: give all, in"),
    ],
)
def test_a_checkpoint_of_shards_in_another_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, shards: list[int], message: str
) -> None:
    """A supervisor whose shard_addresses were swapped wrote none, and called that a bug."""
    replies: list[pb.StatusReply | CommandError] = [
        pb.StatusReply(shard=pb.DescribeReply(shard=shard, num_shards=2)) for shard in shards
    ]
    addresses = ["a:1", "b:1"][: len(shards)]
    monkeypatch.setattr(ask, "statuses", lambda *_, **__: replies)
    with pytest.raises(CommandError, match=message):
        capture(addresses, ANYONE, None, weights_only=False)


def test_the_order_is_that_of_the_shards_that_answer() -> None:
    silent = CommandError(Exit.NO_ANSWER, "nothing answers at a:1")
    second = pb.StatusReply(shard=pb.DescribeReply(shard=1, num_shards=2))
    ask.require_order(["a:1", "b:1"], [silent, second])


def test_publications_are_shown_though_a_shard_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "ANSWER_S_MAX", WAIT_S)
    with contextlib.ExitStack() as stack:
        made = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        address, gone = [f"127.0.0.1:{stack.enter_context(one).getsockname()[1]}" for one in made]
    server = serve(address)
    answers = ask.publications([address, gone])
    server.stop(None).wait()
    (one,) = readers.listed(answers)
    assert (one["job"], one["version"]) == ("night", 7)
    with pytest.raises(CommandError, match=f"nothing answers at {gone}"):
        readers.require_all(answers)
    readers.require_all(answers[:1])
    with pytest.raises(CommandError, match="nothing answers"):
        ask.publications([gone])


def test_a_refusal_is_one_sentence_that_advises_no_start_of_servers() -> None:
    """It came with gRPC's word for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    server = serve(address, Relay())  # type: ignore[abstract]
    stopped, (problem,) = ask.drain([address], 1.0)
    server.stop(0)
    assert not stopped
    assert str(problem) == f"{address} refuses: not answered by a relay"
    assert not problem.remedy
