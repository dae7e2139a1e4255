"""Certificates that are not good, TLS on one side only, and hellos that never end."""

import contextlib
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from pscore.errors import PacelineError, TLSError, TransportError
from pscore.net import connection, sockets, tls
from pscore.net.credentials import ANYONE, Credentials
from pscore.net.endpoint import Endpoint, connect
from pscore.net.listener import Listener
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.access.authorizer import Authorizer
from psserver.service.data_socket import make_listener
from psworker.connection.shard_link import Link
from tests.attacks.fortress import (
    TOMORROW,
    TRAIN,
    YESTERDAY,
    Fortress,
    certificates,
    client,
    flags_of,
    fortress,
    secrets_of,
)
from tests.integration.command import Command, eventually
from tests.unit.psserver.front import Front, play

EXPIRED = "the certificate of .* has expired; make new ones with `psserver certs`"
EARLY = (
    r"the certificate of .* is not valid (before 20..-..-.. ..:.. UTC|yet), and this machine's "
    r"clock says 20..-..-.. ..:.. UTC; check the clocks of both machines"
)
FOREIGN = "the certificate of .* is not signed by the CA in PACELINE_TLS_CA"
MISNAMED = r"the certificate of .* is not valid for this name .*`psserver certs --host NAME`"
NO_TLS = "does not speak TLS, but this side is set to use TLS; start the shards with --tls-cert"
TLS_ONLY = "speaks TLS only; set PACELINE_TLS_CA"
ASKS = "asks for a certificate of this side; set PACELINE_TLS_CERT and PACELINE_TLS_KEY"
NOT_TAKEN = "does not accept this side's certificate .*; set PACELINE_TLS_CERT and"
TAKEN_FROM = NOT_TAKEN.replace(
    ".*", r".* \(valid from 20..-..-.. ..:.. to 20..-..-.. ..:.. UTC by the clock there\)"
)
CUT = "|no data connection to"  # The reason may be lost where both sides speak at once.


def good(folder: Path) -> Path:
    return certificates(folder)


def expired(folder: Path) -> Path:
    return certificates(folder, now=YESTERDAY)


def early(folder: Path) -> Path:
    return certificates(folder, now=TOMORROW)


def misnamed(folder: Path) -> Path:
    """Replaces the shard's certificate by one of the same CA for another host."""
    files = certificates(folder)
    authority = trustme.CA()
    issued = authority.issue_cert("elsewhere.example")
    authority.cert_pem.write_to_path(files / "ca.pem")
    (files / "server.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (files / "server.key").write_bytes(issued.private_key_pem.bytes())
    return files


SHARDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "expired": (expired, EXPIRED),
    "not valid yet": (early, EARLY),
    "another CA": (good, FOREIGN),
    "another host": (misnamed, MISNAMED),
}


def describe(address: str, credentials: Credentials) -> pb.DescribeReply:
    """Asks a shard once, and as long as nobody answers, for many seconds."""
    link = Link(address, patience_s=60.0, credentials=credentials)
    try:
        reply: pb.DescribeReply = link.call(link.control.Describe, pb.DescribeRequest())
        return reply
    finally:
        link.close()


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_whose_certificate_is_not_good_is_not_believed(tmp_path: Path, name: str) -> None:
    make, message = SHARDS[name]
    files, tokens = make(tmp_path), secrets_of(tmp_path)
    trusted = certificates(tmp_path, "other") if name == "another CA" else files
    command = Command(tmp_path)
    flags = flags_of(files, tokens)[:4]  # Without a CA of clients.
    with command.detached(*flags, "--token-file", tokens) as run:
        with pytest.raises(TLSError, match=message):
            describe(run["addresses"][0], client(trusted, TRAIN))
        refused = command.run(
            "status",
            code=11,
            PACELINE_TLS_CA=str(trusted / "ca.pem"),
            PACELINE_TOKEN_FILE=str(tokens),
        )
        assert "the certificate of 127.0.0.1" in refused.stderr
        assert ("is not valid before 20" in refused.stderr) == (name == "not valid yet")


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fortress")) as made:
        yield made


def test_a_worker_without_a_certificate_is_not_let_in(strong: Fortress) -> None:
    naked = Credentials(ca=strong.files / "ca.pem", token=TRAIN)
    with pytest.raises(TLSError, match=ASKS):
        describe(strong.address, naked)
    with pytest.raises((TLSError, TransportError), match=ASKS + CUT):
        connect(strong.endpoint(TRAIN, tls=tls.client_context(naked)), is_local=False)
    strong.still_works()


@pytest.mark.parametrize("now", [None, YESTERDAY, TOMORROW], ids=["good", "expired", "early"])
def test_a_worker_with_a_foreign_certificate_is_not_let_in(
    strong: Fortress, tmp_path: Path, now: datetime.datetime | None
) -> None:
    own = certificates(tmp_path, now=now)
    credentials = client(strong.files, TRAIN, own=own)
    with pytest.raises(TLSError, match=TAKEN_FROM):
        describe(strong.address, credentials)
    with pytest.raises((TLSError, TransportError), match=NOT_TAKEN + CUT):
        connect(strong.endpoint(TRAIN, tls=tls.client_context(credentials)), is_local=False)
    strong.still_works()


