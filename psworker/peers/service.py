"""The listening end of a worker: takes arrays and offers of other workers of the same job."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from pscore.errors import AccessError, DecodeError, LimitError, RemoteProtocolError, ThreadError
from pscore.memory.segment import Segment
from pscore.net.attach import ATTACH_SUFFIX, Attachments
from pscore.net.budget import Budget
from pscore.net.connection import Connection
from pscore.net.listener import THIS_HOST, Serve
from pscore.net.sockets import Incoming
from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import FloatArray
from psworker.gossip.base import PART_NUMEL, Tag
from psworker.peers.mailbox import Mailbox
from psworker.peers.shared import SharedReceivers

log = logging.getLogger("paceline")
QUEUED_NBYTES_MIN = 256 << 10
UNDER_WAY_NBYTES = 4 << 30
OnOffer = Callable[[int, int, int, int, FloatArray], FloatArray | None]


class PeerService:
    """Admits the workers that know this one's secret, and sorts what they send.

    Attributes:
        secret: Others say hello with it; the directory tells it to them.
        on_offer: Answers an offer (`Gossip.on_offer`); None: this worker is busy.
        is_listed: Returns whether the directory has listed a sender; to others this worker is busy,
            and their arrays wait in a place of limited size.
        budget: Bytes that may be under way.
        receivers: The memory that workers of this host share with this one.
        failure: The error of a thread that receives, which has failed; None: none has.
    """

    queued_nbytes_min = QUEUED_NBYTES_MIN
    needs_token = True  # A peer must say hello with the secret first.

    def __init__(self, job: str, secret: str, mailbox: Mailbox) -> None:
        """Listens for nobody yet."""
        self.budget = Budget(UNDER_WAY_NBYTES, "")
        self.failure: ThreadError | None = None
        self.on_offer: OnOffer | None = None
        self.is_listed: Callable[[pb.Sender], bool] = lambda sender: True
        self.job = job
        self.table = -1
        self.mailbox = mailbox
        self.receivers = SharedReceivers()
        self.secret = secret

    @property
    def others(self) -> dict[str, Serve]:
        """The listener's further sockets (`Listener`): that on which memory is shared."""
        return {ATTACH_SUFFIX: Attachments(self.attach, self.note_refused).serve}

    def admit(self, connection: Connection, token: str) -> PeerHandler:
        """Returns the handler of a new connection; raises AccessError if the secret is wrong."""
        self._require_secret(token)
        return PeerHandler(self, connection)

    def attach(self, request: pb.Attach, fd: int) -> Segment:
        """Maps the memory of another worker of this host; returns that of the answers to it.

        Raises:
            AccessError: The secret is wrong.
            RemoteProtocolError: The worker is of another job.
            TransportError: It cannot be mapped.
        """
        self._require_secret(request.token)
        self.require_same_job(request.sender)
        return self.receivers.attach(request, fd)

    def note_refused(self, reason: str) -> None:
        """Logs another worker's attempt to share memory that came to nothing."""
        self.log("attachment refused", THIS_HOST, reason=reason)

    def broke(self, error: ThreadError) -> None:
        """Records the failure, which ends this worker's next wait (`Peers`)."""
        self.failure = error

    def log(
        self,
        event: str,
        peer: str = "",
        *,
        level: int = logging.WARNING,
        kind: str = "",
        **fields: object,
    ) -> None:
        """Logs what happens on a connection; nothing of it stops training."""
        about = "".join(f", {name} {value}" for name, value in fields.items())
        log.log(min(level, logging.INFO), "peers: %s (%s%s)", event, peer or "unknown peer", about)

    def require_same_job(self, sender: pb.Sender) -> None:
        """Raises a RemoteProtocolError for a message to a worker of another job or table."""
        if (sender.job, sender.table) != (self.job, self.table):
            raise RemoteProtocolError(
                f"a message for table {sender.table} of job {sender.job!r} came to a worker of "
                f"table {self.table} of {self.job!r}"
            )

    def _require_secret(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self.secret.encode()):
            raise AccessError("this is not the worker that the directory names here")


class PeerHandler:
    """Receives the arrays and offers of one connection."""

    def __init__(self, service: PeerService, connection: Connection) -> None:
        self._service = service
        self._connection = connection

    def on_frame(self, envelope: pb.Envelope, incoming: Incoming) -> None:
        """Receives one message and acknowledges or answers it.

        Raises:
            PacelineError: It is of another job, too long, or no message between workers.
        """
        kind = envelope.WhichOneof("body")
        if kind == "give":
            give = envelope.give
            is_listed = self._service.is_listed(give.sender)
            if not is_listed:
                self._service.mailbox.require_room()
            values = self._read(envelope.id, give, incoming)
            tag = Tag(give.kind, give.round, give.part, give.epoch)
            sender = give.sender.incarnation
            self._service.mailbox.put(sender, tag, values, is_listed=is_listed)
            self._connection.send(pb.Envelope(id=envelope.id, taken=pb.Taken()))
        elif kind == "offer":
            offer = envelope.offer
            values = self._read(envelope.id, offer, incoming)
            self._answer(envelope.id, offer, values)
        else:
            raise DecodeError(f"frame between workers with {kind!r} in it")

    def on_refused(self, envelope: pb.Envelope) -> None:
        """Does nothing: the sender reports a refusal."""

    def on_end(self) -> None:
        """Does nothing: the directory tells who is gone."""

    def _answer(self, number: int, offer: pb.Offer, values: FloatArray) -> None:
        service, own = self._service, None
        if service.on_offer is not None and service.is_listed(offer.sender):
            sender = offer.sender
            own = service.on_offer(
                sender.worker, sender.incarnation, offer.number, offer.slice, values
            )
        answer = pb.Envelope(id=number, answer=pb.Answer(busy=own is None))
        arrays: list[Any] = [] if own is None else [own]
        if own is not None and offer.HasField("slot"):
            service.receivers.of(offer.sender, offer.slot).answer(number, offer.slot, own)
            answer.answer.nbytes, arrays = own.nbytes, []
        self._connection.send(answer, arrays, lambda: None)

    def _read(self, number: int, message: pb.Give | pb.Offer, incoming: Incoming) -> FloatArray:
        """Returns the array of a message, which comes in its frame or lies in shared memory."""
        service, is_shared = self._service, message.HasField("slot")
        nbytes = message.slot.nbytes if is_shared else incoming.payload_nbytes
        service.require_same_job(message.sender)
        if nbytes % FLOAT_NBYTES or nbytes > PART_NUMEL * FLOAT_NBYTES:
            raise LimitError(f"{nbytes} bytes between workers, at most {PART_NUMEL} numbers wanted")
        self._connection.note_known()
        if is_shared:
            incoming.read_into()
            return service.receivers.of(message.sender, message.slot).take(number, message.slot)
        values = np.empty(nbytes // FLOAT_NBYTES, np.float32)
        incoming.read_into(memoryview(values).cast("B"))
        return values
