"""The process that is to take a shard, as the one that has it sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from pscore.net.credentials import Credentials
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from psserver.standby.pieces import SentSpan
from psserver.standby.spans import JournalPiece

Reply = TypeVar("Reply")
CALL_TIMEOUT_S = 30.0
RELEASE_TIMEOUT_S = 2.0
SIGN_TIMEOUT_S = 1.0
PUT_TIMEOUT_S = 10.0  # Workers wait for the answer.
MORE = 0x80  # Bit of a byte behind which a number has another one.
PUT = "/ps.v1.Standby/Put"
PIECES, DATA = b"\x12", b"\x1a"  # PutRequest.pieces and MovedPiece.data, as bytes that follow.


class MoveTarget:
    """Calls of one target; each raises PacelineError if it refuses, or does not answer."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self._channel = credentials.channel(address)
        self._stub = standby_pb2_grpc.StandbyStub(self._channel)
        self._put = self._channel.unary_unary(PUT, None, pb.PutReply.FromString)

    def offer(self, offer: pb.OfferRequest) -> pb.OfferReply:
        """Asks it to take a shard."""
        return self._call(self._stub.Offer, offer)

    def put(self, move: str, pieces: Iterable[JournalPiece], more: bool) -> None:
        """Sends pieces, and returns once they are there.

        Args:
            more: Whether they count together with those of the next call.
        """
        self._call(self._put, encoded(move, pieces, more), PUT_TIMEOUT_S)

    def prepare(self, move: str, spans: Iterable[SentSpan]) -> None:
        """Makes it compare all spans, and record that the move is complete."""
        request = pb.PrepareMoveRequest(id=move)
        for sent in spans:
            span = sent.span
            request.parts.add(
                path=span.path, offset=span.offset, nbytes=span.nbytes, digest=sent.digest
            )
        self._call(self._stub.Prepare, request)

    def followed(self, move: str, epoch: int) -> None:
        """Notes that it has everything: from now on it may be promoted.

        Args:
            epoch: Epoch of the claim that names it as the standby; 0: there is no register.
        """
        self._call(self._stub.Followed, pb.FollowedRequest(id=move, epoch=epoch))

    def sign(self, move: str, epoch: int) -> None:
        """Shows it that the shard's process lives."""
        self._call(self._stub.Followed, pb.FollowedRequest(id=move, epoch=epoch), SIGN_TIMEOUT_S)

    def release(self) -> bool:
        """Makes it forget the shard; returns whether it serves it instead."""
        return self._call(self._stub.Release, pb.ReleaseStandbyRequest(), RELEASE_TIMEOUT_S).serves

    def begin(self, move: str) -> None:
        """Makes it serve; may be repeated."""
        self._call(self._stub.Begin, pb.BeginMoveRequest(id=move))

    def _call(
        self, method: Callable[..., Reply], request: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Reply:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def encoded(move: str, pieces: Iterable[JournalPiece], more: bool) -> bytes:
    """Returns a PutRequest as bytes.

    Protobuf copies a large field several times on its way there, for a good part of its time on a
    link of 1 Gbit/s. So the data of pieces are put in between here.
    """
    parts = [pb.PutRequest(id=move, more=more).SerializeToString()]
    for piece in pieces:
        head = pb.MovedPiece(
            path=piece.path,
            offset=piece.offset,
            size=piece.size,
            reserved=piece.reserved,
            gone=piece.is_gone,
        ).SerializeToString()
        head += DATA + _varint(len(piece.data))
        parts += [PIECES, _varint(len(head) + len(piece.data)), head, piece.data]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Returns a number as protobuf has it: 7 bits a byte, the lowest first."""
    found = bytearray()
    while number >= MORE:
        found.append(number % MORE | MORE)
        number //= MORE
    return bytes([*found, number])
