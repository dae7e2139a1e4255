"""A switch of a lab holds each packet for some time, and loses no byte of a connection."""

import socket
import time
from multiprocessing.connection import Connection

import pytest

from benchmarks import netlab
from benchmarks.forked import Forked, ending

DELAY_S, NBYTES, PORT = 0.05, 4 << 20, 6000
SENT = bytes(range(251)) * (NBYTES // 251)


def receive(line: Connection, address: str) -> None:
    """Answers the first byte of a connection, and compares the rest with `SENT`."""
    with socket.create_server((address, PORT)) as server:
        line.send("ready")
        with server.accept()[0] as connection, connection.makefile("rb") as file:
            connection.sendall(file.read(1))
            line.send(file.read() == SENT)


def send(line: Connection, address: str) -> None:
    """Measures a round trip, and sends."""
    with socket.create_connection((address, PORT)) as connection:
        start_s = time.monotonic()
        connection.sendall(b"?")
        connection.recv(1)
        line.send(time.monotonic() - start_s)
        connection.sendall(SENT)


def test_packets_between_hosts_take_their_time_and_arrive_as_sent() -> None:
    if (reason := netlab.available()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with netlab.Lab(2, "1gbit", DELAY_S) as lab:
        there = Forked(receive, lab.address(1), namespace=lab.name(1))
        with ending([there]):
            assert there.hear() == "ready"
            here = Forked(send, lab.address(1), namespace=lab.name(0))
            with ending([here]):
                assert here.hear() >= 2 * DELAY_S
                assert there.hear()
