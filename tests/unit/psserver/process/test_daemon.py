"""One shard's process, here inside the test's: how it answers while it ends, and when it must."""

import asyncio
import dataclasses
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from pscore.net import descriptors, wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from psserver.engine.engine import Engine
from psserver.exits import CommandError, Exit
from psserver.process.daemon import NAMES, STATUS, Daemon, serve
from psserver.process.ports import bind_error, probe
from psserver.process.shard_plan import ShardPlan, report_from_json, report_to_json
from psserver.service.control import ControlServicer
from tests.unit.psserver.process.test_supervisor import make_plan

Stub: TypeAlias = "control_pb2_grpc.ControlAsyncStub"


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the hook of threads back, which a shard sets."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


def with_daemon(use: Callable[[Daemon, Stub], Awaitable[None]]) -> None:
    async def run() -> None:
        daemon = Daemon(make_plan(num_shards=1))
        ready = await daemon.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.port}") as channel:
            await use(daemon, control_pb2_grpc.ControlStub(channel))
        await daemon.end()

    asyncio.run(run())


async def until_refused(stub: Stub) -> None:
    """Asks until the shard refuses a request.

    A request that arrives in the very moment in which gRPC's server begins to stop is sometimes
    dropped without an answer, so each request has a deadline of its own.
    """
    while True:
        try:
            await stub.Describe(pb.DescribeRequest(), timeout=1.0)
        except grpc.aio.AioRpcError as problem:
            if problem.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


def test_a_request_under_way_is_answered_while_the_shard_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived, may_go = asyncio.Event(), asyncio.Event()

    async def slow(self: object, request: object, context: object) -> pb.HeartbeatReply:
        arrived.set()
        await may_go.wait()
        return pb.HeartbeatReply(waiting_for="nothing")

    monkeypatch.setattr(ControlServicer, "Heartbeat", slow)
    monkeypatch.setattr(Engine, "is_busy", property(lambda self: not may_go.is_set()))

    async def use(daemon: Daemon, stub: Stub) -> None:
        daemon.grace_s = 60.0
        answer = asyncio.ensure_future(stub.Heartbeat(pb.HeartbeatRequest()))
        await arrived.wait()
        ending = asyncio.create_task(daemon.end())
        with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED"):
            await until_refused(stub)
        assert not ending.done()
        may_go.set()
        assert (await answer).waiting_for == "nothing"
        await ending

    with_daemon(use)


