"""The peers on a port of gRPC: those whose connections may be closed when there are too many."""

import contextlib
import socket

import pytest

from psserver.access.authorizer import CONTROL
from psserver.service.callers import Callers

PROOF = CONTROL + "Heartbeat"


@pytest.mark.parametrize("peer", ["unknown", "", "unix:", "unix:/run/shard"])
def test_a_peer_that_is_gone_when_it_is_answered_is_not_noted(peer: str) -> None:
    """gRPC calls it unknown. The connections of strangers are closed nevertheless."""
    callers = Callers(1, needs_token=False)
    callers.note_answered(PROOF, peer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0]:
            assert callers.make_room(port) == 1
            assert client.recv(1) == b""


def test_a_peer_that_has_named_a_live_worker_stays() -> None:
    callers = Callers(1, needs_token=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        with socket.create_connection((host, port)) as client, listener.accept()[0]:
            callers.note_answered(PROOF, f"ipv4:{host}:{client.getsockname()[1]}")
            assert callers.make_room(port) == 0


def test_a_stranger_that_was_answered_goes_after_those_that_say_nothing() -> None:
    """The process that takes checkpoints, before a crowd."""
    callers = Callers(2, needs_token=False)  # A place for one stranger.
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        clients = []
        for _ in range(3):
            clients.append(opened.enter_context(socket.create_connection((host, port))))
            opened.enter_context(listener.accept()[0])
        method = "/paceline.ps.v1.Checkpoints/Capture"
        callers.note_answered(method, f"ipv4:{host}:{clients[0].getsockname()[1]}")
        assert callers.make_room(port) == 2
        for silent in clients[1:]:
            assert silent.recv(1) == b""


def test_peers_that_have_named_live_workers_cannot_take_all_places() -> None:
    """The oldest of them goes, so that a probe is still answered."""
    callers = Callers(16, needs_token=False)
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        clients = []
        for _ in range(16):
            clients.append(opened.enter_context(socket.create_connection((host, port))))
            opened.enter_context(listener.accept()[0])
            callers.note_answered(PROOF, f"ipv4:{host}:{clients[-1].getsockname()[1]}")
        assert callers.make_room(port) == 1
        assert clients[0].recv(1) == b""
