"""The process that is to take a shard, as the one that has it sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import grpc

from pscore.net.credentials import Credentials
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from psserver.standby.pieces import JournalPiece, SentFile

CALL_TIMEOUT_S = 30.0
UNDER_WAY_MAX = 8  # Pieces that are sent before the first is answered.
MBIT_NBYTES = 125_000


class MoveTarget:
    """Calls of one target."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Connects at the first call."""
        self.address = address
        self._channel = credentials.channel(address)
        self._stub = standby_pb2_grpc.StandbyStub(self._channel)

    def offer(self, offer: pb.OfferRequest) -> pb.OfferReply:
        """Asks it to take a shard.

        Raises:
            PacelineError: It refuses, or does not answer.
        """
        try:
            return self._stub.Offer(offer, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure

    def put(self, move: str, pieces: Iterable[JournalPiece], mbit: int = 0) -> int:
        """Sends pieces, several under way at once; returns their bytes.

        Args:
            move: The move.
            pieces: The pieces.
            mbit: The most Mbit/s; 0: no limit.

        Raises:
            PacelineError: It refuses, or does not answer.
        """
        calls: deque[grpc.CallFuture[pb.PutReply]] = deque()
        nbytes, began_s = 0, time.monotonic()
        try:
            for piece in pieces:
                request = pb.PutRequest(
                    id=move, path=piece.path, offset=piece.offset, data=piece.data
                )
                calls.append(self._stub.Put.future(request, timeout=CALL_TIMEOUT_S))
                nbytes += len(piece.data)
                if len(calls) >= UNDER_WAY_MAX:
                    calls.popleft().result()
                if mbit:
                    due_s = nbytes / (mbit * MBIT_NBYTES)
                    time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            for call in calls:
                call.result()
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure
        return nbytes

    def prepare(self, move: str, files: Iterable[SentFile]) -> None:
        """Makes it compare all files, and record that the move is complete.

        Raises:
            PacelineError: It refuses, or does not answer.
        """
        request = pb.PrepareMoveRequest(id=move)
        for file in files:
            request.files.add(path=file.path, nbytes=file.nbytes, digest=file.digest)
        try:
            self._stub.Prepare(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure

    def begin(self, move: str) -> None:
        """Makes it serve; may be repeated.

        Raises:
            PacelineError: It refuses, or does not answer.
        """
        try:
            self._stub.Begin(pb.BeginMoveRequest(id=move), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
