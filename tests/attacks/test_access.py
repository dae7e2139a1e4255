"""Refused peers: without a token, or with a wrong one; each gets the reason and harms no other."""

import contextlib
import os
import random
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import message_factory

from pscore.errors import AccessError, PacelineError, RemoteProtocolError, TransportError
from pscore.net import listener, sockets, wire
from pscore.net.endpoint import connect
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import checkpoint_pb2, data_pb2, publish_pb2, standby_pb2
from pscore.pb.ps.v1 import control_pb2 as pb
from psworker.transports.shared_memory import Attachment, attach
from tests.attacks.fortress import EVERYTHING, OTHER, READS, TRAIN, Fortress, fortress, secrets_of
from tests.integration.command import eventually
from tests.integration.worker import NUMEL, Worker

MIB = 1 << 20
WRONG = "0" * 32
GRADIENT = bytes(4 * NUMEL)
NO_TOKEN = "a token is required, and none was sent; set PACELINE_TOKEN_FILE"
NOT_OURS = "this shard does not know the token that was sent; set PACELINE_TOKEN_FILE"
NOT_YOURS = "the token is for job 'other', not for 'train'; set PACELINE_TOKEN_FILE"
BAD = [("", NO_TOKEN), (WRONG, NOT_OURS), (TRAIN + "2", NOT_OURS)]
FOREIGN = [*BAD, (OTHER, NOT_YOURS)]


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fortress")) as made:
        yield made


@pytest.fixture
def stronghold(strong: Fortress) -> Iterator[Fortress]:
    """The shard; after each test the next step of the other job works."""
    yield strong
    assert psutil.pid_exists(strong.pid)
    strong.still_works()


def refusal(failure: grpc.RpcError) -> PacelineError:
    return error_of(failure, "shard")


def intruder(stronghold: Fortress, token: str) -> Worker:
    """A worker that names job "train" and has this token."""
    worker = Worker(stronghold.address, credentials=stronghold.credentials(token))
    worker.sender.incarnation = 7  # As that of the worker that is there.
    return worker


@pytest.mark.parametrize(("token", "message"), FOREIGN)
def test_no_method_lets_a_stranger_in(stronghold: Fortress, token: str, message: str) -> None:
    worker = intruder(stronghold, token)
    calls: dict[str, Callable[[], object]] = {
        "join": worker.join,
        "define": worker.define,
        "push": worker.push_weights,
        "pull": lambda: worker.pull(0, 10),
        "beat": lambda: worker.control.Heartbeat(pb.HeartbeatRequest(job="train", incarnation=7)),
        "barrier": lambda: worker.control.Barrier(pb.BarrierRequest(job="train", incarnation=7)),
        "leave": lambda: worker.control.Leave(pb.LeaveRequest(job="train", incarnation=7)),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.RpcError) as caught:
            call()
        found = refusal(caught.value)
        assert isinstance(found, AccessError), name
        assert str(found).startswith(message), name
    worker.close()


@pytest.mark.parametrize("token", ["", WRONG, TRAIN, OTHER])
@pytest.mark.parametrize("method", ["Status", "Drain"])
def test_control_needs_the_token_for_everything(
    stronghold: Fortress, method: str, token: str
) -> None:
    worker = intruder(stronghold, token)
    request = {"Status": pb.StatusRequest(), "Drain": pb.DrainRequest(grace_s=0.0)}[method]
    with pytest.raises(grpc.RpcError) as caught:
        getattr(worker.control, method)(request)
    assert isinstance(refusal(caught.value), AccessError)
    worker.close()


def test_commands_say_what_is_missing_and_health_needs_no_token(
    stronghold: Fortress, tmp_path: Path
) -> None:
    psserver = stronghold.command
    for name in ("status", "stop"):
        refused = psserver.run(name, code=11, **stronghold.environment())
        assert NO_TOKEN in refused.stderr
    of_a_job = secrets_of(tmp_path, f"train {TRAIN}\n")
    refused = psserver.run("status", code=11, **stronghold.environment(of_a_job))
    assert NO_TOKEN in refused.stderr  # Its file has none for everything, so none is shown.
    everything = secrets_of(tmp_path, f"{EVERYTHING}\n")
    assert "train" in psserver.run("status", **stronghold.environment(everything)).stdout
    assert "ready" in psserver.run("health", **stronghold.environment()).stdout