def test_a_worker_without_tls_is_told_to_use_it(strong: Fortress) -> None:
    with pytest.raises(TLSError, match=TLS_ONLY):
        describe(strong.address, ANYONE)
    strong.still_works()


def test_a_worker_with_tls_is_told_that_the_shard_has_none(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    with Command(tmp_path).detached() as run, pytest.raises(TLSError, match=NO_TLS):
        describe(run["addresses"][0], client(files))


# ----- the data port, in this process


@contextmanager
def listening(front: Front, files: Path, tokens: Path | None) -> Iterator[Listener]:
    server = make_listener(
        front.engine,
        "127.0.0.1",
        0,
        f"paceline-test-{files}",
        authorizer=Authorizer.of(None if tokens is None else str(tokens)),
        context=tls.server_context(files / "server.pem", files / "server.key", None),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("name", SHARDS)
def test_the_data_port_is_not_believed_either(tmp_path: Path, name: str) -> None:
    make, message = SHARDS[name]
    files = make(tmp_path)
    trusted = certificates(tmp_path, "other") if name == "another CA" else files

    async def scene(front: Front) -> None:
        with listening(front, files, None) as server:
            context = tls.client_context(client(trusted))
            endpoint = Endpoint(host="127.0.0.1", port=server.port, local="", tls=context)
            with pytest.raises(TLSError, match=message):
                connect(endpoint, is_local=False)

    play(scene)


PIECES = {
    "nothing": b"",
    "a byte": b"\x16",
    "half a client's hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "what is no TLS": b"PL\x06\x00",
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("is_secured", [True, False])
def test_half_a_hello_is_closed_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_secured: bool
) -> None:
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.3)
    files, tokens = certificates(tmp_path), secrets_of(tmp_path)

    async def scene(front: Front) -> None:
        with listening(front, files, tokens) as server:
            if not is_secured:
                server._context = None
            with socket.create_connection(("127.0.0.1", server.port), 200.0) as slow:
                slow.sendall(PIECES[name])
                with contextlib.suppress(ConnectionResetError):
                    assert slow.recv(1) in (b"", b"\x15")  # Closed, perhaps with an alert.
            eventually(lambda: not server._pending and not server._connections)

    play(scene)


def test_a_hello_that_trickles_in_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for all of it: a byte now and then does not move it."""
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.5)
    files, tokens = certificates(tmp_path), secrets_of(tmp_path)
    hello = data_pb2.Envelope(hello=data_pb2.Hello(token=TRAIN)).SerializeToString()
    frame = b"".join(sockets.frame_parts(hello, ()))

    async def scene(front: Front) -> None:
        with listening(front, files, tokens) as server:
            server._context = None
            with socket.create_connection(("127.0.0.1", server.port), 200.0) as slow:
                pause, answer = threading.Event(), b"?"
                with contextlib.suppress(OSError):
                    for byte in frame:
                        slow.sendall(bytes([byte]))
                        pause.wait(0.02)
                with contextlib.suppress(ConnectionResetError):
                    answer = slow.recv(1)
                assert answer in (b"", b"?"), "no welcome"
            eventually(lambda: not server._connections)

    play(scene)


def tls_pair(folder: Path) -> tuple[tls.TLSSocket, tls.TLSSocket]:
    """Returns both ends of a connection, the client's first."""
    files = certificates(folder)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    server = tls.server_context(files / "server.pem", files / "server.key", None)
    ends: list[tls.TLSSocket] = []
    accept = threading.Thread(target=lambda: ends.append(tls.secure(theirs, server)))
    accept.start()
    context = tls.client_context(client(files))
    assert context is not None
    near = tls.secure(ours, context, host="localhost")
    accept.join()
    (far,) = ends
    return near, far


def test_a_tls_connection_is_written_and_read_at_once(tmp_path: Path) -> None:
    """As the data sockets does all the time: two threads, megabytes in both directions."""
    near, far = tls_pair(tmp_path)
    payload = bytes(range(256)) * (1 << 15)  # 8 MiB, in either direction.
    threads = [
        threading.Thread(target=end.sendmsg, args=([memoryview(payload)],)) for end in (near, far)
    ]
    for thread in threads:
        thread.start()
    for end in (near, far):
        received = bytearray(len(payload))
        view = memoryview(received)
        while view.nbytes:
            view = view[end.recv_into(view) :]
        assert received == payload
    for thread in threads:
        thread.join()
    near.close()
    assert far.recv_into(memoryview(bytearray(1))) == 0
    far.close()


def test_only_a_tls_connection_explains_a_broken_handshake() -> None:
    assert tls.explain(ConnectionRefusedError(111, "no"), "a:1") is None
    assert issubclass(TLSError, PacelineError)
    assert not issubclass(TLSError, TransportError), "trying again cannot help"
