"""Arrays between two workers of one host lie in shared memory; real sockets in one process."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscore.errors import AccessError, ConfigError, PacelineError, RemoteProtocolError
from pscore.memory.segment import PAGE, Segment
from pscore.memory.slots import Slots
from pscore.net import congestion
from pscore.net.endpoint import Endpoint
from pscore.net.listener import Listener
from pscore.pb.ps.v1 import control_pb2
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import FloatArray
from psworker.connection.accounts.pace import Pace
from psworker.gossip.base import Meet, Tag
from psworker.peers import mailbox, shared
from psworker.peers.link import PeerLink
from psworker.peers.mailbox import Mailbox
from psworker.peers.peers import Peers
from psworker.peers.service import PeerService
from psworker.peers.shared import SharedReceivers, SharedSender
from tests.integration.command import eventually, join_threads

SECRET, LONG, SHORT = "open sesame", 1 << 18, 8
HOST = "127.0.0.1"
SENDER = pb.Sender(job="j", worker=1, incarnation=11)


class Receiver:
    """A worker that listens, and answers an offer by its negative."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.service = PeerService("j", SECRET, self.mailbox)
        self.service.table = 0
        self.service.on_offer = lambda source, incarnation, number, part, values: -values
        local = f"paceline-test-{secrets.token_hex(8)}"
        self.listener = Listener(self.service, HOST, 0, local, others=self.service.others)
        self.listener.start()
        self.peer = control_pb2.Peer(
            rank=0, incarnation=7, host=HOST, port=self.listener.port, local=local, secret=SECRET
        )
        self.endpoint = Endpoint(host=HOST, port=0, local=local, token=SECRET)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.listener.stop()


def give(link: PeerLink, number: int, values: FloatArray) -> pb.Envelope:
    """Sends an array, and returns its header once it is acknowledged."""
    envelope = pb.Envelope(give=pb.Give(sender=SENDER, kind=1, round=number))
    link.send(envelope, values).result(10.0)
    return envelope


def test_long_arrays_lie_in_shared_memory_and_short_ones_in_their_frames(
    receiver: Receiver,
) -> None:
    link = PeerLink(receiver.peer, HOST)
    give(link, 0, np.zeros(SHORT, np.float32))  # There is a connection now.
    for number, numel in enumerate((LONG, SHORT, LONG - 1, LONG, LONG + PAGE), 1):
        sent = np.arange(numel, dtype=np.float32) + number
        header = give(link, number, sent)
        assert header.give.HasField("slot") is (SHORT < numel <= LONG)  # The first gives the size.
        taken = receiver.mailbox.take(11, Tag(1, number, 0), 1.0)
        assert taken is not None
        assert np.array_equal(taken, sent)
    link.close()


@pytest.mark.parametrize(
    ("local", "near_us", "is_far"),
    [("", 0, True), ("", 10_000_000, False), ("same host", 0, False)],
)
def test_a_worker_is_far_if_the_round_trips_over_tcp_are_long(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, local: str, near_us: int, is_far: bool
) -> None:
    monkeypatch.setattr(congestion, "NEAR_US", near_us)
    if not local:
        receiver.peer.local = ""
    link = PeerLink(receiver.peer, HOST)
    give(link, 0, np.zeros(SHORT, np.float32))
    assert link.is_far is is_far
    link.close()


def test_answers_to_offers_lie_in_shared_memory(receiver: Receiver) -> None:
    link = PeerLink(receiver.peer, HOST)
    give(link, 0, np.zeros(SHORT, np.float32))
    for number in range(1, 40):  # More than there are slots.
        sent, found = np.full(LONG, number, np.float32), Future[FloatArray | None]()
        envelope = pb.Envelope(offer=pb.Offer(sender=SENDER, number=number))
        link.send(envelope, sent, found.set_result).result(10.0)
        answer = found.result(10.0)
        assert envelope.offer.HasField("slot")
        assert answer is not None
        assert np.array_equal(answer, -sent)
    receiver.service.on_offer = None
    busy = Future[FloatArray | None]()
    envelope = pb.Envelope(offer=pb.Offer(sender=SENDER, number=40))
    link.send(envelope, np.zeros(LONG, np.float32), busy.set_result).result(10.0)
    assert busy.result(10.0) is None
    link.close()


