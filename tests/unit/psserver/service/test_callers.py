"""The peers on a port of gRPC: those whose connections may be closed when there are too many."""

import contextlib
import socket

import pytest

from psserver.access.authorizer import CONTROL
from psserver.service.callers import Callers, defer_silent

PROOF = CONTROL + "Heartbeat"


def named(client: socket.socket) -> str:
    """Returns gRPC's name for a peer."""
    return "ipv4:{}:{}".format(*client.getsockname())


@pytest.mark.parametrize("peer", ["unknown", "", "unix:", "unix:/run/shard"])
def test_a_peer_that_is_gone_when_it_is_answered_is_not_noted(peer: str) -> None:
    """gRPC calls it unknown. The connections of strangers are closed nevertheless."""
    callers = Callers(1, needs_token=False)
    callers.note_call(PROOF, peer, is_answered=True)
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
            callers.note_call(PROOF, named(client), is_answered=True)
            assert callers.make_room(port) == 0


@pytest.mark.parametrize(
    ("method", "is_answered"), [("/ps.v1.Checkpoints/Capture", True), (CONTROL + "Join", False)]
)
def test_a_stranger_that_has_called_goes_after_those_that_say_nothing(
    method: str, is_answered: bool
) -> None:
    """The process that takes checkpoints, and a worker that waits for its place, before a crowd."""
    callers = Callers(2, needs_token=False)  # A place for one stranger.
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        clients = []
        for _ in range(3):
            clients.append(opened.enter_context(socket.create_connection((host, port))))
            opened.enter_context(listener.accept()[0])
        callers.note_call(method, named(clients[0]), is_answered=is_answered)
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
            callers.note_call(PROOF, named(clients[-1]), is_answered=True)
        assert callers.make_room(port) == 1
        assert clients[0].recv(1) == b""


@pytest.mark.parametrize("needs_token", [False, True])
def test_a_call_that_waits_for_its_answer_proves_a_token_and_no_worker(needs_token: bool) -> None:
    callers = Callers(1, needs_token=needs_token)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        with socket.create_connection((host, port)) as client, listener.accept()[0]:
            callers.note_call(PROOF, named(client), is_answered=False)
            assert callers.make_room(port) == (0 if needs_token else 1)


def test_the_kernel_keeps_a_connection_until_its_peer_says_something() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        defer_silent(port)
        listener.settimeout(10.0)
        with socket.create_connection((host, port)), socket.create_connection((host, port)) as late:
            late.sendall(b"PRI * HTTP/2.0")
            accepted, peer = listener.accept()
            accepted.close()
            assert peer == late.getsockname()
