"""The socket plane between equal peers: both halves of pscore/net, without a shard or a worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pscore.errors import AccessError, LimitError, ThreadError, TransportError
from pscore.net import connection, sockets, tls, wire
from pscore.net import listener as listeners
from pscore.net.budget import Budget
from pscore.net.channel import HELD_MAX
from pscore.net.credentials import Credentials
from pscore.net.crowd import SAFE_TICKS
from pscore.net.endpoint import Endpoint, connect
from pscore.net.listener import Listener, Strangers
from pscore.net.send_queue import SendQueue
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import ByteArray
from tests.house.source import ROOT
from tests.integration.command import join_threads
from tests.unit.pscore.peers import TENSOR_NBYTES_MAX, Peer, Sender

NAMES = itertools.count()
TOKEN = "t" * 32
WAIT_S = 200.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, made by the command that a person would use."""
    folder = tmp_path_factory.mktemp("certs") / "files"
    subprocess.run([sys.executable, "-m", "psserver", "certs", str(folder)], check=True, cwd=ROOT)
    return folder


@contextlib.contextmanager
def listening(peer: Peer, context: ssl.SSLContext | None = None) -> Iterator[Listener]:
    local = f"paceline-peers-{os.getpid()}-{next(NAMES)}"
    listener = Listener(peer, "127.0.0.1", 0, local, context=context)
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


def endpoint(
    listener: Listener, token: str = "", context: ssl.SSLContext | None = None
) -> Endpoint:
    return Endpoint(
        host="127.0.0.1", port=listener.port, local=listener.local, token=token, tls=context
    )


