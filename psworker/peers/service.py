"""The listening end of a worker: takes arrays and offers of other workers of the same job."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from pscore.errors import AccessError, DecodeError, LimitError, RemoteProtocolError
from pscore.net.budget import Budget
from pscore.net.connection import Connection
from pscore.net.sockets import Incoming
from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import FloatArray
from psworker.gossip.base import PART_NUMEL, Tag
from psworker.peers.mailbox import Mailbox

log = logging.getLogger("paceline")
QUEUED_NBYTES_MIN = 256 << 10
UNDER_WAY_NBYTES = 4 << 30
OnOffer = Callable[[int, int, int, int, FloatArray], FloatArray | None]


class PeerService:
    """Admits the workers that have the job's token, and sorts what they send.

    Attributes:
        on_offer: Answers an offer (`Gossip.on_offer`); None: this worker is busy.
        budget: Bytes that may be under way.
    """

    queued_nbytes_min = QUEUED_NBYTES_MIN

    def __init__(self, job: str, token: str, mailbox: Mailbox) -> None:
        """Listens for nobody yet.

        Args:
            job: Name of the job.
            token: Its token; empty: none is needed.
            mailbox: Gets the arrays.
        """
        self.budget = Budget(UNDER_WAY_NBYTES, "")
        self.on_offer: OnOffer | None = None
        self.job = job
        self.table = -1
        self.mailbox = mailbox
        self._token = token

    @property
    def needs_token(self) -> bool:
        """Whether a peer must say hello with a token first."""
        return bool(self._token)

    def admit(self, connection: Connection, token: str) -> PeerHandler:
        """Returns the handler of a new connection.

        Raises:
            AccessError: The token is wrong.
        """
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise AccessError("the token is not that of this worker's job")
        return PeerHandler(self, connection)

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


class PeerHandler:
    """Receives the arrays and offers of one connection."""

    def __init__(self, service: PeerService, connection: Connection) -> None:
        """Handles one connection of `service`."""
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
            values = self._read(give.sender, incoming)
            tag = Tag(give.kind, give.round, give.part, give.epoch)
            self._service.mailbox.put(give.sender.incarnation, tag, values)
            self._connection.send(pb.Envelope(id=envelope.id, taken=pb.Taken()))
        elif kind == "offer":
            offer = envelope.offer
            values = self._read(offer.sender, incoming)
            self._answer(envelope.id, offer, values)
        else:
            raise DecodeError(f"frame between workers with {kind!r} in it")

    def on_refused(self, envelope: pb.Envelope) -> None:
        """Does nothing: the sender reports a refusal."""

    def on_end(self) -> None:
        """Does nothing: the directory tells who is gone."""

    def _answer(self, number: int, offer: pb.Offer, values: FloatArray) -> None:
        service, own = self._service, None
        if service.on_offer is not None:
            sender = offer.sender
            own = service.on_offer(
                sender.worker, sender.incarnation, offer.number, offer.slice, values
            )
        answer = pb.Envelope(id=number, answer=pb.Answer(busy=own is None))
        arrays: list[Any] = [] if own is None else [own]
        self._connection.send(answer, arrays, lambda: None)

    def _read(self, sender: pb.Sender, incoming: Incoming) -> FloatArray:
        """Returns the payload of a message as numbers."""
        service, nbytes = self._service, incoming.payload_nbytes
        if (sender.job, sender.table) != (service.job, service.table):
            raise RemoteProtocolError(
                f"a message for table {sender.table} of job {sender.job!r} came to a worker of "
                f"table {service.table} of {service.job!r}"
            )
        if nbytes % FLOAT_NBYTES or nbytes > PART_NUMEL * FLOAT_NBYTES:
            raise LimitError(f"{nbytes} bytes between workers, at most {PART_NUMEL} numbers wanted")
        self._connection.is_known = True
        values = np.empty(nbytes // FLOAT_NBYTES, np.float32)
        incoming.read_into(memoryview(values).cast("B"))
        return values