def test_commands_that_move_a_shard_say_that_their_token_is_wrong(
    stronghold: Fortress, tmp_path: Path
) -> None:
    wrong = stronghold.environment(secrets_of(tmp_path, f"{WRONG}\n"))
    elsewhere = "127.0.0.1:9"
    for words in (["drain", elsewhere], ["standby", elsewhere], ["promote", stronghold.address]):
        assert NOT_OURS in stronghold.command.run(*words, code=11, **wrong).stderr
    other = stronghold.environment(secrets_of(tmp_path, f"other {OTHER}\n"))
    refused = stronghold.command.run("promote", stronghold.address, code=11, **other)
    assert NO_TOKEN in refused.stderr


@pytest.mark.parametrize(("token", "job"), [(READS, "train"), (READS, "other"), (OTHER, "train")])
def test_a_token_that_only_reads_and_one_of_another_job_reach_nothing_else(
    stronghold: Fortress, token: str, job: str
) -> None:
    """Of all methods of all services; `Watch` of the reader's own job is answered."""
    files = (pb, publish_pb2, checkpoint_pb2, standby_pb2)
    allowed = {"/ps.v1.Control/Describe"}
    if (token, job) == (READS, "train"):
        allowed.add("/ps.v1.Publications/Watch")
    answered = set()
    with stronghold.credentials(token).channel(stronghold.address) as channel:
        for service in [one for file in files for one in file.DESCRIPTOR.services_by_name.values()]:
            for method in service.methods:
                request = message_factory.GetMessageClass(method.input_type)()
                for name, value in {"job": job, "incarnation": 7}.items():
                    if name in method.input_type.fields_by_name:
                        setattr(request, name, value)
                where = f"/{service.full_name}/{method.name}"
                call = channel.unary_unary(where, None, None)
                failure = call.future(request.SerializeToString(), timeout=200.0).exception()
                if failure is None:
                    answered.add(where)
                else:
                    assert isinstance(failure, grpc.RpcError)
                    assert isinstance(refusal(failure), AccessError), where
    assert answered == allowed


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize(("token", "message"), BAD)
def test_a_data_connection_needs_a_token(
    stronghold: Fortress, token: str, message: str, is_local: bool
) -> None:
    with pytest.raises(AccessError, match=message):
        connect(stronghold.endpoint(token), is_local=is_local)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_data_connection_of_one_job_reads_and_writes_no_other(
    stronghold: Fortress, is_local: bool
) -> None:
    sender = data_pb2.Sender(job="train", worker=0, incarnation=7)
    push = data_pb2.PushHeader(sender=sender, role=data_pb2.ROLE_WEIGHTS, samples=1)
    pull = data_pb2.PullHeader(sender=sender, min_version=0)
    connection = connect(stronghold.endpoint(OTHER), is_local=is_local)
    with connection:
        for envelope, payload in (
            (data_pb2.Envelope(id=1, push=push), [memoryview(GRADIENT)]),
            (data_pb2.Envelope(id=2, pull=pull), []),
        ):
            header = envelope.SerializeToString()
            sockets.send_all(connection, sockets.frame_parts(header, payload))
            incoming = sockets.read_header(connection)
            assert incoming is not None
            incoming.read_into()
            answer = data_pb2.Envelope.FromString(incoming.header)
            assert answer.id == envelope.id
            assert answer.failed.kind == "AccessError"
            assert answer.failed.message.startswith(NOT_YOURS)


