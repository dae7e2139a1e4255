"""The connection from this worker to another one, made again while the directory lists it."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pscore.awake import awake_s
from pscore.errors import (
    ConfigError,
    PacelineError,
    RemoteProtocolError,
    ThreadError,
    TransportError,
)
from pscore.net import congestion, sockets, tls, wire
from pscore.net.channel import FrameChannel
from pscore.net.endpoint import Endpoint, connect
from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.text import is_loopback, join_address
from pscore.threads import failure
from pscore.types import FloatArray
from psworker.peers.shared import SHARED_NBYTES_MIN, SharedSender
from psworker.transports.daemon_threads import DaemonExecutor

log = logging.getLogger("paceline")
DELAY_S, DELAY_S_MAX = 0.05, 1.0
SAY_AFTER_S = 7.0
SENT_NOW_NBYTES = 1 << 20  # Longest array that the caller sends itself: a piece of a sum.
BREAK_AFTER_S = 5.0  # Silence of the other host after which a connection is made anew.
OnAnswer = Callable[[FloatArray | None], None]


@dataclass(slots=True, eq=False)
class PeerCall:
    """One message under way, and its answer."""

    on_answer: OnAnswer | None = None  # Callback of an offer; None: the other is busy or gone.
    slot: data_pb2.Slot | None = None  # Place of its array in shared memory.
    done: Future[None] = field(default_factory=Future)


class PeerLink:
    """Sends arrays and offers to one worker.

    A thread of its own sends, so that no worker waits there for another one that is slow to read,
    or is stopped. Over TCP the caller itself sends a short array, which another worker awaits: a
    switch of threads would take longer, and where the other is silent the connection breaks soon.

    Attributes:
        is_over: Whether the worker is gone.
        is_new: Whether there was no connection yet.
        problem: Why there is no connection; None: there is one, or none was tried.
        refusal: The error with which the worker has refused an array; None: it has refused none.
        failure: The error of a thread of this connection, which has failed; None: none has.
    """

    def __init__(self, peer: control_pb2.Peer, own_host: str) -> None:
        """Starts to connect."""
        self.peer = peer
        self.is_over = False
        self.is_new = True
        self.problem: PacelineError | None = None
        self.refusal: PacelineError | None = None
        self.failure: ThreadError | None = None
        # The loopback address of another host is not reached, and here it may be anybody's.
        self._is_apart = is_loopback(peer.host) and not is_loopback(own_host)
        self._open: set[PeerCall] = set()  # Without a reply.
        self._is_local = False  # Whether the other worker is on this host, and shares memory.
        self._tcp: tls.Stream | None = None  # The newest connection, where that is TCP.
        self._unsent: set[PeerCall] = set()  # Calls that the thread has yet to send.
        self._shared: SharedSender | None = None
        self._heard_s = 0.0  # Time of the last reply, or since when replies are due.
        self._endpoint = Endpoint(
            host=peer.host,
            port=peer.port,
            local=peer.local,
            token=peer.secret,
            tls=_pinned(peer.certificate) if peer.certificate else None,
        )
        self._channel = FrameChannel[PeerCall](self._connect, self._on_reply, "peer")
        self._channel.start()
        self._sender = DaemonExecutor(1, "peer-send")

    @property
    def address(self) -> str:
        """The address at which the other worker listens, for people."""
        return join_address(self.peer.host, self.peer.port)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection; one to a host that is cut off breaks after seconds."""
        return self._channel.is_connected

    @property
    def is_far(self) -> bool:
        """Whether the other host is outside this data centre."""
        return self._tcp is not None and congestion.is_far(self._tcp)

    @property
    def silent_s(self) -> float:
        """Seconds for which replies are due and none has come; 0.0 where none is due."""
        return awake_s() - self._heard_s if self._open else 0.0

    @property
    def has_offers_alone(self) -> bool:
        """Whether all messages without a reply are offers."""
        return all(call.on_answer is not None for call in list(self._open))

    def send(
        self, envelope: data_pb2.Envelope, values: FloatArray, on_answer: OnAnswer | None = None
    ) -> Future[None]:
        """Sends an array, which must not change any more; calls `on_answer` once, if given."""
        call = PeerCall(on_answer)
        if not self._open:
            self._heard_s = awake_s()
        self._open.add(call)
        call.done.add_done_callback(lambda done: self._open.discard(call))
        call.done.add_done_callback(lambda done: self._free(call))
        call.done.add_done_callback(partial(self._note_refusal, call))
        if on_answer is not None:
            call.done.add_done_callback(
                lambda done: on_answer(None) if done.exception() is not None else None
            )
        is_short = on_answer is None and values.nbytes <= SENT_NOW_NBYTES
        if is_short and self._tcp is not None and not self._unsent:
            self._send(call, envelope, values)
        else:
            self._unsent.add(call)
            self._sender.start(partial(self._send, call, envelope, values), call.done.set_exception)
        return call.done

    def close(self, *, waits: bool = True) -> None:
        """Ends the connection: the worker is gone, or this one ends.

        Args:
            waits: Whether this returns only when all calls have failed, or after some seconds.
        """
        self.is_over = True
        self._sender.close()
        self._channel.close(waits=waits)

    def _send(self, call: PeerCall, envelope: data_pb2.Envelope, values: FloatArray) -> None:
        call.slot = self._place(envelope, values)
        self._channel.request(call, envelope, [] if call.slot else [wire.as_bytes(values)])
        self._unsent.discard(call)

    def _place(self, envelope: data_pb2.Envelope, values: FloatArray) -> data_pb2.Slot | None:
        """Copies a long array to memory that the other worker shares; returns the place, if any."""
        if not self._is_local or values.nbytes < SHARED_NBYTES_MIN:
            return None
        header = envelope.give if envelope.HasField("give") else envelope.offer
        try:
            if self._shared is None:
                self._shared = SharedSender(self._endpoint, header.sender, values.nbytes)
        except (PacelineError, OSError) as problem:
            log.info("no shared memory with worker %d: %s", self.peer.rank, problem)
            self._is_local = False
            return None
        slot = self._shared.put(values)
        if slot is not None:
            header.slot.CopyFrom(slot)
        return slot

    def _connect(self) -> tls.Stream:
        """Returns a connection, tried until there is one.

        Raises:
            TransportError: The worker is gone.
        """
        delay_s, started_s, say_s = DELAY_S, awake_s(), SAY_AFTER_S
        while True:
            for is_local in (True, False):
                if self.is_over:
                    raise TransportError(f"worker {self.peer.rank} is gone")
                try:
                    stream = self._try(is_local=is_local)
                    self._is_local |= is_local and self.is_new
                    self.is_new, self.problem = False, None
                    self._tcp = None if is_local else stream
                    return stream
                except PacelineError as failure:  # A refusal too: its worker may be gone, and
                    self.problem = failure  # another program may have got its port.
            waited_s = awake_s() - started_s
            if waited_s >= say_s:
                say_s *= 2
                log.warning(
                    "worker %d at %s cannot be reached for %.0f s: %s",
                    self.peer.rank,
                    self.address,
                    waited_s,
                    self.problem,
                )
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, DELAY_S_MAX)

    def _try(self, *, is_local: bool) -> tls.Stream:
        """Returns a connection.

        Raises:
            TransportError: The worker is not reached.
            RemoteProtocolError: The process that listens there refuses this worker.
            ConfigError: The worker has no address that another host could reach.
        """
        if self._is_apart and not is_local:
            raise ConfigError(
                f"it listens at the loopback address {self.peer.host} of its host, because its "
                "PACELINE_SERVERS names the first shard by such an address: name the shards "
                "alike on all hosts, or set PACELINE_PEER_HOST there to an address of that host"
            )
        stream = connect(self._endpoint, is_local=is_local)
        sockets.limit_unacknowledged(stream, BREAK_AFTER_S)
        return stream

    def _note_refusal(self, call: PeerCall, done: Future[None]) -> None:
        """Notes why the worker gets no array: it waits for it, and nobody sends it again."""
        problem = done.exception()
        if problem is None or isinstance(problem, TransportError):
            return
        if not isinstance(problem, RemoteProtocolError):
            if not isinstance(problem, ThreadError):
                problem = failure("peer-send", problem)
            self.failure = problem
            return
        log.warning("worker %d at %s refuses an array: %s", self.peer.rank, self.address, problem)
        if call.on_answer is None:
            self.refusal = problem

    def _on_reply(
        self, envelope: data_pb2.Envelope, call: PeerCall, incoming: sockets.Incoming
    ) -> None:
        self._heard_s = awake_s()
        values = np.empty(incoming.payload_nbytes // wire.FLOAT_NBYTES, np.float32)
        incoming.read_into(memoryview(values).cast("B"))
        if envelope.answer.nbytes and call.slot and self._shared:
            values = self._shared.answer(call.slot, envelope.answer.nbytes)
        if call.on_answer is not None:
            call.on_answer(None if envelope.answer.busy else values)
        call.done.set_result(None)

    def _free(self, call: PeerCall) -> None:
        """Ends a call's use of its slot."""
        if call.slot is not None and self._shared is not None:
            self._shared.free(call.slot)


def _pinned(certificate: bytes) -> ssl.SSLContext:
    """Returns a context that trusts one certificate alone, for any host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate.decode("ascii"))
    return context