def test_arrays_travel_in_their_frames_where_memory_cannot_be_shared(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> Slots:
        raise OSError("no memory left")

    monkeypatch.setattr(shared, "Slots", refuse)
    link = PeerLink(receiver.peer, HOST)
    for number in range(2):
        header = give(link, number, np.ones(LONG, np.float32))
        assert not header.give.HasField("slot")
    link.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_worker_that_does_not_read_holds_up_neither_a_send_nor_the_end(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    monkeypatch.setattr("psworker.peers.link.SHARED_NBYTES_MIN", 1 << 40)
    if not is_local:
        receiver.peer.local = "paceline-nobody"
    goes_on, answered = threading.Event(), list[FloatArray | None]()

    def stand(*offer: Any) -> None:
        goes_on.wait(20.0)

    receiver.service.on_offer = stand
    link = PeerLink(receiver.peer, HOST)
    calls = []
    for number in range(32):  # More than all buffers between the two hold.
        envelope = pb.Envelope(offer=pb.Offer(sender=SENDER, number=number))
        calls.append(link.send(envelope, np.zeros(LONG, np.float32), answered.append))
    eventually(lambda: link.is_connected)
    assert not any(call.done() for call in calls)
    link.close()
    assert all(isinstance(call.exception(10.0), PacelineError) for call in calls)
    assert answered == [None] * len(calls)
    goes_on.set()


def test_memory_is_refused_without_the_secret_or_from_another_job(receiver: Receiver) -> None:
    stranger = Endpoint(host="", port=0, local=receiver.endpoint.local, token="guess")
    with pytest.raises(PacelineError, match="not the worker that the directory names"):
        SharedSender(stranger, SENDER, 4 * LONG)
    with pytest.raises(PacelineError, match="job 'other' came to a worker"):
        SharedSender(receiver.endpoint, pb.Sender(job="other", worker=1), 4 * LONG)


def test_a_worker_that_is_refused_tries_again(receiver: Receiver) -> None:
    receiver.service.secret = "another"  # As of another process that has got its port.
    link = PeerLink(receiver.peer, HOST)
    envelope = pb.Envelope(give=pb.Give(sender=SENDER, kind=1))
    done = link.send(envelope, np.ones(SHORT, np.float32))
    eventually(lambda: isinstance(link.problem, AccessError))
    assert not done.done()
    receiver.service.secret = SECRET
    done.result(10.0)
    assert link.problem is None
    link.close()


def test_the_loopback_address_of_another_host_is_never_tried(receiver: Receiver) -> None:
    receiver.peer.local = "paceline-nobody"
    link = PeerLink(receiver.peer, "10.0.0.2")
    eventually(lambda: isinstance(link.problem, ConfigError))
    assert "it listens at the loopback address 127.0.0.1 of its host" in str(link.problem)
    link.close()
    receiver.peer.local = receiver.listener.local  # It is on this host after all.
    link = PeerLink(receiver.peer, "10.0.0.2")
    give(link, 0, np.ones(SHORT, np.float32))
    link.close()


def test_a_refused_array_is_remembered_and_a_refused_offer_counts_as_busy(
    receiver: Receiver,
) -> None:
    link, few = PeerLink(receiver.peer, HOST), np.ones(SHORT, np.float32)
    other = pb.Sender(job="j", worker=1, incarnation=11, table=3)
    busy = Future[FloatArray | None]()
    with pytest.raises(RemoteProtocolError, match="table 3 of job 'j' came to a worker of table 0"):
        link.send(pb.Envelope(offer=pb.Offer(sender=other)), few, busy.set_result).result(10.0)
    assert busy.result(10.0) is None
    assert link.refusal is None
    with pytest.raises(RemoteProtocolError):
        link.send(pb.Envelope(give=pb.Give(sender=other)), few).result(10.0)
    eventually(lambda: isinstance(link.refusal, RemoteProtocolError))
    link.close()


@pytest.fixture
def receivers() -> Iterator[tuple[SharedReceivers, Segment]]:
    """The memory of worker 1, of number 5: two slots of a page."""
    found, memory = SharedReceivers(), Segment.create(2 * PAGE)
    request = pb.Attach(sender=SENDER, nbytes=2 * PAGE, memory=5, slot_nbytes=PAGE)
    found.attach(request, memory.fd)
    yield found, memory
    memory.close()


def test_a_late_message_neither_reads_nor_writes_its_slot(
    receivers: tuple[SharedReceivers, Segment],
) -> None:
    found, _ = receivers
    slot = pb.Slot(memory=5, number=1, nbytes=8)
    receiver, answer = found.of(SENDER, slot), np.ones(2, np.float32)
    receiver.take(3, slot)
    receiver.answer(3, slot, answer)
    receiver.answer(3, slot, answer)  # The same message by another connection.
    receiver.take(8, slot)
    receiver.answer(8, slot, 2 * answer)
    with pytest.raises(RemoteProtocolError, match="message 3 of a worker of this host comes late"):
        receiver.take(3, slot)
    with pytest.raises(RemoteProtocolError, match="comes late"):
        receiver.answer(3, slot, answer)
    assert receiver.answers.floats(PAGE, 2).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (pb.Slot(memory=6, number=0, nbytes=8), "that it has not passed"),
        (pb.Slot(memory=5, number=2, nbytes=8), "8 bytes at slot 2 of shared memory of 8192"),
        (pb.Slot(memory=5, number=(1 << 32) - 1, nbytes=8), "at slot 4294967295"),
        (pb.Slot(memory=5, number=0, nbytes=PAGE + 4), "4100 bytes at slot 0"),
        (pb.Slot(memory=5, number=0, nbytes=6), "6 bytes at slot 0"),
    ],
)
def test_a_place_outside_the_memory_is_refused(
    receivers: tuple[SharedReceivers, Segment], slot: pb.Slot, message: str
) -> None:
    found, _ = receivers
    with pytest.raises(RemoteProtocolError, match=message):
        found.of(SENDER, slot).take(1, slot)


