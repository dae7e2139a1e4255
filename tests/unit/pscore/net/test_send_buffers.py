"""The limit of the bytes that a connection to a near host has under way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pscore.net import followed, send_buffers, sockets

DEADLINE_S = 200.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Gives the two ends of a tuned connection as between two hosts, with frequent looks."""
    monkeypatch.setattr(followed, "LOOK_S", 0.01)
    monkeypatch.setattr(followed, "FOLLOWED", followed.Followed())
    listener, usual = sockets.listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), 20.0, ("127.0.0.2", 0)) as one:
        other, _ = listener.accept()
        with other:
            one.settimeout(None)
            sockets.tune(one, usual)
            yield one, other


def size_of(connection: socket.socket) -> int:
    """Returns the size of a send buffer, with the kernel's own records."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def wait_until_size(connection: socket.socket, size: int) -> None:
    """Waits until the send buffer of a connection has a size."""
    deadline_s = time.monotonic() + DEADLINE_S
    while size_of(connection) != size:
        assert time.monotonic() < deadline_s, size_of(connection)
        time.sleep(0.005)


def test_a_connection_may_have_what_it_delivers_in_a_round_trip_and_five_milliseconds() -> None:
    assert send_buffers.limit_of(100e6, 1e-3) == 600_000
    assert send_buffers.limit_of(100e6, 0.0) == 500_000
    assert send_buffers.limit_of(1.0, 1e-3) == send_buffers.LEAST_NBYTES


def test_the_kernel_tells_what_a_connection_has_delivered(pair: Pair) -> None:
    one, other = pair
    reader = threading.Thread(target=lambda: [*iter(lambda: other.recv(1 << 20), b"")])
    reader.start()
    one.sendall(bytes(8 << 20))
    assert send_buffers.delivered_rate(one) > 0
    one.close()
    assert send_buffers.delivered_rate(one) == 0
    reader.join()


def test_a_slow_path_gets_a_small_buffer_and_a_faster_one_a_larger(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    rates = {"now": 0}
    monkeypatch.setattr(send_buffers, "least_us", lambda connection: 1000)
    monkeypatch.setattr(send_buffers, "delivered_rate", lambda connection: rates["now"])
    for rate in (20_000_000, 10_000_000, 30_000_000):
        rates["now"] = rate
        expected = send_buffers.limit_of(rate, 1e-3)
        deadline_s = time.monotonic() + DEADLINE_S
        while abs(size_of(one) - expected) > send_buffers.CHANGE * expected:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
    rates["now"] = 1
    wait_until_size(one, send_buffers.LEAST_NBYTES)


def test_the_kernels_own_size_stays_where_more_is_wanted_than_may_be_chosen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    looked = threading.Semaphore(0)

    def fast(connection: socket.socket) -> int:
        looked.release()
        return 1 << 40

    before = size_of(one)
    monkeypatch.setattr(send_buffers, "least_us", lambda connection: 1000)
    monkeypatch.setattr(send_buffers, "delivered_rate", fast)
    for _ in range(3):
        assert looked.acquire(timeout=DEADLINE_S)
    assert size_of(one) == before
    # Once it has been limited, the kernel takes no size back: it gets the largest.
    monkeypatch.setattr(send_buffers, "delivered_rate", lambda connection: 1)
    wait_until_size(one, send_buffers.LEAST_NBYTES)
    monkeypatch.setattr(send_buffers, "delivered_rate", fast)
    wait_until_size(one, send_buffers.most_nbytes())


def test_a_far_host_and_one_that_no_byte_has_reached_keep_the_kernels_size(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    before = size_of(one)
    fitting = send_buffers._Fitting()
    assert len(followed.FOLLOWED.take(one)) == 1
    for trip_us, rate in ((20_000, 1_000_000), (1000, 0)):
        monkeypatch.setattr(send_buffers, "least_us", lambda connection, us=trip_us: us)
        monkeypatch.setattr(send_buffers, "delivered_rate", lambda connection, per_s=rate: per_s)
        assert fitting(one)
        assert size_of(one) == before
    monkeypatch.setattr(send_buffers, "delivered_rate", lambda connection: 1_000_000)
    assert fitting(one)  # A shorter round trip was measured.
    assert size_of(one) == send_buffers.LEAST_NBYTES
