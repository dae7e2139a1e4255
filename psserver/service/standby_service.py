"""The service by which a shard moves: `psserver drain` and the two processes call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from pscore.errors import ConfigError, LimitError, RemoteProtocolError
from pscore.net.addresses import parse_addresses
from pscore.observe.boot import boot_id
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from pscore.table_spec import TableSpec
from psserver.engine.engine import Engine
from psserver.standby.handover import Taker, Taking
from psserver.standby.mover import Mover
from psserver.standby.pieces import ArrivingJournals, SentSpan
from psserver.standby.spans import JournalPiece, Span
from psserver.stores import kind_of

if TYPE_CHECKING:
    from psserver.service.control import Context

log = structlog.get_logger()


class StandbyServicer(standby_pb2_grpc.StandbyServicer):
    """The moves of one shard, away and here."""

    def __init__(
        self,
        engine: Engine,
        mover: Mover,
        incoming: ArrivingJournals | None,
        own: Callable[[], pb.OfferRequest],
        take_over: Callable[[], bool],
    ) -> None:
        """Serves `engine`.

        Args:
            engine: The shard.
            mover: Moves it away.
            incoming: Where a shard that moves here arrives; None: there are no journals.
            own: Returns a description of this process, which must be that of the other.
            take_over: Serves from the journals that have arrived.
        """
        self._engine, self._mover, self._incoming = engine, mover, incoming
        self._own, self._take_over = own, take_over
        self._waiting: list[JournalPiece] = []
        self._mark = {} if incoming is None else incoming.prepared
        taken = {} if incoming is None else incoming.taken
        self._taking = Taking.resumed(str(self._mark.get("id", "")), str(taken.get("id", "")))

    async def Move(self, request: pb.MoveRequest, context: Context) -> pb.MoveReply:
        """Begins to move the shard, or answers how far that is."""
        mover = self._mover
        if request.to:
            addresses = parse_addresses(request.to)
            if len(addresses) != 1:
                raise ConfigError(f"a shard moves to one address, and {request.to!r} names several")
            mover.start(addresses[0], request.mbit)
        return pb.MoveReply(
            phase=mover.giving.phase.value,
            to=mover.to,
            sent_nbytes=mover.sent_nbytes,
            problem=mover.problem,
            pause_s=mover.pause_s,
        )

    async def Offer(self, request: pb.OfferRequest, context: Context) -> pb.OfferReply:
        """Begins to take a shard."""
        if self._incoming is None:
            raise ConfigError("this process has no journals (--durability memory)")
        own = self._own()
        for name in ("shard", "num_shards", "cluster", "protocol", "journal_format"):
            theirs, ours = getattr(request, name), getattr(own, name)
            if theirs != ours:
                raise ConfigError(
                    f"the shard that is to move has {name} {theirs!r}, this process has {ours!r}: "
                    "start it with the same --shards, --shard-index and --cluster, and a version "
                    "with the same protocol and journal format"
                )
        with self._engine.lock:
            self._engine.shard.require_memory("a shard that moves here", request.table_nbytes)
            self._taking.offer(request.id, has_jobs=bool(self._engine.jobs))
        self._mark = {"id": request.id, "instance": request.instance, "source": request.source}
        self._incoming.start()
        self._waiting = []
        await asyncio.to_thread(self._warm_up, request.tables)
        log.info("a shard moves here", source=request.source)
        return pb.OfferReply(boot=boot_id())

    def _warm_up(self, tables: Sequence[str]) -> None:
        """Compiles the loops of tables, which would take a second at the first step otherwise."""
        for text in tables:
            try:
                spec = TableSpec.from_json(json.loads(text))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
                raise RemoteProtocolError(
                    f"a table of a shard that moves: {problem!r}"
                ) from problem
            kind_of(spec.content.name).warm_up(spec.content.optimizer(spec.optimizer))

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutReply:
        """Writes pieces, or keeps them in memory until those that they count together with come."""
        self._taking.require(request.id)
        self._waiting += [
            JournalPiece(
                path=piece.path,
                offset=piece.offset,
                data=piece.data,
                size=piece.size,
                reserved=piece.reserved,
                is_gone=piece.gone,
            )
            for piece in request.pieces
        ]
        if not request.more:
            pieces, self._waiting = self._waiting, []
            self._write(pieces)
        return pb.PutReply()

    def _write(self, pieces: Sequence[JournalPiece]) -> None:
        assert self._incoming is not None
        try:
            for piece in pieces:
                self._incoming.write(piece)
        except OSError as problem:
            raise LimitError(f"no room for the journals of a shard: {problem}") from problem

    async def Prepare(
        self, request: pb.PrepareMoveRequest, context: Context
    ) -> pb.PrepareMoveReply:
        """Compares all that counts, and records that it is complete."""
        self._taking.require(request.id)
        assert self._incoming is not None
        spans = [
            SentSpan(
                span=Span(path=part.path, offset=part.offset, nbytes=part.nbytes),
                digest=part.digest,
            )
            for part in request.parts
        ]
        try:
            await asyncio.to_thread(self._incoming.prepare, spans, self._mark)
        except OSError as problem:
            raise LimitError(f"no room for the journals of a shard: {problem}") from problem
        self._taking.prepare(request.id)
        return pb.PrepareMoveReply()

    async def Begin(self, request: pb.BeginMoveRequest, context: Context) -> pb.BeginMoveReply:
        """Serves from the journals."""
        taking = self._taking
        if taking.phase is Taker.PREPARED and taking.id == request.id:
            assert self._incoming is not None
            if self._engine.jobs:
                raise ConfigError("this process has jobs of its own")
            try:
                self._incoming.note_begun()
            except OSError as problem:
                raise LimitError(f"no room for the journals of a shard: {problem}") from problem
        if taking.begin(request.id):
            self._take_over()
            log.warning("shard has moved here", source=self._mark.get("source"))
        return pb.BeginMoveReply()