def test_a_refusal_stops_nothing_and_a_bug_stops_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: object, request: object, context: object) -> pb.LeaveReply:
        raise AssertionError("an invariant")

    monkeypatch.setattr(ControlServicer, "Leave", broken)

    async def use(daemon: Daemon, stub: Stub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Heartbeat(pb.HeartbeatRequest(job="nonesuch"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        before = daemon.code
        with capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError):
            await stub.Leave(pb.LeaveRequest())
        assert (before, daemon.code) == (Exit.OK, Exit.BUG)
        assert [line["log_level"] for line in lines if "shard broke" in line["event"]] == ["error"]

    with_daemon(use)


def test_a_bug_in_a_thread_stops_the_shard() -> None:
    async def use(daemon: Daemon, stub: Stub) -> None:
        def fail() -> None:
            raise AssertionError("an invariant")

        former = threading.excepthook
        threading.excepthook = daemon._on_thread
        try:
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
        finally:
            threading.excepthook = former
        assert daemon.code is Exit.BUG

    with_daemon(use)


def test_drain_takes_no_longer_than_the_shard_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(daemon: Daemon, stub: Stub) -> None:
        await stub.Drain(pb.DrainRequest(grace_s=1e9))
        assert daemon.grace_s == daemon.plan.grace_s == 0.0
        await daemon._ending.wait()

    with_daemon(use)


def test_a_drained_shard_has_all_the_time_of_its_start_for_a_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not that of the client, which is for requests; it ends when its parent says so."""
    plan = dataclasses.replace(
        make_plan(num_shards=1), grace_s=1000.0, checkpoint_dir="none", awaits_last=True
    )
    read_fd, write_fd = os.pipe()

    async def use() -> None:
        daemon = Daemon(plan)
        ready = await daemon.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.port}") as channel:
            stub: Stub = control_pb2_grpc.ControlStub(channel)
            running = asyncio.create_task(daemon.run(ready))
            await stub.Join(pb.JoinRequest(job="j", num_workers=1, protocol=wire.PROTOCOL))
            reply = await stub.Drain(pb.DrainRequest(grace_s=0.01))
            assert reply.limit_s == 1000.01
            done, _ = await asyncio.wait([running], timeout=0.2)
            assert not done
            os.kill(os.getpid(), signal.SIGINT)
            await running

    with os.fdopen(read_fd) as stdin, os.fdopen(write_fd, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(use())


def test_status_names_the_waiting_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(daemon: Daemon, stub: Stub) -> None:
        reply = await stub.Status(pb.StatusRequest())
        assert (reply.shard.num_shards, reply.shard.cluster) == (1, "c")
        assert reply.memory_nbytes > 0

    with_daemon(use)


def test_health_says_whether_anybody_can_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(daemon: Daemon, stub: Stub) -> None:
        ready: list[bool] = []
        said: list[str] = []
        with capture_logs() as lines:
            for has_some in (True, False, False, True):
                monkeypatch.setattr(descriptors, "are_there_any", lambda some=has_some: some)
                await daemon.check_readiness()
                ready.append(daemon.is_ready)
                watched = [await daemon._health.Check(ask(name), None) for name in NAMES]
                assert [reply.status == STATUS.SERVING for reply in watched] == [
                    ready[-1] or name == "liveness" for name in NAMES
                ]
            said = [line["event"] for line in lines]
        assert ready == [True, False, False, True]
        assert said == ["shard not ready: it cannot accept connections", "shard ready again"]

    def ask(name: str) -> health_pb2.HealthCheckRequest:
        return health_pb2.HealthCheckRequest(service=name)

    with_daemon(use)


def test_a_listener_that_ends_makes_the_shard_not_ready() -> None:
    async def use(daemon: Daemon, stub: Stub) -> None:
        assert daemon._data is not None
        daemon._data._threads.append(threading.Thread())  # One that does not run.
        await daemon.check_readiness()
        assert not daemon.is_ready

    with_daemon(use)


def test_a_taken_port_is_reported_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        plan = ShardPlan.from_json(make_plan().to_json())
        taken = ShardPlan(**{name: getattr(plan, name) for name in plan.__slots__} | {"port": port})
        assert asyncio.run(serve(taken)) is Exit.PORT_TAKEN
        report = report_from_json(capsys.readouterr().out)
        assert report_from_json(report_to_json(report)) == report
        assert f"127.0.0.1:{port}" in report_to_json(report)
        assert probe("127.0.0.1", port).errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    ("problem", "code", "advice"),
    [
        (OSError(errno.EADDRINUSE, ""), Exit.PORT_TAKEN, "--port"),
        (OSError(errno.EACCES, ""), Exit.NOT_PERMITTED, "1024"),
        (OSError(errno.EADDRNOTAVAIL, ""), Exit.HOST, "--host"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), Exit.HOST, "--host"),
        (OSError(socket.EAI_NONAME, "while attempting to bind"), Exit.HOST, "--host"),
        (OSError(errno.EMFILE, "too many"), Exit.SHARD_DIED, "ulimit -n"),
    ],
)
def test_each_reason_not_to_listen_has_its_code_and_advice(
    problem: OSError, code: Exit, advice: str
) -> None:
    error = bind_error(problem, "gpu7", 80, "--port")
    assert isinstance(error, CommandError)
    assert error.code is code
    assert advice in error.message
    # No port makes another machine's address right; of data it is 0 by default, which means none.
    assert ("gpu7:80" in error.message) is (code is not Exit.HOST)


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"code": 99}', '{"port": 1}', "nonsense"])
def test_a_report_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        report_from_json(line)


def test_the_table_of_exit_codes_is_complete_and_in_the_help() -> None:
    from typer.testing import CliRunner

    from psserver.commands.cli import app
    from psserver.exits import MEANINGS

    assert list(MEANINGS) == list(Exit)
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(f"{code:>2}  {MEANINGS[code]}" in shown for code in Exit)


@pytest.mark.slow
def test_the_daemon_has_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = "import sys, psserver.process.daemon; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_two_processes_of_a_shard_do_not_share_a_state_directory(tmp_path: Path) -> None:
    """Also where they keep no journals, which have a lock of their own."""
    plan = dataclasses.replace(make_plan(num_shards=1), state_dir=str(tmp_path))

    async def use() -> None:
        first = Daemon(plan)
        with pytest.raises(CommandError, match="another process of shard 0 uses") as refusal:
            Daemon(plan)
        assert refusal.value.code is Exit.ALREADY_RUNNING
        assert first._claim is not None
        first._claim.close()
        Daemon(plan)

    asyncio.run(use())


def test_a_journal_directory_that_cannot_be_used_ends_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = dataclasses.replace(make_plan(num_shards=1), journal_dir=str(tmp_path / "file"))

    async def use() -> None:
        with pytest.raises(CommandError, match="cannot keep journals in") as refusal:
            Daemon(plan)
        assert refusal.value.code is Exit.STATE_DIR

    asyncio.run(use())


def test_a_call_is_answered_while_the_connections_of_strangers_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes seconds for thousands of them on a busy machine."""
    may_end = threading.Event()

    async def use(daemon: Daemon, stub: Stub) -> None:
        began, loop = asyncio.Event(), asyncio.get_running_loop()

        def make_room(port: int) -> int:
            loop.call_soon_threadsafe(began.set)
            assert may_end.wait(100.0)
            return 0

        monkeypatch.setattr(daemon.callers, "make_room", make_room)
        keeping = asyncio.create_task(daemon.keep_room())
        await began.wait()
        assert (await stub.Describe(pb.DescribeRequest())).num_shards == 1
        assert not may_end.is_set()
        may_end.set()
        keeping.cancel()

    with_daemon(use)


def test_a_call_under_way_keeps_its_connection_before_those_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's first call, which may wait long: it has proved nothing yet."""
    arrived, may_go = asyncio.Event(), asyncio.Event()

    async def slow(self: object, request: object, context: object) -> pb.JoinReply:
        arrived.set()
        await may_go.wait()
        return pb.JoinReply(life=7)

    monkeypatch.setattr(ControlServicer, "Join", slow)
    monkeypatch.setattr("psserver.process.daemon.CONNECTIONS_MAX", 2)  # One may be a stranger's.

    async def run() -> None:
        daemon = Daemon(make_plan(num_shards=1))
        port = (await daemon.start()).port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = asyncio.ensure_future(
                control_pb2_grpc.ControlStub(channel).Join(pb.JoinRequest())
            )
            await arrived.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            keeping = asyncio.create_task(daemon.keep_room())
            ending = asyncio.ensure_future(reader.read())
            await asyncio.wait({answer, ending}, return_when=asyncio.FIRST_COMPLETED)
            assert not answer.done()
            keeping.cancel()
            may_go.set()
            assert (await answer).life == 7
            writer.close()
        await daemon.end()

    asyncio.run(run())
