"""Moves of this process's shard: the parts that need its sockets, its engine and its clock."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import structlog

from pscore.errors import ConfigError, LimitError, TransportError
from pscore.net.credentials import read_credentials
from pscore.observe.boot import boot_id
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.engine.resume import recover
from psserver.process.followed import FollowedShard
from psserver.process.pairing import Pairing, note_given
from psserver.service.signpost import Signpost
from psserver.service.standby_metrics import StandbyView
from psserver.service.standby_service import StandbyServicer
from psserver.standby.handover import Giver
from psserver.standby.mover import Mover, described
from psserver.standby.pieces import ArrivingJournals
from psserver.standby.stream import JournalStream
from psserver.standby.succession import Claim

if TYPE_CHECKING:
    from psserver.decisions.membership import Member
    from psserver.durability.journal_dir import JournalDir
    from psserver.engine.engine import Engine
    from psserver.process.shard_plan import ShardPlan
    from psserver.service.control import ControlServicer

log = structlog.get_logger()
POLL_S = 0.02
BEATS = 3  # Workers get so many intervals between heartbeats to learn the next address.
BEATS_A_LEASE = 5
MENDERS_S = 60.0  # Longest wait for the processes that restore lost jobs, in a long restore too.


class ShardMoves:
    """The moves of one shard, as its process makes them."""

    def __init__(
        self,
        plan: ShardPlan,
        engine: Engine,
        journals: JournalDir | None,
        took_over: Callable[[], None],
    ) -> None:
        """Continues a move that a former process has decided.

        Args:
            journals: Its journals; None: it has none.
            took_over: Called when the jobs of a shard that has moved here are resumed.
        """
        self._plan, self._engine, self._journals = plan, engine, journals
        self._took_over = took_over
        self._credentials = partial(read_credentials, token_file=plan.trust.token_file)
        folder = None if journals is None else journals.folder
        self._incoming = None if folder is None else ArrivingJournals(folder)
        self._pairing: asyncio.Task[None] | None = None
        if plan.pair is not None and folder is not None:
            note_given(folder, plan.pair)
        self.mover = Mover(folder, self, self._credentials)
        self.followed = None if journals is None else FollowedShard(engine, journals)
        # Holds calls, or passes them on.
        self.signpost = Signpost(self._await_kept, lambda: self.view.stands_by)
        self.is_frozen = False  # Whether nothing may change the shard, also not time.
        self.address = ""  # Address of this process, for its successor's log.
        self.stop_data: Callable[[], bool] = lambda: True
        self.start_data: Callable[[], None] = lambda: None
        self.control: ControlServicer | None = None
        self._servicer: StandbyServicer | None = None
        if not self.mover.giving.serves:
            self.is_frozen = True
            self.signpost.hold()

    def servicer(self) -> StandbyServicer:
        """Returns the service of these moves."""
        self._servicer = StandbyServicer(
            self._engine, self.mover, self._incoming, self._described, self.take_over, self._admit
        )
        return self._servicer

    def resume(self) -> None:
        """Resumes the moves that a former process has begun."""
        self.mover.resume()
        servicer, pair = self._servicer, self._plan.pair
        assert servicer is not None
        servicer.resume()
        if pair is not None and self._journals is not None:
            own = self.address
            pairing = Pairing(pair, own, self._engine, self._journals, self._credentials)
            kept = pairing.keep(lambda: self.mover.giving, lambda: servicer.taking)
            self._pairing = asyncio.create_task(kept)

    def check(self) -> None:
        """Raises what ended a task of a move, which only a bug can cause."""
        mine = None if self._servicer is None else self._servicer.task
        for task in (self.mover.task, mine, self._pairing):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    def take_over(self) -> bool:
        """Serves from the journals that have arrived; returns whether a move here had begun."""
        mark = None if self._incoming is None else self._incoming.begin()
        if mark is None:
            return False
        assert self._journals is not None
        assert self._incoming is not None
        self._journals.adopt(int(str(mark["instance"])))
        self._incoming.remove()
        self.mover.restart()
        self._admit("")
        self.reopen("here")
        return True

    @property
    def text(self) -> str:
        """How the move under way is, or the last one was; empty without one."""
        mover, servicer, claim, view = self.mover, self._servicer, self._claim, self.view
        epoch = f"; epoch {claim.epoch}: {claim.reason}" if claim else ""
        if servicer is not None and servicer.is_standby:
            return f"standby of {servicer.source}"
        if mover.giving.phase is Giver.SERVING:
            if mover.order.stays and not mover.has_standby:  # The claim's reason is an older one.
                return "no standby is wanted" + (f"; epoch {claim.epoch}" if claim else "")
            text = f"not moved to {mover.to}: {mover.problem}" if mover.problem else ""
            return f"{text}{epoch}".removeprefix("; ")
        lag = f", {view.lag_s:.3f} s behind" if view.is_in_sync else ""
        return f"{mover.phase}, to {mover.to}{lag}{epoch}"

    @property
    def view(self) -> StandbyView:
        """How the shard's standby is."""
        stream, claim = self._stream, self._claim
        return StandbyView(
            is_wanted=self.mover.has_standby,
            is_in_sync=self.mover.phase == Giver.FOLLOWED.value,
            lag_s=0.0 if stream is None else stream.lag_s,
            epoch=0 if claim is None else claim.epoch,
            stands_by=self._servicer is not None and self._servicer.is_standby,
            shares_memory=self.mover.shares_memory,
        )

    @property
    def _claim(self) -> Claim | None:
        mine = None if self._servicer is None else self._servicer.claim
        return self.mover.claim or mine

    # ----- what the mover needs (`Host`)

    def offer(self) -> pb.OfferRequest:
        """Returns a description of the shard; raises ConfigError if it cannot be moved."""
        engine = self._engine
        if self._journals is None:
            raise ConfigError("a shard without journals (--durability memory) cannot be moved")
        with engine.lock:
            exposed = sum(sum(job.exposed.values()) for job in engine.jobs.values())
            tables = [table for job in engine.shard.jobs.values() for table in job.tables.values()]
        if exposed:
            raise ConfigError(f"{exposed} slices are not journalled for lack of space: make room")
        offer = self._described()
        offer.instance, offer.table_nbytes = self._journals.instance, engine.shard.table_nbytes
        offer.source = self.address
        offer.tables[:] = dict.fromkeys(json.dumps(table.spec.to_json()) for table in tables)
        return offer

    def require_movable(self, boot: str) -> None:
        """Raises ConfigError for a move that a worker could not follow."""
        for job, member in self._live():
            plane = member.data_plane
            if plane == "grpc" or (plane == "local" and boot != boot_id()):
                raise ConfigError(
                    f"worker {member.rank} of job {job!r} uses data plane {plane!r}, which does "
                    "not reach another machine: end it first, or set PACELINE_DATA_PLANE=tcp"
                )

    def require_apart(self, boot: str) -> None:
        """Raises ConfigError for a standby that is lost with the shard."""
        if boot == boot_id():
            raise ConfigError(
                "the standby is on the shard's host, and would be lost with it: start it on "
                "another one (--same-host allows it, against the loss of the process only)"
            )

    async def announce(self, address: str) -> None:
        """Names the next address, and waits until live workers and menders know it.

        Raises:
            LimitError: A mender that still asks has not taken note of the address.
        """
        assert self.control is not None
        self.control.announce(address)
        beats_s = BEATS * self._engine.shard.lease_s / BEATS_A_LEASE
        begin_s = self._engine.now()
        while address:
            now_s = self._engine.now()
            live = {(job, member.incarnation) for job, member in self._live()}
            is_told = live <= self.control.told or now_s - begin_s >= beats_s
            is_noted = self.control.menders.know(address, now_s)
            if is_told and is_noted:
                return
            if not is_noted and now_s - begin_s >= MENDERS_S:
                raise LimitError(
                    f"the process that takes checkpoints has not noted for {MENDERS_S:g} s that "
                    f"this shard will be at {address}; its log (psserver logs, on the host of "
                    "shard 0) says what keeps it"
                )
            await asyncio.sleep(POLL_S)

    async def freeze(self) -> None:
        """Ends the answers to workers; returns when nothing changes the journals any more.

        Raises:
            LimitError: A connection does not end.
            TransportError: The other process does not follow any more.
        """
        self.signpost.hold()
        self.is_frozen = True
        if not await asyncio.to_thread(self.stop_data):
            raise LimitError("a data connection did not end in time")
        while self._engine.is_busy:
            stream = self._stream
            if stream is not None and stream.problem:
                raise TransportError(stream.problem)
            await asyncio.sleep(POLL_S / 10)

    async def fence(self) -> None:
        """Ends the answers to workers for good; work that waits in the queues is dropped."""
        self.signpost.hold()
        self.is_frozen = True
        await asyncio.to_thread(self.stop_data)

    async def renew(self) -> None:
        """Gives the shard another number, and waits until all live workers know it."""
        assert self._journals is not None
        assert self.control is not None
        self._journals.adopt(secrets.randbits(63))
        self.control.renew(self._journals.instance)
        while not {(job, one.incarnation) for job, one in self._live()} <= self.control.told:
            await asyncio.sleep(POLL_S)

    def reopen(self, where: str = "where it was") -> None:
        """Resumes the jobs of a former process, and answers workers."""
        self.signpost.release()
        self.is_frozen = False
        for name in recover(self._engine):
            log.warning(f"job continues {where}", job=name)
        self._took_over()

    async def thaw(self) -> None:
        """Resumes the answers to workers."""
        self.start_data()
        self.is_frozen = False
        self.signpost.release()

    def show_moved(self, address: str) -> None:
        """Passes later calls on to `address`."""
        self.signpost.show(address, self._credentials())

    @property
    def _stream(self) -> JournalStream | None:
        return None if self.followed is None else self.followed.stream

    def _admit(self, reason: str) -> None:
        if self.control is not None:
            self.control.closed = reason

    async def _await_kept(self) -> None:
        """Waits until another process that follows has all that was changed."""
        stream = self._stream
        if stream is not None and stream.is_whole:
            await asyncio.to_thread(stream.await_kept)

    def _described(self) -> pb.OfferRequest:
        shard = self._engine.shard
        return described(shard.index, shard.num_shards, self._plan.cluster)

    def _live(self) -> Iterator[tuple[str, Member]]:
        with self._engine.lock:
            found = [
                (job.name, job.membership.members[rank])
                for job in self._engine.shard.jobs.values()
                for rank in job.membership.live()
            ]
        yield from found
