"""Frames on a stream socket: the sent bytes arrive, or an error names the fault."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pscore.errors import DecodeError, TransportError
from pscore.net import congestion, sockets, wire

HEADER = b"header"
PAYLOAD = bytes(range(256)) * 40


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.settimeout(200.0)
    with one, other:
        yield one, other


def parts(payload: bytes = PAYLOAD) -> list[memoryview]:
    return sockets.frame_parts(HEADER, [memoryview(payload)])


def test_a_frame_arrives_in_the_targets_it_is_read_into(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sockets.send_all(pair[0], parts())
    incoming = sockets.read_header(pair[1])
    assert incoming is not None
    assert (incoming.header, incoming.payload_nbytes) == (HEADER, len(PAYLOAD))
    first, second = bytearray(100), bytearray(len(PAYLOAD) - 100)
    incoming.read_into(memoryview(first), memoryview(second))
    assert bytes(first + second) == PAYLOAD


def test_a_frame_has_the_bytes_of_wire_py() -> None:
    assert b"".join(parts()) == wire.encode(HEADER, PAYLOAD)


@pytest.mark.parametrize("position", [25, 24 + len(HEADER), -1])
def test_a_changed_byte_is_found(pair: tuple[socket.socket, socket.socket], position: int) -> None:
    frame = bytearray(b"".join(parts()))
    frame[position] ^= 1
    pair[0].sendall(frame)
    incoming = sockets.read_header(pair[1])
    assert incoming is not None
    with pytest.raises(DecodeError, match="checksum"):
        incoming.read_into(memoryview(bytearray(len(PAYLOAD))))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (struct.pack("<4sIQQ", b"HTTP", 1, 1, 0), "begins with b'HTTP'"),
        (struct.pack("<4sIQQ", wire.MAGIC, wire.HEADER_NBYTES_MAX + 1, 0, 0), "declares"),
        (struct.pack("<4sIQQ", wire.MAGIC, 1, wire.PAYLOAD_NBYTES_MAX + 1, 0), "declares"),
        (struct.pack("<4sIQQ", wire.MAGIC, 1, (1 << 64) - 1, 0), "declares"),
    ],
)
def test_bytes_that_are_no_frame_are_refused_before_memory_is_taken(
    pair: tuple[socket.socket, socket.socket], start: bytes, message: str
) -> None:
    pair[0].sendall(start)
    with pytest.raises(DecodeError, match=message):
        sockets.read_header(pair[1])


def test_a_target_of_another_length_is_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sockets.send_all(pair[0], parts())
    incoming = sockets.read_header(pair[1])
    assert incoming is not None
    with pytest.raises(DecodeError, match="wanted"):
        incoming.read_into(memoryview(bytearray(len(PAYLOAD) - 1)))


def test_a_peer_that_closes_between_frames_has_ended_and_inside_one_has_failed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    frame = b"".join(parts())
    pair[0].sendall(frame + frame[:10])
    pair[0].close()
    incoming = sockets.read_header(pair[1])
    assert incoming is not None
    incoming.read_into(memoryview(bytearray(len(PAYLOAD))))
    with pytest.raises(TransportError, match="after 10 of 24 bytes"):
        sockets.read_header(pair[1])
    one, other = socket.socketpair()
    with other:
        one.close()
        assert sockets.read_header(other) is None


def test_frames_that_have_come_at_once_are_read_one_by_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    bodies = [b"", b"", PAYLOAD, b"", PAYLOAD[:10], b"", b""]
    for number, body in enumerate(bodies):
        header = f"frame {number}".encode()
        sockets.send_all(pair[0], sockets.frame_parts(header, [memoryview(body)]))
    pair[0].sendall(b"PL")
    pair[0].close()
    reader = sockets.ReadAhead(pair[1])
    for number, body in enumerate(bodies):
        incoming = sockets.read_header(reader)
        assert incoming is not None
        assert incoming.header == f"frame {number}".encode()
        target = bytearray(len(body))
        incoming.read_into(memoryview(target))
        assert target == body
    with pytest.raises(TransportError, match="after 2 of 24 bytes"):
        sockets.read_header(reader)


def test_a_request_behind_a_short_frame_fails_at_the_end_of_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sockets.send_all(pair[0], parts(b""))
    reader = sockets.ReadAhead(pair[1])
    assert sockets.read_header(reader) is not None
    threading.Timer(0.05, pair[1].shutdown, [socket.SHUT_RDWR]).start()
    assert sockets.read_header(reader) is None


def test_sending_to_a_peer_that_has_gone_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].close()
    with pytest.raises(TransportError, match="connection broke"):
        sockets.send_all(pair[0], parts())


@pytest.mark.parametrize(
    ("gone", "left"), [(0, [b"abc", b"de"]), (2, [b"c", b"de"]), (3, [b"de"]), (5, [])]
)
def test_advance_leaves_what_has_not_gone(gone: int, left: list[bytes]) -> None:
    rest = sockets.advance([memoryview(b"abc"), memoryview(b"de")], gone)
    assert [bytes(part) for part in rest] == left


def test_within_one_host_buffers_are_small_and_nothing_is_paced() -> None:
    listener, usual = sockets.listen("127.0.0.1", 0)
    with listener, sockets.connect("127.0.0.1", listener.getsockname()[1], 20.0) as one:
        other, _ = listener.accept()
        with other:
            sockets.tune(other, usual)
            for end in (one, other):
                assert congestion.name_of(end) == congestion.UNPACED
                # The kernel counts its own bookkeeping too, as much again.
                nbytes = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                assert nbytes <= 2 * sockets.SAME_HOST_NBYTES
                assert end.gettimeout() is None


def test_connecting_where_nobody_listens_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        sockets.connect("127.0.0.1", port, 20.0)


def test_the_end_of_a_connection_is_nothing_said() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not sockets.has_said(one)
        other.sendall(b"x")
        assert sockets.has_said(one)
        assert one.recv(2) == b"x"
        other.shutdown(socket.SHUT_WR)
        assert not sockets.has_said(one)
    assert not sockets.has_said(one)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_that_wait_are_accepted_with_the_addresses_of_their_peers(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        listener.setblocking(False)
        assert sockets.accept_waiting(listener, 3) == []
        clients = [socket.create_connection(listener.getsockname()[:2]) for _ in range(5)]
        found = sockets.accept_waiting(listener, 3) + sockets.accept_waiting(listener, 3)
        assert [address for _, address in found] == [host] * 5
        accepted = [one for one, _ in found]
        assert [one.getpeername() for one in accepted] == [one.getsockname() for one in clients]
        assert not any(one.get_inheritable() for one in accepted)
        sockets.close_all(accepted)
        for client in clients:
            with client:
                assert client.recv(1) == b""


def test_a_listener_that_is_closed_accepts_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        sockets.accept_waiting(listener, 1)
