"""Slow and silent peers at the metrics page and at the dashboard: probes are answered meanwhile."""

import contextlib
import http.client
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pscore.net import descriptors
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from tests.attacks.fortress import fortress
from tests.integration.command import Command

WAIT_S = 200.0
BEGUN = b"GET /healthz HTTP/1.1\r\nHost: "  # The rest never comes.
NUM_PROBES = 10
BURST = min(1000, int(Path("/proc/sys/net/core/somaxconn").read_text()) // 3)
QUEUED_S = 20.0


@contextlib.contextmanager
def crowd(port: int, number: int, begun: bytes = BEGUN) -> Iterator[None]:
    """Holds connections that have sent a part of a request, as far as the server lets them."""
    assert descriptors.raise_limit() > 2 * number
    with contextlib.ExitStack() as held:
        for _ in range(number):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            with contextlib.suppress(OSError):  # It may have been closed for a later one.
                connection.sendall(begun)
        yield


def ask(port: int, path: str, context: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with Command(tmp_path_factory.mktemp("probed")).detached() as run:
        yield run["shards"][0]["metrics_port"]


@pytest.mark.parametrize("number", [40, 1000])
@pytest.mark.parametrize("begun", [b"", BEGUN])
def test_slow_peers_do_not_keep_a_probe_waiting(port: int, number: int, begun: bytes) -> None:
    with crowd(port, number, begun):
        for _ in range(NUM_PROBES):
            assert ask(port, "/healthz") == (200, b"ready\n")
        assert ask(port, "/metrics")[0] == 200


def test_slow_peers_do_not_keep_a_probe_over_tls_waiting(tmp_path: Path) -> None:
    with fortress(tmp_path) as strong:
        port = strong.command.run_file()["shards"][0]["metrics_port"]
        context = ssl.create_default_context(cafile=strong.files / "ca.pem")
        with crowd(port, 600, b"\x16\x03\x01"):  # The begin of a TLS handshake.
            for _ in range(NUM_PROBES):
                assert ask(port, "/healthz", context) == (200, b"ready\n")


def test_slow_peers_do_not_hold_the_places_of_the_dashboard(tmp_path: Path) -> None:
    command = Command(tmp_path)
    with command.detached(), command.spawn("dashboard", "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("http://127.0.0.1:")[2].partition("/")[0])
        with crowd(port, 1000):
            for _ in range(NUM_PROBES):
                assert ask(port, "/api/view")[0] == 200


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for a while, as a busy machine may."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def burst(port: int, number: int) -> Iterator[None]:
    """Holds connections that come at once and wait in the kernel's queue.

    The kernel alone puts them there, so that takes no time. A connection that has no place there
    is repeated after one second, after two more, ...; a probe has no time for that.
    """
    with contextlib.ExitStack() as held:
        for _ in range(number):
            held.enter_context(socket.create_connection(("127.0.0.1", port), QUEUED_S))
        yield


def test_a_burst_of_connections_takes_neither_the_place_nor_the_time_of_a_probe(
    tmp_path: Path,
) -> None:
    with Command(tmp_path).detached() as run:
        (shard,) = run["shards"]
        port = shard["metrics_port"]
        with contextlib.ExitStack() as held:
            with stopped(shard["pid"]):
                held.enter_context(burst(port, BURST))
                probe = held.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
                probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
                held.enter_context(burst(port, BURST))
            assert probe.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_burst_of_connections_leaves_room_for_workers(tmp_path: Path) -> None:
    with Command(tmp_path).detached() as run:
        (shard,) = run["shards"]
        with grpc.insecure_channel(run["addresses"][0]) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            port = stub.Describe(pb.DescribeRequest(), timeout=WAIT_S).data_port
        with stopped(shard["pid"]), burst(port, 2 * BURST):
            pass


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Basic \xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 100,
        b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"x" * 100_000,
    ],
)
def test_nonsense_is_refused_and_no_line_of_the_log_is_about_it(
    nonsense: bytes, logged: tuple[int, Path]
) -> None:
    port, log = logged
    before = log.read_text()
    for _ in range(NUM_PROBES):
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
        assert ask(port, "/healthz") == (200, b"ready\n")
    assert log.read_text() == before


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    with Command(tmp_path_factory.mktemp("logged")).detached() as run:
        (shard,) = run["shards"]
        yield shard["metrics_port"], Path(shard["log"])