@pytest.mark.parametrize(("token", "message"), FOREIGN)
def test_memory_is_shared_with_the_tokens_job_only(
    stronghold: Fortress, token: str, message: str
) -> None:
    from pscore.memory.segment import Segment, WeightsMap

    segment = Segment.create(4 * NUMEL)
    attachment = Attachment(
        sender=data_pb2.Sender(job="train", worker=0, incarnation=7),
        grads=segment,
        layout=WeightsMap([]),
        specs=[],
    )
    with pytest.raises(AccessError, match=message):
        attach(stronghold.endpoint(token), attachment)
    segment.close()


def test_a_worker_cannot_end_a_shard_by_shortening_its_memory(stronghold: Fortress) -> None:
    """The holder of a job's token: its unsealed memory is refused, and sealed memory stays."""
    from pscore.memory.segment import Segment, WeightsMap

    def attachment(segment: Segment) -> Attachment:
        sender = data_pb2.Sender(job="train", worker=0, incarnation=7)
        return Attachment(sender=sender, grads=segment, layout=WeightsMap([]), specs=[])

    fd = os.memfd_create("paceline")
    os.ftruncate(fd, 4 * NUMEL)
    with pytest.raises(RemoteProtocolError, match="its owner could shorten it"):
        attach(stronghold.endpoint(TRAIN), attachment(Segment(fd, 4 * NUMEL)))
    sealed = Segment.create(4 * NUMEL)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.fd, 0)
    sealed.close()


def test_a_damaged_control_call_gets_a_reason_and_is_never_unknown(stronghold: Fortress) -> None:
    """Bytes that are no message, and messages with random values, from a holder of the token."""
    rng = random.Random(7)
    control = pb.DESCRIPTOR.services_by_name["Control"]
    codes = Counter[str]()
    with stronghold.credentials(TRAIN).channel(stronghold.address) as channel:
        for method in control.methods:
            whole = message_factory.GetMessageClass(method.input_type)()
            for _ in range(8):
                raw = bytearray(whole.SerializeToString() + rng.randbytes(1 + rng.randrange(12)))
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                call = channel.unary_unary(f"/{control.full_name}/{method.name}", None, None)
                failure = call.future(bytes(raw), timeout=10.0)
                codes[failure.code().name] += 1
                assert failure.code() is grpc.StatusCode.OK or failure.details(), method.name
    assert codes["INVALID_ARGUMENT"] > 0
    assert codes["UNKNOWN"] == 0


def test_a_message_without_numbers_is_short(stronghold: Fortress) -> None:
    """A heartbeat of 23 MiB with empty reports took 865 MiB, and a minute of the event loop."""
    with stronghold.credentials(TRAIN).channel(stronghold.address) as channel:
        beat = channel.unary_unary("/ps.v1.Control/Heartbeat", None, None)
        failure = beat.future(b"\x42\x00" * (1 << 20), timeout=200.0).exception()
    assert isinstance(failure, grpc.RpcError)
    assert str(refusal(failure)) == "2097152 bytes are no message for Heartbeat"


