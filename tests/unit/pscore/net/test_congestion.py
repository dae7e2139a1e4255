"""The choice of a data connection's congestion control."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscore.net import congestion, sockets
from pscore.net.followed import Followed

DEADLINE_S = 200.0


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, bytes]]:
    """Gives a connection as from another host, not tuned yet, and the system's own choice."""
    monkeypatch.setattr(congestion, "LOOK_S", 0.01)
    monkeypatch.setattr(congestion, "FOLLOWED", Followed("congestion", congestion.look))
    listener, usual = sockets.listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), 20.0, ("127.0.0.2", 0)):
        found, _ = listener.accept()
        with found:
            yield found, usual


def wait_until_decided() -> None:
    """Waits until no connection is followed any more."""
    deadline_s = time.monotonic() + DEADLINE_S
    while len(congestion.FOLLOWED):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_near_host_is_not_paced_and_its_buffers_are_left_to_the_kernel(
    accepted: tuple[socket.socket, bytes],
) -> None:
    connection, _ = accepted
    before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    sockets.tune(connection, b"bbr")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
    assert congestion.name_of(connection) == congestion.UNPACED
    assert not len(congestion.FOLLOWED)


def test_a_far_host_gets_the_choice_of_the_system_after_a_while(
    accepted: tuple[socket.socket, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, usual = accepted
    if usual in (b"", congestion.UNPACED):
        pytest.skip("the system has no other congestion control")
    monkeypatch.setattr(congestion, "NEAR_US", -1)
    monkeypatch.setattr(congestion, "FOLLOW_S", 0.05)
    monkeypatch.setattr(congestion, "PACED", usual)
    congestion.choose(connection, usual)
    assert congestion.name_of(connection) == congestion.UNPACED
    wait_until_decided()
    assert congestion.name_of(connection) == usual


def test_a_first_long_round_trip_to_a_near_host_changes_nothing(
    accepted: tuple[socket.socket, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = accepted
    trips_us = iter([20_000, 9_000, 8_000, 40])
    monkeypatch.setattr(congestion, "least_us", lambda connection: next(trips_us))
    congestion.choose(connection, b"bbr")
    assert len(congestion.FOLLOWED) == 1
    wait_until_decided()
    assert next(trips_us, None) is None
    assert congestion.name_of(connection) == congestion.UNPACED


def test_a_connection_that_tls_takes_over_is_followed_as_its_successor(
    accepted: tuple[socket.socket, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = accepted
    monkeypatch.setattr(congestion, "NEAR_US", -1)
    congestion.choose(connection, b"bbr")
    waiting = congestion.FOLLOWED.take(connection)
    assert waiting is not None
    assert waiting.usual == b"bbr"
    assert congestion.FOLLOWED.take(connection) is None
    congestion.choose(connection, b"")  # Its connection was not followed.
    assert not len(congestion.FOLLOWED)


def test_a_choice_that_does_not_pace_is_the_systems_at_once(
    accepted: tuple[socket.socket, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, usual = accepted
    if usual in (b"", congestion.UNPACED):
        pytest.skip("the system has no other congestion control")
    monkeypatch.setattr(congestion, "NEAR_US", -1)
    monkeypatch.setattr(congestion, "PACED", b"nothing")
    congestion.choose(connection, usual)
    assert congestion.name_of(connection) == usual
    monkeypatch.setattr(congestion, "PACED", usual)
    congestion.choose(connection, usual)  # As if its route had asked for the one that it has.
    assert not len(congestion.FOLLOWED)


def test_the_kernel_has_measured_a_round_trip_when_a_connection_is_made() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        for end in (one, other):
            assert 0 <= congestion.least_us(end) < 20e6
    assert congestion.least_us(one) == sys.maxsize  # Closed.


def test_where_no_other_congestion_control_may_be_chosen_all_is_as_the_system_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(congestion, "UNPACED", b"nonsense")
    with socket.socket() as plain:
        expected = congestion.name_of(plain)
    listener, usual = sockets.listen("127.0.0.1", 0)
    assert usual == b""
    with listener, sockets.connect("127.0.0.1", listener.getsockname()[1], 20.0) as one:
        assert congestion.name_of(one) == expected


def test_the_system_paces_with_bbr_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "SYSTEM", tmp_path / "choice")
    assert not congestion.system_paces()
    for name, paces in (("cubic", False), ("bbr", True), ("bbr2", True)):
        congestion.SYSTEM.write_text(f"{name}\n")
        assert congestion.system_paces() is paces
