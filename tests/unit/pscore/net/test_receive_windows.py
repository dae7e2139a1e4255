"""The windows of connections to near hosts over a slow link."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from pscore.net import receive_windows, sockets
from pscore.net.followed import Followed
from pscore.net.receive_windows import FAST, LEAST_NBYTES, Arrived, NearLink, arrived
from tests.integration.command import eventually

DEADLINE_S = 200.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Gives the two ends of a connection as between two hosts; the first is tuned and looked at."""
    for name in ("LOOK_S", "BURST_S"):
        monkeypatch.setattr(receive_windows, name, 0.01)
    monkeypatch.setattr(receive_windows, "LINK", NearLink())
    followed = Followed("windows", receive_windows.look)
    monkeypatch.setattr(receive_windows, "FOLLOWED", followed)
    listener, usual = sockets.listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), 20.0, ("127.0.0.2", 0)) as one:
        other, _ = listener.accept()
        with other:
            sockets.tune(one, usual)
            yield one, other
    eventually(lambda: all(each.name != "follow-windows" for each in threading.enumerate()))


def window_of(connection: socket.socket) -> int:
    """Returns the largest window that a connection offers, in bytes."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)


def test_connections_share_what_a_link_delivers_in_a_round_trip_and_five_milliseconds() -> None:
    link = NearLink()
    link.note(200_000, 0.02, gaps=1)
    assert link.rate == pytest.approx(10e6)
    assert link.window(1e-3, number=1) == 60_000
    assert link.window(1e-3, number=5) == 20_000
    assert link.window(0.0, number=50) == LEAST_NBYTES


def test_a_link_that_drops_nothing_or_is_fast_has_no_limit() -> None:
    link = NearLink()
    link.note(200_000, 0.02, gaps=0)
    assert link.window(1e-3, 1) is None
    link.note(200_000, 0.02, gaps=3)
    assert link.window(1e-3, 1) == 60_000
    link.note(int(FAST), 1.0, gaps=3)
    assert link.window(1e-3, 1) is None
    for _ in range(1000):
        link.note(200_000, 0.02, gaps=3)
    assert link.window(1e-3, 1) is None  # Its bytes came more slowly, it is no slow link.


def test_the_highest_rate_is_forgotten_slowly_and_only_while_bytes_come() -> None:
    link = NearLink()
    link.note(200_000, 0.02, gaps=1)
    link.note(30, 0.02, gaps=1)  # A heartbeat says nothing about the link.
    assert link.rate == pytest.approx(10e6)
    for _ in range(100):
        link.note(100_000, 0.02, gaps=1)
    assert link.rate == pytest.approx(5e6)
    link.note(180_000, 0.02, gaps=1)
    assert link.rate == pytest.approx(9e6)


class SlowLink:
    """A connection with a steady 1,448 bytes in each 0.1 ms, and the clock of its host."""

    def __init__(self) -> None:
        self.clock_s = 1.0
        self.late_s = 0.0  # A look's thread waits so long after its next count.
        self.filled_nbytes = 0  # Bytes behind a gap that has been filled since.

    def sleep(self, seconds: float) -> None:
        self.clock_s += seconds

    def monotonic(self) -> float:
        return self.clock_s

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        number = round(1e4 * self.clock_s)
        info = bytearray(nbytes)
        struct.pack_into("=I", info, 20, 1448)
        struct.pack_into("=Q", info, 128, 1448 * number + self.filled_nbytes)
        struct.pack_into("=I", info, 152, number)
        self.filled_nbytes += 1_000_000
        self.sleep(self.late_s)
        self.late_s = 0.0
        return bytes(info)

    def look(self) -> float:
        """Looks at the connection once; returns the rate that was seen."""
        receive_windows.look({cast("socket.socket", self): receive_windows.ReceiveWindow()})
        return receive_windows.LINK.rate


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> SlowLink:
    """Gives a link whose clock is that of the looks."""
    link = SlowLink()
    monkeypatch.setattr(receive_windows, "time", link)
    monkeypatch.setattr(receive_windows, "least_us", lambda connection: 1000)
    monkeypatch.setattr(receive_windows, "LINK", NearLink())
    return link


def test_a_packet_that_fills_a_gap_makes_no_link_fast(slow_link: SlowLink) -> None:
    assert slow_link.look() == pytest.approx(14.48e6)
    assert not receive_windows.LINK.is_fast


def test_a_thread_that_waits_between_its_looks_makes_no_link_fast(slow_link: SlowLink) -> None:
    slow_link.late_s = 0.03
    assert slow_link.look() == pytest.approx(14.48e6)
    assert not receive_windows.LINK.is_fast


def test_the_kernel_tells_what_has_come(pair: Pair) -> None:
    one, other = pair
    reader = threading.Thread(target=lambda: [*iter(lambda: one.recv(1 << 20), b"")])
    reader.start()
    other.sendall(bytes(1 << 20))
    eventually(lambda: arrived(one).number * arrived(one).nbytes >= 1 << 20)
    assert arrived(one).gaps == 0
    other.close()
    reader.join()
    one.close()
    assert arrived(one) == Arrived()
    old_kernel = SimpleNamespace(getsockopt=lambda level, option, nbytes: bytes(150))
    assert arrived(old_kernel) == Arrived()


def test_a_window_follows_the_rate_of_its_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    monkeypatch.setattr(receive_windows, "least_us", lambda connection: 1000)
    kernels_own = window_of(one)
    receive_windows.LINK = NearLink(10e6, has_dropped=True)
    eventually(lambda: window_of(one) == 60_000)
    receive_windows.LINK = NearLink(5e6, has_dropped=True)
    eventually(lambda: window_of(one) == 30_000)
    receive_windows.LINK = NearLink(FAST, has_dropped=True, is_fast=True)
    eventually(lambda: window_of(one) > kernels_own)
    eventually(lambda: not len(receive_windows.FOLLOWED))
    receive_windows.follow(one)  # As a later connection over the same link.
    assert not len(receive_windows.FOLLOWED)


def test_a_far_host_keeps_the_kernels_window(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    looks = threading.Semaphore(0)

    def far(connection: socket.socket) -> int:
        looks.release()
        return 20_000

    monkeypatch.setattr(receive_windows, "least_us", far)
    receive_windows.LINK = NearLink(1e6, has_dropped=True)
    before = window_of(one)
    for _ in range(3):
        assert looks.acquire(timeout=DEADLINE_S)
    assert window_of(one) == before