def test_a_replayed_session_is_not_one(stronghold: Fortress) -> None:
    """All that an honest client has sent, hello and push included, once more, byte for byte."""
    endpoint = stronghold.endpoint(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        recorded = bytearray()

        def record() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((endpoint.host, endpoint.port)) as far:
                back = threading.Thread(target=forward, args=(far, near, bytearray()))
                back.start()
                forward(near, far, recorded)
                back.join()

        thread = threading.Thread(target=record)
        thread.start()
        with connect(stronghold.endpoint(TRAIN, port=port), is_local=False):
            pass
        thread.join()
    assert len(recorded) > 500
    with stronghold.knock() as thief:
        thief.sendall(recorded)
        answers = b""
        while data := quiet_receive(thief):
            answers += data
    # A server's hello, sealed with keys that the thief does not have; then an alert, or nothing.
    assert not answers or answers[0] in (0x15, 0x16)


def forward(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):  # The other side has gone first.
        while data := quiet_receive(source):
            kept += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def quiet_receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_peer_without_tls_is_disconnected(stronghold: Fortress) -> None:
    with pytest.raises(TransportError, match="no data connection to 127"):
        connect(stronghold.endpoint(TRAIN, tls=None), is_local=False)


def hello() -> bytes:
    """Returns a whole ClientHello: the shard answers with its certificate, and waits."""
    to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    wrapped = context.wrap_bio(to_us, to_them, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        wrapped.do_handshake()
    return to_them.read()


@pytest.mark.parametrize("plane", ["socket", "grpc"])
def test_handshakes_that_are_not_finished_take_bounded_memory(
    stronghold: Fortress, plane: str
) -> None:
    """500 peers that nobody knows begin, get the shard's certificate, and stop there."""
    process, where, said = psutil.Process(stronghold.pid), stronghold.endpoint(), hello()
    port = where.port if plane == "socket" else int(stronghold.address.rpartition(":")[2])
    before = process.memory_info().rss
    with contextlib.ExitStack() as held:
        answered = 0
        for _ in range(500):
            stranger = held.enter_context(socket.create_connection((where.host, port), 200.0))
            with contextlib.suppress(OSError):  # It may have to go for a later one.
                stranger.sendall(said)
                answered += bool(stranger.recv(1 << 16))
        assert answered > listener.PENDING_MAX // 2
        assert process.memory_info().rss - before < 64 * MIB
        stronghold.still_works()
        connect(stronghold.endpoint(TRAIN), is_local=False).close()


def test_many_half_hellos_stall_nobody_and_are_closed(
    stronghold: Fortress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than may wait: the oldest have to go, and an honest one comes in at its first try."""
    for limit in ("endpoint.CONNECT_TIMEOUT_S", "tls.HANDSHAKE_TIMEOUT_S"):  # On a busy machine.
        monkeypatch.setattr(f"pscore.net.{limit}", 100.0)
    before = psutil.Process(stronghold.pid).memory_info().rss
    slow = [stronghold.knock() for _ in range(4)]
    where = stronghold.endpoint()
    number = listener.PENDING_MAX + 40 - len(slow)
    slow += [socket.create_connection((where.host, where.port), 200.0) for _ in range(number)]
    for connection in slow:
        try:
            connection.sendall(b"\x16\x03\x01")  # The first bytes of a ClientHello.
        except OSError:
            continue  # It had to go already.
    connect(stronghold.endpoint(TRAIN), is_local=False).close()
    stronghold.still_works()
    assert slow[0].recv(1) == b""
    grown = psutil.Process(stronghold.pid).memory_info().rss - before
    assert grown < 64 * MIB
    for connection in slow:
        connection.close()
    eventually(lambda: psutil.Process(stronghold.pid).num_threads() < 100)


@pytest.mark.slow
def test_a_message_without_a_token_is_not_read(stronghold: Fortress) -> None:
    """Four strangers push 64 MiB each, over and over; the shard keeps none of it."""
    frame = wire.encode(b"", bytes(64 * MIB))
    process = psutil.Process(stronghold.pid)
    before, peak = process.memory_info().rss, 0
    workers = [intruder(stronghold, "") for _ in range(4)]
    for _ in range(3):
        calls = [worker.push_frame.future(frame, timeout=200.0) for worker in workers]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call.result()
            assert isinstance(refusal(caught.value), AccessError)
            peak = max(peak, process.memory_info().rss)
    for worker in workers:
        worker.close()
    assert peak - before < 64 * MIB


@pytest.mark.parametrize("size", [(1 << 20, 0), (100, 64 * MIB), (4097, 0), (100, 1)])
def test_before_the_token_only_a_small_hello_is_read(
    stronghold: Fortress, size: tuple[int, int]
) -> None:
    endpoint = stronghold.endpoint()
    assert endpoint.tls is not None
    with socket.create_connection((endpoint.host, endpoint.port), 200.0) as plain:
        endpoint.tls.minimum_version = ssl.TLSVersion.TLSv1_3
        with endpoint.tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(wire.CHECKED.pack(wire.MAGIC, *size) + bytes(8))
            assert connection.recv(1) == b""
