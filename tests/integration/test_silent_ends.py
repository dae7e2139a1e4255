"""No thread and no task of a shard or a relay ends by a bug while others wait: the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import pytest

from pscore.net import wire
from pscore.net.listener import Listener
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    control_pb2,
    publish_pb2,
    publish_pb2_grpc,
)
from pscore.subscription.reader import Reader
from pscore.threads import OwnedThread
from psserver.access.files import Trust
from psserver.engine import slice_queue
from psserver.engine.capture import TableCapture
from psserver.exits import Exit
from psserver.process.daemon import Daemon
from psserver.process.relay import RelayPlan, RelayProcess
from psserver.publish.publication import Publication
from psserver.publish.publications import Publications
from psserver.publish.relayed import RelayShard
from psserver.service.publications import ReadersServicer
from psserver.service.web import WebServer
from tests.integration.worker import WAIT_S, Worker
from tests.unit.psserver.process.test_supervisor import make_plan

# Nothing closes the sockets of a thread that an injected failure ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Collects the sockets that a failure has left, before other tests are told of them."""
    gc.freeze()  # All that was there before: a collection of everything takes seconds.
    yield
    gc.collect()
    gc.unfreeze()


Provoke = Callable[[str, int], object]  # Gets the shard's address, and a port to connect to.


class InjectedError(Exception):
    """A bug."""


def fail(*_: object, **__: object) -> NoReturn:
    raise InjectedError


async def fail_later(*_: object, **__: object) -> NoReturn:
    raise InjectedError


def break_thread(name: str) -> Callable[..., None]:
    """Returns what makes threads: those of one name fail."""
    make = OwnedThread.__init__

    def broken(thread: OwnedThread, body: Any, called: str, on_failure: Any) -> None:
        make(thread, fail if called == name else body, called, on_failure)

    return broken


# ----- what makes the broken code run


def nothing(address: str, port: int) -> None:
    """Waits for the duty of the process."""


def connect(address: str, port: int) -> None:
    with (
        contextlib.suppress(ConnectionError),  # The process may have ended before it is asked.
        socket.create_connection(("127.0.0.1", port), WAIT_S) as connection,
    ):
        connection.sendall(wire.MAGIC)


def train(address: str, port: int) -> None:
    """Makes a job with weights, which are published, and takes a copy."""
    worker = Worker(address)
    with contextlib.suppress(grpc.RpcError):  # The shard ends while it is asked.
        worker.join()
        worker.define()
        worker.push_weights()
        request = checkpoint_pb2.CaptureRequest(job="train", table="model", id="a", version=-1)
        checkpoint_pb2_grpc.CheckpointsStub(worker.channel).Capture(request, timeout=WAIT_S)
    worker.close()


def watch(address: str, port: int) -> None:
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        request = publish_pb2.WatchRequest(job="train", table="model")
        publish_pb2_grpc.PublicationsStub(channel).Watch(request, timeout=WAIT_S)


def thread(name: str) -> tuple[Any, str, object]:
    return OwnedThread, "__init__", break_thread(name)


SHARD: dict[str, tuple[tuple[Any, str, object], Provoke]] = {
    "thread data-accept": (thread("data-accept"), nothing),
    "thread data-read": (thread("data-read"), connect),
    "thread slice-queue": ((slice_queue, "execute", fail), train),
    "a publication": ((Publication, "_publish", fail), train),
    "a copy for a checkpoint": ((TableCapture, "_take", fail), train),
    "ticks": ((Daemon, "_tick", fail_later), nothing),
    "ticks of publications": ((Publications, "tick", fail), nothing),
    "ticks of windows": ((Daemon, "_tick_windows", fail_later), nothing),
    "bringing": ((Daemon, "_bring", fail_later), nothing),
    "room for strangers": ((Daemon, "keep_room", fail_later), nothing),
    "the metrics page": ((WebServer, "_thin_out", fail), connect),
    "a call of a reader": ((ReadersServicer, "Watch", fail_later), watch),
}


def note_ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the ports of the data sockets that are opened."""
    ports: list[int] = []
    start = Listener.start

    def note(listener: Listener) -> None:
        ports.append(listener.port)
        start(listener)

    monkeypatch.setattr(Listener, "start", note)
    return ports


@pytest.mark.parametrize(("broken", "provoke"), SHARD.values(), ids=SHARD.keys())
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_shard_ends_with_any_of_its_threads_and_tasks(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str, object], provoke: Provoke
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # Given back at the end.
    monkeypatch.setattr(Daemon, "_watch", lambda daemon: None)  # The test's signals and input.
    monkeypatch.setattr(*broken)
    ports = note_ports(monkeypatch)

    async def run() -> Exit:
        plan = replace(make_plan(num_shards=1), metrics_port=0, publish="train:every=1")
        daemon = Daemon(plan)
        ready = await daemon.start()
        running = asyncio.create_task(daemon.run(ready))
        port = ready.metrics_port if broken[0] is WebServer else ports[0]
        assert port is not None
        await asyncio.to_thread(provoke, f"127.0.0.1:{ready.port}", port)
        await asyncio.wait_for(running, WAIT_S)
        await daemon.end()
        return daemon.code

    assert asyncio.run(run()) is Exit.BUG


RELAY: dict[str, tuple[tuple[Any, str, object], Provoke]] = {
    "thread data-accept": (thread("data-accept"), nothing),
    "thread data-read": (thread("data-read"), connect),
    "thread relay": ((Reader, "wait", fail), nothing),
    "readers that are silent": ((RelayShard, "forget_silent", fail), nothing),
    "a call of a reader": ((ReadersServicer, "Watch", fail_later), watch),
}


def run_relay(capsys: pytest.CaptureFixture[str], provoke: Callable[[str], object]) -> None:
    """Runs a relay until it ends, or `provoke`, called with its address, has raised or returned."""

    async def run() -> None:
        plan = RelayPlan(
            servers=("127.0.0.1:1",),
            job="train",
            table="model",
            host="127.0.0.1",
            port=0,
            trust=Trust(),
            rate=0,
        )
        running = asyncio.create_task(RelayProcess(plan).run())
        async with asyncio.timeout(WAIT_S):
            while not (said := capsys.readouterr().out) and not running.done():
                await asyncio.sleep(0)
        if not running.done():
            await asyncio.to_thread(provoke, said.strip().partition("=")[2])
        await asyncio.wait_for(running, WAIT_S)

    asyncio.run(run())


@pytest.mark.parametrize(("broken", "provoke"), RELAY.values(), ids=RELAY.keys())
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_relay_ends_with_any_of_its_threads_and_tasks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: tuple[Any, str, object],
    provoke: Provoke,
) -> None:
    """Its shards need not answer for that."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(*broken)
    ports = note_ports(monkeypatch)
    with pytest.raises(InjectedError):
        run_relay(capsys, lambda address: provoke(address, ports[0]))
    assert "relay" not in {left.name for left in threading.enumerate()}


def test_a_call_that_a_relay_does_not_answer_is_refused_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not the relay: `psserver status` and workers may name it by mistake."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    kinds = set()

    def call(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            for file in (control_pb2, publish_pb2):
                for service in file.DESCRIPTOR.services_by_name.values():
                    for method in service.methods:
                        where = f"/{service.full_name}/{method.name}"
                        call = channel.unary_unary(where, None, None)
                        failure = call.future(b"", timeout=WAIT_S).exception()
                        if isinstance(failure, grpc.RpcError):
                            kinds.add(type(error_of(failure, address)).__name__)
        signal.raise_signal(signal.SIGTERM)

    run_relay(capsys, call)
    assert kinds == {"ConfigError"}