def test_no_descriptor_is_left_behind(receiver: Receiver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(PacelineError):
            SharedSender(receiver.endpoint, pb.Sender(job="other", worker=1), 4 * LONG)
    eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 10)  # Some are the listener's.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiving_thread_that_fails_is_an_error_of_its_worker(receiver: Receiver) -> None:
    receiver.service.on_offer = lambda *offer: [][1]
    link = PeerLink(receiver.peer, HOST)
    answers: list[Any] = []
    envelope = pb.Envelope(offer=pb.Offer(sender=SENDER, number=1))
    link.send(envelope, np.zeros(SHORT, np.float32), answers.append)
    failure = eventually(lambda: receiver.service.failure)
    assert str(failure).startswith("thread 'data-read' of this process ended by IndexError")
    link.close()
    assert answers == [None]
    join_threads("data-read")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_ends_its_thread_is_an_error_of_the_worker_that_asked(
    receiver: Receiver,
) -> None:
    link = PeerLink(receiver.peer, HOST)

    def fail(values: FloatArray | None) -> None:
        if values is not None:
            raise ValueError("cannot be mixed")

    envelope = pb.Envelope(offer=pb.Offer(sender=SENDER, number=1))
    link.send(envelope, np.zeros(SHORT, np.float32), fail)
    failure = eventually(lambda: link.failure)
    assert "thread 'data-peer' of this process ended by ValueError: cannot be" in str(failure)
    link.close()
    join_threads("data-peer")


def test_an_array_that_cannot_be_sent_is_an_error_of_its_worker(receiver: Receiver) -> None:
    link = PeerLink(receiver.peer, HOST)
    broken: Any = SimpleNamespace(nbytes=8)  # Has no bytes to send.
    call = link.send(pb.Envelope(offer=pb.Offer(sender=SENDER)), broken, lambda values: None)
    assert isinstance(call.exception(10.0), AttributeError | TypeError)
    assert "thread 'peer-send'" in str(link.failure)
    link.close()


