"""The service by which a shard moves: `psserver drain` and the two processes call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from pscore.errors import ConfigError, LimitError, PacelineError, RemoteProtocolError
from pscore.net.addresses import parse_addresses
from pscore.observe.boot import boot_id
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from pscore.table_spec import TableSpec
from psserver.engine.engine import Engine
from psserver.standby.handover import Giver, Taker, Taking
from psserver.standby.heir import Heir
from psserver.standby.mover import MoveOrder, Mover
from psserver.standby.pieces import ArrivingJournals, SentSpan
from psserver.standby.spans import JournalPiece, Span
from psserver.standby.succession import Claim
from psserver.stores import kind_of

if TYPE_CHECKING:
    from psserver.service.control import Context

log = structlog.get_logger()
FAILOVER_S_MIN, FAILOVER_S_MAX = 0.1, 3600.0
SILENT_S = 5.0  # After so long without a sign of life a standby may be promoted.


class StandbyServicer(standby_pb2_grpc.StandbyServicer):
    """The moves of one shard, away and here.

    Attributes:
        taking: The decisions about the shard that moves here.
        num_heard: Signs of life of the process that has the shard.
        claim: The claim by which this process took the shard over; None: it has not.
        task: Waits for the silence of the process that has the shard; None: nobody does.
    """

    def __init__(
        self,
        engine: Engine,
        mover: Mover,
        incoming: ArrivingJournals | None,
        own: Callable[[], pb.OfferRequest],
        take_over: Callable[[], bool],
        admit: Callable[[str], None],
    ) -> None:
        """Serves `engine`.

        Args:
            incoming: Where a shard that moves here arrives; None: there are no journals.
            own: Returns a description of this process, which must be that of the other.
            take_over: Serves from the journals that have arrived.
            admit: Admits workers, or refuses them for a reason.
        """
        self._engine, self._mover, self._incoming = engine, mover, incoming
        self._own, self._take_over, self._admit = own, take_over, admit
        self._waiting: list[JournalPiece] = []
        self._heard_s = 0.0  # Time of the last pieces.
        self.num_heard = 0
        self.claim: Claim | None = None
        self._heir: Heir | None = None
        self.task: asyncio.Task[None] | None = None
        prepared = {} if incoming is None else incoming.prepared
        taken = {} if incoming is None else incoming.taken
        self._mark = prepared or taken
        self.taking = Taking.resumed(str(prepared.get("id", "")), str(taken.get("id", "")))

    async def Move(self, request: pb.MoveRequest, context: Context) -> pb.MoveReply:
        """Begins to move the shard, or gives up its standby, or answers how far that is."""
        mover = self._mover
        if request.withdraws:
            try:
                mover.withdraw()
            except OSError as problem:
                raise LimitError(f"the standby is still wanted: {problem}") from problem
        self.taking.is_ending = self.taking.is_ending or request.ends
        if request.to:
            addresses = parse_addresses(request.to)
            if len(addresses) != 1:
                raise ConfigError(f"a shard moves to one address, and {request.to!r} names several")
            if request.register and not FAILOVER_S_MIN <= request.failover_s <= FAILOVER_S_MAX:
                raise ConfigError(f"a standby cannot take over after {request.failover_s} s")
            order = MoveOrder(
                to=addresses[0],
                mbit=request.mbit,
                stays=request.stays,
                same_host=request.same_host,
                register=request.register,
                failover_s=request.failover_s,
            )
            mover.start(order)
        return pb.MoveReply(
            phase=mover.phase,
            to=mover.to,
            sent_nbytes=mover.sent_nbytes,
            problem=mover.problem,
            pause_s=mover.pause_s,
            table_nbytes=self._engine.shard.table_nbytes,
            taking=self.taking.phase.value,
            num_live=self._num_live(),
        )

    def _num_live(self) -> int:
        with self._engine.lock:
            return sum(len(job.membership.live()) for job in self._engine.shard.jobs.values())

    async def Offer(self, request: pb.OfferRequest, context: Context) -> pb.OfferReply:
        """Begins to take a shard."""
        if self._incoming is None:
            raise ConfigError("this process has no journals (--durability memory)")
        if self._mover.giving.phase not in (Giver.SERVING, Giver.GIVEN, Giver.MOVED):
            raise ConfigError("this process has the shard itself: name an empty one elsewhere")
        own = self._own()
        for name in ("shard", "num_shards", "cluster", "protocol", "journal_format"):
            theirs, ours = getattr(request, name), getattr(own, name)
            if theirs != ours:
                raise ConfigError(
                    f"the shard that is to move has {name} {theirs!r}, this process has {ours!r}: "
                    "start it with the same --shards, --shard-index and --cluster, and a version "
                    "with the same protocol and journal format"
                )
        mark = {"id": request.id, "instance": request.instance, "source": request.source}
        former, self._mark = self._mark, mark
        if request.register:
            mark |= {"register": request.register, "failover_s": request.failover_s}
        heir = self._new_heir()
        try:
            if heir is not None:
                await asyncio.to_thread(heir.require, request.holder, request.epoch)
            self._start_to_take(request)
        except PacelineError:
            self._mark = former
            raise
        self._heir = heir
        try:
            self._incoming.start()
        except OSError as problem:
            raise LimitError(f"no room for the journals of a shard: {problem}") from problem
        self._waiting = []
        await asyncio.to_thread(self._warm_up, request.tables)
        if former.get("source") != request.source:  # It asks again and again while it is refused.
            log.info("a shard moves here", source=request.source)
        return pb.OfferReply(boot=boot_id())

    def _start_to_take(self, request: pb.OfferRequest) -> None:
        with self._engine.lock:
            self._engine.shard.require_memory("a shard that moves here", request.table_nbytes)
            self.taking.offer(request.id, has_jobs=bool(self._engine.jobs))

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
        self._hear(request.id)
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

    def _hear(self, move: str) -> None:
        """Notes that the shard's process lives; raises RemoteProtocolError for another move."""
        self.taking.require(move)
        self._heard_s = self._engine.now()
        self.num_heard += 1

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
        self.taking.require(request.id)
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
        self.taking.require_staying()  # Else the end would find the shard here.
        self.taking.prepare(request.id)
        return pb.PrepareMoveReply()

    async def Followed(self, request: pb.FollowedRequest, context: Context) -> pb.FollowedReply:
        """Notes that the shard is complete here: from now on this process may be promoted.

        Each further call shows that the shard's process lives.
        """
        self._hear(request.id)
        if self.is_standby:
            return pb.FollowedReply()
        self.taking.follow(request.id)
        self._mark |= {"standby": True, "epoch": request.epoch}
        if self._heir is not None:
            self._heir.known = request.epoch
        self._watch()
        self._admit(f"it is the standby of {self.source}")
        log.info("this process is a standby", source=self._mark.get("source"))
        return pb.FollowedReply()

    async def Release(
        self, request: pb.ReleaseStandbyRequest, context: Context
    ) -> pb.ReleaseStandbyReply:
        """Forgets a shard that has moved or moves here, unless it is served."""
        self.drop()
        return pb.ReleaseStandbyReply(serves=self.taking.phase is Taker.SERVING)

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteReply:
        """Serves in the place of the shard's process, which sends nothing any more."""
        was_standby = bool(self._mark.get("standby"))
        if was_standby and self.taking.phase is Taker.SERVING and self._mover.giving.serves:
            return pb.PromoteReply(jobs=list(self._engine.jobs))  # The command is given again.
        self.taking.require_promotable(was_standby=was_standby)
        silent_s = self._engine.now() - self._heard_s
        source = self._mark.get("source")
        if silent_s < SILENT_S:
            raise ConfigError(
                f"the shard's process at {source} still sends: use `psserver drain`, or stop it"
            )
        if self._heir is not None:
            await self._heir.try_now(self.taking.id, "a person has promoted it")
            if self.taking.phase is not Taker.SERVING:
                raise ConfigError(f"it is {self.taking.phase.value} here; see the log")
        else:
            try:
                if self.taking.phase is Taker.FOLLOWING:  # Else a former try has been killed.
                    self.keep()
                self._begin()
            except OSError as problem:
                raise LimitError(f"no room to take the shard over: {problem}") from problem
        log.warning("standby promoted", source=source, silent_s=round(silent_s, 1))
        if lost := [name for name, _ in self._engine.shard.lifetimes.lost.values()]:
            raise ConfigError(f"jobs that cannot be continued: {', '.join(lost)}; see the log")
        return pb.PromoteReply(jobs=list(self._engine.jobs))

    @property
    def is_standby(self) -> bool:
        """Whether this process follows a shard, and has everything of it."""
        return self.taking.waits_for(self.taking.id)

    @property
    def source(self) -> str:
        """Address of the process that has the shard which moves here, or has had it."""
        return str(self._mark.get("source", ""))

    # ----- what a standby needs that takes over by itself (`Standing`)

    def resume(self) -> None:
        """Resumes the take-over that a former process has begun."""
        self._heir = self._new_heir()
        if self.is_standby:
            self._watch()
            self._admit(f"it is the standby of {self.source}")
        elif self.taking.phase is Taker.SERVING:
            self._confirm()

    def keep(self) -> None:
        """Ends to follow, and records that; raises OSError if there is no room."""
        assert self._incoming is not None
        self._incoming.complete(self._mark)
        self.taking.prepare(self.taking.id)

    def drop(self) -> None:
        """Forgets the shard."""
        was_standby = self.is_standby
        if not self.taking.release() and self._incoming is not None:
            self._waiting = []
            self._incoming.remove()
            if was_standby:
                self._admit("")

    def serve(self, claim: Claim) -> None:
        """Serves the shard; raises OSError if there is no room."""
        self.claim = claim
        self._begin()

    def _begin(self) -> None:
        """Serves from the journals; where that raises OSError, it may be tried again."""
        assert self._incoming is not None
        self._incoming.note_begun()
        self._take_over()
        self.taking.begin(self.taking.id)

    def _new_heir(self) -> Heir | None:
        mark, place = self._mark, str(self._mark.get("register", ""))
        if not place or self._incoming is None:
            return None
        after_s, source = float(str(mark["failover_s"])), str(mark["source"])
        heir = Heir(self, self._incoming.shard, place, after_s, source)
        heir.known = int(str(mark.get("epoch", 0)))
        return heir

    def _watch(self) -> None:
        if self._heir is not None and self.taking.waits_for(self.taking.id):
            self.task = asyncio.create_task(self._heir.watch(self.taking.id))

    def _confirm(self) -> None:
        if self._heir is not None:
            self.task = asyncio.create_task(self._heir.confirm(self.taking.id))

    async def Begin(self, request: pb.BeginMoveRequest, context: Context) -> pb.BeginMoveReply:
        """Serves from the journals."""
        taking = self.taking
        if taking.phase is Taker.PREPARED and taking.id == request.id:
            if self._engine.jobs:
                raise ConfigError("this process has jobs of its own")
            try:
                self._begin()
            except OSError as problem:
                raise LimitError(f"no room for the journals of a shard: {problem}") from problem
            self._confirm()
            log.warning("shard has moved here", source=self._mark.get("source"))
        taking.begin(request.id)
        return pb.BeginMoveReply()
