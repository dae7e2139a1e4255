"""Peers that nobody knows: they use up neither a shard's file descriptors nor its memory."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from pscore.net import descriptors, listener, sockets, wire
from pscore.net.credentials import read_credentials
from pscore.net.endpoint import Endpoint, connect
from pscore.net.listener import Listener
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, data_pb2
from psserver.remote import ask
from tests.attacks.test_overload import Peer, listening, ready
from tests.integration.command import Command, eventually
from tests.integration.worker import Worker
from tests.unit.psserver.front import Front, play, played

LIMIT = 256
MIB = 1 << 20
WAIT_S = 200.0


@dataclass
class Small:
    """A shard with few descriptors, which asks for a token, and its description by its launcher."""

    process: psutil.Process
    address: str
    token_file: str
    stderr: Path

    def endpoint(self) -> Endpoint:
        credentials = read_credentials({"PACELINE_TOKEN_FILE": self.token_file})
        with credentials.channel(self.address) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            about = stub.Describe(pb.DescribeRequest(), timeout=WAIT_S, wait_for_ready=True)
        return Endpoint(
            host="127.0.0.1",
            port=about.data_port,
            local=about.data_local,
            token=credentials.token,
            tls=None,
        )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("small")
    command = Command(folder)
    line = ["sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh"]
    line += command.line("embedded", "--token", "--log-level", "warning")
    with (folder / "stderr").open("wb") as stderr:
        launcher = subprocess.Popen(
            line,
            env=command.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    ready = json.loads(launcher.stdout.readline())
    (process,) = psutil.Process(launcher.pid).children()
    yield Small(process, ready["addresses"][0], ready["token_file"], folder / "stderr")
    launcher.stdin.close()
    assert launcher.wait(WAIT_S) == 0
    launcher.stdout.close()


def knock(port: int, sent: bytes, number: int) -> list[socket.socket]:
    """Opens connections that say a little and wait; those that had to go already are among them."""
    found = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
            found.append(connection)
            connection.sendall(sent)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["socket", "grpc"])
def test_more_strangers_than_descriptors_end_nothing(small: Small, plane: str) -> None:
    """Their connections stay open meanwhile, as far as the shard lets them."""
    endpoint = small.endpoint()
    port = endpoint.port if plane == "socket" else int(small.address.rpartition(":")[2])
    strangers = knock(port, wire.MAGIC if plane == "socket" else b"", 2 * LIMIT)
    connect(endpoint, is_local=False).close()
    connect(endpoint, is_local=True).close()
    assert small.process.num_fds() < LIMIT - LIMIT // 8
    for connection in strangers:
        connection.close()
    connect(small.endpoint(), is_local=False).close()
    assert small.stderr.read_text().count("\n") < 10


# The preface of a client of HTTP/2, and its empty settings: gRPC waits for a call then.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_idle_connections_of_grpc_keep_out_neither_a_probe_nor_a_worker(small: Small) -> None:
    """More than gRPC accepts; the connection of a peer that has shown its token stays."""
    port = int(small.address.rpartition(":")[2])
    credentials = read_credentials({"PACELINE_TOKEN_FILE": small.token_file})
    known = Worker(small.address, num_workers=2, credentials=credentials)
    known.join()

    def peers() -> set[int]:
        found = small.process.net_connections("tcp")
        return {
            c.raddr.port
            for c in found
            if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port
        }

    (connected,) = peers()
    strangers = knock(port, PREFACE, 2 * LIMIT)
    eventually(lambda: ask.readiness([small.address]) == [True])
    late = Worker(small.address, credentials=credentials, rank=1, num_workers=2)
    eventually(lambda: joins(late))
    assert connected in peers()
    # Of those that are left gRPC closes all itself, a while later: they answer none of its pings.
    assert "connections of strangers closed" in small.stderr.read_text()
    for connection in strangers:
        connection.close()
    for worker in (known, late):
        worker.close()


@pytest.mark.slow
def test_idle_connections_keep_no_reader_from_a_relay(tmp_path: Path) -> None:
    command = Command(tmp_path)
    with command.detached() as run:
        line = ["sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh"]
        servers = ",".join(run["addresses"])
        line += command.line("relay", "--job", "train", "--servers", servers, "--listen")
        relay = subprocess.Popen(
            [*line, "127.0.0.1:0"], env=command.environment, stdout=subprocess.PIPE, text=True
        )
        assert relay.stdout is not None
        address = relay.stdout.readline().removeprefix("PACELINE_SERVERS=").strip()
        strangers = knock(int(address.rpartition(":")[2]), PREFACE, 2 * LIMIT)

        def describes() -> bool:
            with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(address) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                return stub.Describe(pb.DescribeRequest(), timeout=WAIT_S).num_shards == 1
            return False

        eventually(describes, 90.0)  # gRPC itself closes them after two minutes.
        for connection in strangers:
            connection.close()
        relay.terminate()
        assert relay.wait(WAIT_S) == 0
        relay.stdout.close()


def joins(worker: Worker) -> bool:
    with contextlib.suppress(grpc.RpcError):  # The places may be taken for a moment.
        worker.join()
        return True
    return False


def test_headers_and_pushes_of_strangers_take_bounded_memory(tmp_path: Path) -> None:
    """On loopback, where no token is needed: a stranger's declaration takes no memory yet."""
    command = Command(tmp_path)
    with command.detached() as run:
        (address,) = run["addresses"]
        process = psutil.Process(run["shards"][0]["pid"])
        worker = Worker(address)
        worker.join()
        about = worker.control.Describe(pb.DescribeRequest(), timeout=WAIT_S)
        nobody = data_pb2.Sender(job="train", worker=0, incarnation=8).SerializeToString()

        def push(nbytes: int) -> int:
            """Sends pushes of nobody and of another worker; returns the most memory."""
            peak = 0
            for named in (None, (("paceline-sender-bin", nobody),)):
                calls = [worker.push_frame.future(bytes(nbytes), metadata=named) for _ in range(6)]
                for call in calls:
                    with pytest.raises(grpc.RpcError) as caught:
                        call.result(WAIT_S)
                    what = "ReplacedError" if named else "RemoteProtocolError"
                    assert type(error_of(caught.value, address)).__name__ == what
                    peak = max(peak, process.memory_info().rss)
            return peak

        before = push(1)
        assert max(push(20 * MIB) for _ in range(4)) - before < 10 * MIB  # It was 240.
        few = process.num_threads()
        strangers = knock(about.data_port, wire.CHECKED.pack(wire.MAGIC, MIB, 0) + bytes(8), 200)
        eventually(lambda: process.num_threads() > few + listener.UNKNOWN_NBYTES // MIB // 2)
        assert process.memory_info().rss - before < 80 * MIB  # It was 200.
        for connection in strangers:
            connection.close()
        worker.close()


# ----- in this process


def test_a_listener_continues_when_there_is_nothing_to_accept_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`accept` fails as it does at the limit, for a while; later connections are accepted."""
    failures = threading.Semaphore(3)
    monkeypatch.setattr(listener, "RECOVERED_S", 0.0)
    reasons: list[str] = []

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures.acquire(blocking=False):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    def listen(host: str, port: int) -> tuple[socket.socket, bytes]:
        server = Exhausted(socket.AF_INET, socket.SOCK_STREAM)
        server.bind((host, port))
        server.listen()
        return server, b""

    accept = sockets.accept_waiting

    def exhausted(server: socket.socket, most: int) -> list[tuple[socket.socket, str]]:
        if failures.acquire(blocking=False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(server, most)

    monkeypatch.setattr(sockets, "listen", listen)
    monkeypatch.setattr(sockets, "accept_waiting", exhausted)
    monkeypatch.setattr(Listener, "_note_refusal", lambda self, reason: reasons.append(reason))

    async def scene(front: Front) -> None:
        await ready(front, 1 << 30)
        with listening(front) as server:
            turned_away = Peer(server)
            assert turned_away.is_cut()
            turned_away.socket.close()
            late = Peer(server)
            late.ask()
            assert late.answer().pulled.ready
            late.socket.close()
            assert server.is_well

    play(scene)
    assert reasons
    assert set(reasons) == {"Too many open files"}


@played
async def test_a_refusal_is_seen_for_a_while_and_then_all_is_well(front: Front) -> None:
    with listening(front) as server:
        assert server.is_well
        server._note_refusal("few are left")
        assert not server.is_well
        server._refused_s -= listener.RECOVERED_S
        assert server.is_well


@played
async def test_a_listener_that_has_ended_is_not_well(front: Front) -> None:
    with listening(front) as server:
        server._threads.append(threading.Thread())
        assert not server.is_well


@played
async def test_the_last_descriptors_are_not_for_newcomers(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has said nothing goes for one that may; without such a one, the newcomer goes."""
    await ready(front, 1 << 30)
    with listening(front) as server:
        known = Peer(server)
        known.ask()
        assert known.answer().pulled.ready
        silent = Peer(server)
        eventually(lambda: server._pending)
        monkeypatch.setattr(descriptors, "is_scarce", lambda number: True)
        second = Peer(server)
        assert silent.is_cut()
        second.ask()
        assert second.answer().pulled.ready
        third = Peer(server)
        assert third.is_cut()
        known.ask()
        assert known.answer().pulled.ready
        for peer in (known, silent, second, third):
            peer.socket.close()


@played
async def test_a_newcomer_gets_the_place_of_a_stranger_that_has_spoken(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no token is needed, a first message makes nobody known; naming a live worker does."""
    await ready(front, 1 << 30)
    with listening(front) as server:
        known, stranger = Peer(server), Peer(server)
        known.ask()
        assert known.answer().pulled.ready
        hello = data_pb2.Envelope(id=3, hello=data_pb2.Hello())
        stranger.socket.sendall(wire.encode(hello.SerializeToString()))
        assert stranger.answer().WhichOneof("body") == "hello"
        monkeypatch.setattr(listener, "CONNECTIONS_MAX", 2)
        newcomer = Peer(server)
        assert stranger.is_cut()
        newcomer.ask()
        assert newcomer.answer().pulled.ready
        eventually(lambda: len(server._connections) == 2)
        late = Peer(server)
        assert late.is_cut()  # The others are known.
        known.ask()
        assert known.answer().pulled.ready
        for peer in (known, stranger, newcomer, late):
            peer.socket.close()


def test_a_scarce_descriptor_is_one_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "limit", lambda: 1000)
    assert [descriptors.is_scarce(number) for number in (935, 936)] == [False, True]
    monkeypatch.setattr(descriptors, "limit", lambda: 100)
    assert [descriptors.is_scarce(number) for number in (74, 75)] == [False, True]
    assert descriptors.are_there_any()


def test_known_workers_may_send_long_headers_while_strangers_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "UNKNOWN_NBYTES", 0)

    async def scene(front: Front) -> None:
        await ready(front, 1 << 30)
        long = data_pb2.Envelope(id=3, hello=data_pb2.Hello(token="x" * 5000))
        with listening(front) as server:
            known, stranger = Peer(server), Peer(server)
            known.ask()
            assert known.answer().pulled.ready
            for peer in (known, stranger):
                peer.socket.sendall(wire.encode(long.SerializeToString()))
            assert known.answer().WhichOneof("body") == "hello"
            assert stranger.is_cut()
            for peer in (known, stranger):
                peer.socket.close()

    play(scene)


@played
async def test_a_listener_may_be_closed_before_its_threads_run(front: Front) -> None:
    for _ in range(20):
        with listening(front):
            pass