def test_an_offer_of_a_worker_that_the_directory_does_not_list_changes_nothing(
    receiver: Receiver,
) -> None:
    offers: list[int] = []
    receiver.service.on_offer = lambda source, *_: offers.append(source)
    receiver.service.is_listed = lambda sender: sender.incarnation == SENDER.incarnation
    link = PeerLink(receiver.peer, HOST)
    answers: list[Any] = []
    for incarnation in (99, SENDER.incarnation):
        sender = pb.Sender(job="j", worker=1, incarnation=incarnation)
        envelope = pb.Envelope(offer=pb.Offer(sender=sender, number=1))
        link.send(envelope, np.zeros(SHORT, np.float32), answers.append).result(10.0)
    link.close()
    assert offers == [1]
    assert answers == [None, None]


def test_a_worker_answers_the_offers_of_workers_that_its_directory_lists(
    receiver: Receiver,
) -> None:
    described: list[control_pb2.Peer] = []
    listed = control_pb2.Peer(
        rank=1, incarnation=11, host=HOST, port=receiver.listener.port, secret=SECRET
    )

    def meet(request: control_pb2.MeetRequest) -> control_pb2.MeetReply:
        described.append(request.peer)
        return control_pb2.MeetReply(epoch=1, peers=[listed])

    shard = SimpleNamespace(
        address=f"{HOST}:7070",
        credentials=SimpleNamespace(ca=None),
        patience=SimpleNamespace(limit_s=10.0),
        silent_s=0.0,
        num_beats=1,
        epochs={},
    )
    session: Any = SimpleNamespace(
        job="j",
        rank=0,
        incarnation=7,
        min_workers=0,
        lease_s=10.0,
        peer_host=HOST,
        peer_ports=range(1),
        links=[shard],
        meet=meet,
        timeline=None,
        check=lambda: None,
        require_own=lambda: None,
        pace=Pace(),
        heartbeats=SimpleNamespace(peer_reports={}),
    )
    offers: list[int] = []
    gossip: Any = SimpleNamespace(
        start=lambda: (wait for wait in [Meet(-1, waits=False)]),
        on_offer=lambda source, incarnation, *_: offers.append(incarnation),
        stats=SimpleNamespace(refused=set()),
    )
    peers = Peers(session, 0)
    peers.announce()
    peers.drive(gossip)
    link = PeerLink(described[0], HOST)
    for incarnation in (99, 11):
        sender = pb.Sender(job="j", worker=1, incarnation=incarnation)
        envelope = pb.Envelope(offer=pb.Offer(sender=sender, number=1))
        link.send(envelope, np.zeros(SHORT, np.float32), lambda values: None).result(10.0)
    link.close()
    peers.close()
    assert offers == [11]


def test_arrays_of_workers_that_the_directory_does_not_list_wait_in_a_limited_place(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that find no room are sent again, so a newcomer loses nothing once it is listed."""
    room, listed = 4, set[int]()
    nbytes = 4 * SHORT + mailbox.ENTRY_NBYTES
    monkeypatch.setattr(mailbox, "UNLISTED_NBYTES_MAX", room * nbytes)
    receiver.service.is_listed = lambda sender: sender.incarnation in listed
    link = PeerLink(receiver.peer, HOST)
    calls = []
    for number in range(2 * room):
        sender = pb.Sender(job="j", worker=1, incarnation=11)
        envelope = pb.Envelope(give=pb.Give(sender=sender, kind=1, round=number))
        calls.append(link.send(envelope, np.full(SHORT, number, np.float32)))
    for call in calls[:room]:
        call.result(10.0)
    eventually(lambda: not link.is_connected)  # Once at least; it connects again and again.
    assert len(receiver.mailbox) == room
    assert not any(call.done() for call in calls[room:])
    listed.add(11)
    receiver.mailbox.keep(listed, 0)
    for call in calls[room:]:
        call.result(10.0)
    for number in range(2 * room):
        taken = receiver.mailbox.take(11, Tag(1, number, 0), 1.0)
        assert taken is not None
        assert taken.tolist() == SHORT * [number]
    link.close()


def test_arrays_of_workers_that_the_directory_never_lists_are_dropped() -> None:
    kept = Mailbox()
    kept.put(99, Tag(1, 0, 0), np.zeros(SHORT, np.float32), is_listed=False)
    kept.put(11, Tag(1, 0, 0), np.zeros(SHORT, np.float32), is_listed=False)
    kept.keep([11], 0)
    assert len(kept) == 1
    assert kept.take(99, Tag(1, 0, 0), 0.0) is None