def eventually(is_true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextlib.contextmanager
def admitted(broken: socket.socket) -> Iterator[socket.socket]:
    """Accepts one connection and answers its hello, as a peer does that dies later."""
    accepted, _ = broken.accept()
    with accepted:
        assert sockets.read_header(accepted) is not None
        hello = pb.Envelope(hello=pb.Hello()).SerializeToString()
        sockets.send_all(accepted, sockets.frame_parts(hello, ()))
        yield accepted


def is_free(budget: Budget) -> bool:
    return budget.left == budget.nbytes


def tensor(step: int, nbytes: int) -> ByteArray:
    return np.random.default_rng(step).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("plane", ["tcp", "tls", "unix"])
def test_two_peers_exchange_tensors_both_ways_at_once(files: Path, plane: str) -> None:
    ours = theirs = None
    if plane == "tls":
        theirs = tls.server_context(files / "server.pem", files / "server.key", None)
        ours = tls.client_context(Credentials(ca=files / "ca.pem"))
    one, other = Peer(TOKEN), Peer(TOKEN)
    with listening(one, theirs) as first, listening(other, theirs) as second:
        senders = [
            Sender(partial(endpoint, to, TOKEN, ours), is_local=plane == "unix")
            for to in (second, first)
        ]
        data = [tensor(step, nbytes) for step, nbytes in enumerate((0, 1, 1000, MIB, 5 * MIB))]
        sent = [[sender.send(n, part) for n, part in enumerate(data)] for sender in senders]
        for tensors in sent:
            for step, (part, one_sent) in enumerate(zip(data, tensors, strict=True)):
                assert one_sent.done.result(WAIT_S) == step
                assert np.array_equal(one_sent.answer, part + np.uint8(1))
        for sender in senders:
            sender.close()
        assert [sender.num_connects for sender in senders] == [1, 1]
        assert one.seen == other.seen == [0, 1, 2, 3, 4]
        assert first.is_well
        eventually(lambda: one.num_ended == other.num_ended == 1)
    for peer in (one, other):
        eventually(partial(is_free, peer.budget))


@pytest.mark.parametrize("token", ["", "wrong"])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_peer_without_the_token_gets_that_reason(token: str, is_local: bool) -> None:
    peer = Peer(TOKEN)
    with listening(peer) as listener:
        with pytest.raises(AccessError, match="the token is wrong"):
            connect(endpoint(listener, token), is_local=is_local)
        connect(endpoint(listener, TOKEN), is_local=is_local).close()
        sender = Sender(lambda: endpoint(listener, token), is_local=is_local)
        with pytest.raises(AccessError, match="the token is wrong"):
            sender.send(0, tensor(0, 10)).done.result(WAIT_S)
        sender.close()
    assert not peer.seen


def test_a_handshake_under_way_keeps_its_place(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a busy machine: a crowd comes between the listener's part and its own."""
    monkeypatch.setattr(listeners, "PENDING_MAX", 2)
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = tls.client_context(Credentials(ca=files / "ca.pem"))
    assert context is not None
    worker = context.wrap_bio(received, sent, server_hostname="localhost")
    theirs = tls.server_context(files / "server.pem", files / "server.key", None)
    with listening(Peer(TOKEN), theirs) as listener, contextlib.ExitStack() as opened:

        def connected() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", listener.port)))

        plain = connected()
        with pytest.raises(ssl.SSLWantReadError):
            worker.do_handshake()
        plain.sendall(sent.read())
        received.write(plain.recv(1 << 16))
        crowd = [connected() for _ in range(6)]
        for silent in crowd[:-1]:
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
        worker.do_handshake()
        hello = pb.Envelope(hello=pb.Hello(token=TOKEN)).SerializeToString()
        worker.write(b"".join(sockets.frame_parts(hello, ())))
        plain.sendall(sent.read())
        received.write(plain.recv(1 << 16))
        assert worker.read(1)


def test_a_handshake_under_way_gives_its_place_up_when_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "TICK_S", 0.0)  # Each look at the places is a tick.
    strangers = Strangers(1)
    one, other = socket.socketpair()
    with one, other:
        strangers.add(one, "a")
        strangers.note_greeted(one)
        assert [strangers.has_room() for _ in range(SAFE_TICKS)] == [False] * (SAFE_TICKS - 1) + [
            True
        ]
        assert other.recv(1) == b""


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_request_under_way_keeps_a_strangers_place_for_a_while(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Between two messages a stranger, here the younger one, gives its place to a newcomer."""
    if is_slow:
        monkeypatch.setattr(listeners, "TICK_S", 0.0)  # Each look at the places is a tick.
    peer = Peer()
    with listening(peer) as listener, contextlib.ExitStack() as opened:

        def greeted() -> socket.socket:
            stranger = socket.create_connection(("127.0.0.1", listener.port), WAIT_S)
            stranger.sendall(wire.encode(pb.Envelope(hello=pb.Hello()).SerializeToString()))
            assert sockets.read_header(opened.enter_context(stranger)) is not None
            return stranger

        asking = greeted()
        frame = wire.encode(
            pb.Envelope(id=1, push=pb.PushHeader(step=3)).SerializeToString(), b"12"
        )
        asking.sendall(frame[:-1])
        eventually(lambda: not is_free(peer.budget))
        others = [greeted() for _ in range(SAFE_TICKS)]
        monkeypatch.setattr(listeners, "CONNECTIONS_MAX", 1 + len(others))
        for _ in range(1 + len(others) if is_slow else len(others)):
            greeted()
        for each in others:
            assert each.recv(1) == b""
        if is_slow:
            assert asking.recv(1) == b""
        else:
            asking.sendall(frame[-1:])
            answer = sockets.read_header(asking)
            assert answer is not None
            assert pb.Envelope.FromString(answer.header).pushed.version == 3


def test_a_peer_that_says_nothing_has_no_thread() -> None:
    with listening(Peer(TOKEN)) as listener, contextlib.ExitStack() as opened:
        before = set(threading.enumerate())
        for _ in range(5):
            silent = socket.create_connection(("127.0.0.1", listener.port))
            opened.enter_context(silent)
        opened.enter_context(connect(endpoint(listener, TOKEN), is_local=False))
        started = [each for each in threading.enumerate() if each not in before]
        assert [each.name for each in started] == ["data-read"]


def test_nothing_is_read_before_the_hello() -> None:
    """A first message that is long, or has a payload, is refused before memory is taken for it."""
    with listening(Peer(TOKEN)) as listener:
        for header_nbytes, payload_nbytes in ((connection.HELLO_NBYTES_MAX + 1, 0), (10, 1)):
            with socket.create_connection(("127.0.0.1", listener.port), WAIT_S) as stranger:
                start = wire.CHECKED.pack(wire.MAGIC, header_nbytes, payload_nbytes)
                stranger.sendall(start + bytes(8))
                assert stranger.recv(1) == b""


def test_a_damaged_frame_ends_the_connection_and_is_sent_again() -> None:
    peer = Peer()
    with listening(peer) as listener:
        header = pb.Envelope(id=1, push=pb.PushHeader(step=3)).SerializeToString()
        frame = bytearray(wire.encode(header, b"tensor"))
        frame[-1] ^= 1
        with connect(endpoint(listener), is_local=False) as stream:
            stream.sendmsg([memoryview(frame)])
            assert sockets.read_header(stream) is None
        eventually(lambda: peer.lines)
        assert not peer.seen
        assert "checksum of a frame of 6 bytes" in peer.lines[0]


def test_a_request_is_repeated_on_a_new_connection() -> None:
    """The first connection breaks before the reply; the channel connects again."""
    peer = Peer()
    with listening(peer) as listener, socket.create_server(("127.0.0.1", 0)) as broken:
        ports = [broken.getsockname()[1], listener.port]

        def where() -> Endpoint:
            return Endpoint(host="127.0.0.1", port=ports.pop(0), local="")

        sender = Sender(where, is_local=False)
        sent = sender.send(7, tensor(7, 100))
        with admitted(broken) as accepted:
            assert sockets.read_header(accepted) is not None
        assert sent.done.result(WAIT_S) == 7
        assert (peer.seen, sender.num_connects) == ([7], 2)
        sender.close()


@pytest.mark.parametrize("ends_by", ["letting go", "a payload", "their number"])
def test_requests_that_are_held_leave_together(ends_by: str) -> None:
    peer = Peer()
    with listening(peer) as listener:
        sender = Sender(lambda: endpoint(listener), is_local=True)
        assert sender.send(0, tensor(0, 0)).done.result(WAIT_S) == 0
        sender.hold()
        sent = [sender.send(step, tensor(step, 0)) for step in range(1, HELD_MAX)]
        assert not any(one.done.done() for one in sent)
        if ends_by == "letting go":
            sender.let_go()
        else:
            nbytes = 5 if ends_by == "a payload" else 0
            sent.append(sender.send(HELD_MAX, tensor(HELD_MAX, nbytes)))
        steps = [one.done.result(WAIT_S) for one in sent]
        assert steps == peer.seen[1:] == list(range(1, 1 + len(sent)))
        sender.close()


def test_requests_that_are_held_while_their_connection_breaks_arrive_once() -> None:
    peer = Peer()
    with listening(peer) as listener, socket.create_server(("127.0.0.1", 0)) as broken:
        ports = [broken.getsockname()[1], listener.port]

        def where() -> Endpoint:
            return Endpoint(host="127.0.0.1", port=ports.pop(0), local="")

        sender = Sender(where, is_local=False)
        first = sender.send(7, tensor(7, 0))
        with admitted(broken) as accepted:
            assert sockets.read_header(accepted) is not None
            sender.hold()
            held = [sender.send(step, tensor(step, 0)) for step in (8, 9)]
        assert [one.done.result(WAIT_S) for one in (first, *held)] == [7, 8, 9]
        sender.let_go()
        assert sender.send(10, tensor(10, 0)).done.result(WAIT_S) == 10
        assert peer.seen == [7, 8, 9, 10]
        sender.close()


def test_requests_that_come_together_are_answered_before_the_next_read() -> None:
    """The peer sends a part of a further frame only after it has its answers."""
    peer = Peer()
    frames = [
        wire.encode(pb.Envelope(id=step, push=pb.PushHeader(step=step)).SerializeToString())
        for step in range(4)
    ]
    with listening(peer) as listener, connect(endpoint(listener), is_local=True) as stream:
        sockets.send_all(stream, [memoryview(frames[0])])  # So that the next ones are read ahead.
        assert sockets.read_header(stream) is not None
        sockets.send_all(stream, [memoryview(b"".join(frames[1:3]) + frames[3][:10])])
        for _ in frames[1:3]:
            assert sockets.read_header(stream) is not None
        sockets.send_all(stream, [memoryview(frames[3][10:])])
        assert sockets.read_header(stream) is not None
    assert peer.seen == [0, 1, 2, 3]


def test_answers_of_the_reading_thread_leave_together_and_those_of_others_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        queue = SendQueue(ours, Budget(MIB, ""), MIB, lambda problem: None)
        queue.hold()
        queue.send(b"held 1")
        queue.send(b"held 2")
        other = threading.Thread(target=queue.send, args=(b"at once",))
        other.start()
        other.join()
        queue.send(b"with", [memoryview(b"payload")])
        queue.let_go()
        queue.let_go()
        queue.close()
        found = []
        while (incoming := sockets.read_header(theirs)) is not None:
            incoming.skip()
            found.append(incoming.header)
    assert found == [b"at once", b"with", b"held 1", b"held 2"]


def test_a_connection_that_is_reset_while_requests_are_sent_again_is_replaced() -> None:
    """The peer dies, and its successor dies too while it gets the request a second time."""
    peer = Peer()
    with listening(peer) as listener, socket.create_server(("127.0.0.1", 0)) as broken:
        ports = [*[broken.getsockname()[1]] * 2, listener.port]

        def where() -> Endpoint:
            return Endpoint(host="127.0.0.1", port=ports.pop(0), local="")

        sender = Sender(where, is_local=False)
        sent = sender.send(7, tensor(7, TENSOR_NBYTES_MAX))
        with admitted(broken) as accepted:
            assert sockets.read_header(accepted) is not None
        with admitted(broken) as accepted:
            assert sockets.read_header(accepted) is not None  # The payload is on its way.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert sent.done.result(WAIT_S) == 7
        assert (peer.seen, sender.num_connects) == ([7], 3)
        sender.close()


def test_connections_that_break_again_and_again_fail_their_calls_after_the_limit() -> None:
    """A peer that admits and then closes, such as one that dies of the request."""
    with socket.create_server(("127.0.0.1", 0)) as broken:
        where = Endpoint(host="127.0.0.1", port=broken.getsockname()[1], local="")
        sender = Sender(lambda: where, is_local=False, limit_s=0.5)
        sent = sender.send(7, tensor(7, 100))
        while not sent.done.done():
            broken.settimeout(0.1)
            with contextlib.suppress(TimeoutError), admitted(broken) as accepted:
                sockets.read_header(accepted)
        with pytest.raises(TransportError, match="breaks again and again"):
            sent.done.result()
        sender.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_of_the_reading_thread_fails_all_calls() -> None:
    with listening(Peer()) as listener:
        sender = Sender(lambda: endpoint(listener), is_local=True)
        sent = sender.send(1, tensor(1, 100))
        assert sent.done.result(WAIT_S) == 1
        sender.on_answer = lambda: 1 // 0
        open_calls = [sender.send(step, tensor(step, 100)) for step in (2, 3)]
        for call in open_calls:
            with pytest.raises(ThreadError, match=r"'data-peer' .* ZeroDivisionError: "):
                call.done.result(WAIT_S)
        with pytest.raises(ThreadError):
            sender.send(4, tensor(4, 10)).done.result(WAIT_S)
        sender.close()
        join_threads("data-peer")


def test_a_frame_beyond_the_limits_of_the_format_ends_the_connection() -> None:
    peer = Peer()
    with (
        listening(peer) as listener,
        socket.create_connection(("127.0.0.1", listener.port), WAIT_S) as stranger,
    ):
        start = wire.CHECKED.pack(wire.MAGIC, 10, wire.PAYLOAD_NBYTES_MAX + 1)
        stranger.sendall(start + bytes(8))
        assert stranger.recv(1) == b""
    assert f"at most {wire.HEADER_NBYTES_MAX}" in peer.lines[0]


def test_a_tensor_that_the_handler_refuses_is_skipped_and_the_connection_continues() -> None:
    """Refused by the handler's own limit, then by the budget of memory."""
    peer = Peer(budget_nbytes=MIB)
    with listening(peer) as listener:
        sender = Sender(lambda: endpoint(listener), is_local=True)
        with pytest.raises(LimitError, match="tensor of"):
            sender.send(0, tensor(0, TENSOR_NBYTES_MAX + 1)).done.result(WAIT_S)
        with pytest.raises(LimitError, match="a tensor wants 2097152 bytes under way"):
            sender.send(1, tensor(1, 2 * MIB)).done.result(WAIT_S)
        assert sender.send(2, tensor(2, 100)).done.result(WAIT_S) == 2
        assert (peer.seen, peer.num_refused, sender.num_connects) == ([2], 2, 1)
        sender.close()


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.1)
    peer = Peer()
    with listening(peer) as listener, connect(endpoint(listener), is_local=True) as stream:
        header = pb.Envelope(id=1, push=pb.PushHeader(step=1)).SerializeToString()
        stream.sendmsg([memoryview(wire.encode(header, bytes(1000))[:-1])])
        eventually(lambda: peer.num_ended)
    assert not peer.seen
    assert "nothing arrived for too long" in peer.lines[0]


def test_calls_to_a_peer_that_is_gone_fail() -> None:
    """Only `connect` decides: here it gives up at once."""
    peer = Peer()
    with listening(peer) as listener:
        where = endpoint(listener)
        sender = Sender(lambda: where, is_local=False)
        assert sender.send(0, tensor(0, 10)).done.result(WAIT_S) == 0
    with pytest.raises(TransportError):
        sender.send(1, tensor(1, 10)).done.result(WAIT_S)
    with pytest.raises(TransportError):  # And so does every later one.
        sender.send(2, tensor(2, 10)).done.result(WAIT_S)
    sender.close()


def test_a_peer_in_another_process_needs_neither_psserver_nor_psworker() -> None:
    local = f"paceline-peers-{os.getpid()}-process"
    command = [sys.executable, "-m", "tests.unit.pscore.peers", local]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        where = Endpoint(host="", port=0, local=local)
        sender = Sender(lambda: where, is_local=True)
        data = tensor(1, 3 * MIB)
        sent = sender.send(1, data)
        assert sent.done.result(WAIT_S) == 1
        assert np.array_equal(sent.answer, data + np.uint8(1))
        output, _ = process.communicate()
        assert not output  # The packages that it has loaded.
        with pytest.raises(TransportError):
            sender.send(2, data).done.result(WAIT_S)
        sender.close()
