"""Moves a shard to another process: copies it slice by slice, pauses it, and gives it away.

From its copy on, each change of a slice is sent before it is answered (stream.py), so nothing but
the newest changes is left for the pause.

The decisions are in handover.py. The shard's process does the rest (`Host`): it stops and resumes
the answers to workers, and passes later calls on once the shard has moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from pscore.errors import ConfigError, PacelineError, TransportError
from pscore.net import wire
from pscore.net.credentials import Credentials
from pscore.observe.boot import boot_id
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.durability.journal_dir import FORMAT
from psserver.durability.sealed import read_json, write_json
from psserver.standby.handover import Giver, Giving
from psserver.standby.parting import AGAIN_S, Parting, PartingByPerson, PartingByRegister
from psserver.standby.pieces import GIVEN, REGISTER, STANDBY, SentSpan
from psserver.standby.stream import JournalStream, Sender
from psserver.standby.succession import Claim
from psserver.standby.target import MoveTarget

log = structlog.get_logger()
RETRY_S = 3.0  # Before a standby that was away is asked again.
FAILOVER_S = 5.0  # Of a process that the shard moves to, where a register decides.
FLUSH_S = 30.0  # Longest wait until the target has all changes.
MBIT_NBYTES = 125_000
UNDER_WAY = (Giver.COPYING, Giver.FOLLOWED, Giver.FROZEN, Giver.GIVEN)
LEAVING = (*UNDER_WAY, Giver.MOVED)  # Phases of a shard that is to have no standby.
SIGNS = 4  # Signs of life within the silence after which a standby takes over.


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """A wish of a person.

    Attributes:
        to: The process that gets the shard, or is to be its standby.
        mbit: The most Mbit/s for the copy; 0: no limit.
        stays: Whether that is to be a standby, and the shard stays.
        same_host: Whether a standby may be on the host of this process.
        register: Place of the claims by which a standby takes over; empty: a person promotes it.
        failover_s: Seconds of silence after which it does.
    """

    to: str
    mbit: int = 0
    stays: bool = False
    same_host: bool = False
    register: str = ""
    failover_s: float = 0.0


class FirstCopy(Protocol):
    """A slice that joins the stream."""

    async def send(self) -> int:
        """Sends it, and from then on all its changes; returns its bytes once they are there."""


class Followable(Protocol):
    """All that another process needs to follow the shard."""

    def follow(self, send: Sender, failed: Callable[[], None]) -> JournalStream:
        """Opens a stream of all changes of small files and new tables."""

    def slices(self, stream: JournalStream) -> Iterable[FirstCopy]:
        """Yields the slices that are there, which join the stream one by one."""

    def unfollow(self) -> None:
        """Ends the stream; may be called by any thread, and again."""

    def sent_spans(self) -> list[SentSpan]:
        """Returns all that counts, with its hashes; nothing may change the journals."""


class Host(Protocol):
    """The process that has the shard.

    Attributes:
        address: Its own.
    """

    address: str

    @property
    def followed(self) -> Followable | None:
        """The shard as another process follows it; None: it has no journals."""

    def offer(self) -> pb.OfferRequest:
        """Returns a description of the shard; raises a `PacelineError` if it cannot be moved."""

    def require_movable(self, boot: str) -> None:
        """Raises a `PacelineError` if a worker could not follow to a machine with this boot."""

    def require_apart(self, boot: str) -> None:
        """Raises a `PacelineError` if a machine with this boot is the one of this process."""

    async def announce(self, address: str) -> None:
        """Names the next address, and waits until workers and menders know it."""

    async def freeze(self) -> None:
        """Ends the answers to workers; returns when nothing changes the journals any more."""

    async def thaw(self) -> None:
        """Resumes them."""

    async def fence(self) -> None:
        """Ends the answers to workers for good; work that waits in the queues is dropped."""

    async def renew(self) -> None:
        """Gives the shard another number, and waits until all live workers know it."""

    def reopen(self) -> None:
        """Resumes the jobs of a former process, and answers workers."""

    def show_moved(self, address: str) -> None:
        """Passes later calls on to `address`."""


class Mover:
    """The moves of one shard.

    Attributes:
        giving: The decisions.
        order: The move under way, or the last one.
        problem: Why the last move was given up; empty if it was not.
        pause_s: Length of its pause; 0 before its end.
    """

    def __init__(
        self, folder: Path | None, host: Host, credentials: Callable[[], Credentials]
    ) -> None:
        """Continues the move that a former process has decided, if there is one.

        Args:
            folder: Folder of the journals; None: there are none, and the shard cannot be moved.
            credentials: Returns the token for everything.
        """
        self._folder, self._host, self._credentials = folder, host, credentials
        given, standby = mark_in(folder, GIVEN), mark_in(folder, STANDBY)
        has_standby = bool(standby.get("id"))  # Else it is wanted, and was away.
        self.giving = Giving.resumed(is_given=bool(given), has_standby=has_standby)
        mark = given or standby
        self._move = mark.pop("id", "")
        self.order = order_of(mark)
        self._parting = self._new_parting("")
        self._stream: JournalStream | None = None
        self._stays = False  # Whether the target is to be a standby.
        self._wish = MoveOrder(to="") if given else self.order  # If it stays: for a standby.
        self._is_offered = False  # Whether the target has answered.
        self._is_near = False  # Whether it is on this process's machine.
        self._is_closed = False  # Whether answers have ended until it is known who has the shard.
        self._is_standing = False  # Whether the target is a standby, and workers know it.
        self._may_serve = False  # Whether the target may have been promoted.
        self._wakes = asyncio.Event()  # Set when a standby is to have the shard, or is away.
        self._loop: asyncio.AbstractEventLoop | None = None  # Runs the tasks, from `start` on.
        self.problem, self.pause_s = "", 0.0
        self._said = ""  # The problem that was logged last, of this wish for a standby.
        self._task: asyncio.Task[None] | None = None

    @property
    def _followed(self) -> Followable:
        assert self._host.followed is not None  # No other shard moves.
        return self._host.followed

    def start(self, order: MoveOrder) -> None:
        """Begins to move the shard, or to give it a standby; an order given again changes nothing.

        Raises:
            PacelineError: It is being moved otherwise, has been, or cannot be moved.
        """
        is_leaving = not self._stays and self.giving.phase in LEAVING
        is_going = is_leaving and order.to == self.to and not order.stays
        if is_going or (order == self.order and self.giving.phase in UNDER_WAY):
            return
        has_standby = self._stays and self.giving.phase is not Giver.SERVING
        if has_standby and order.to == self.to and not order.stays:
            self._stays = False
            self._wakes.set()
            return
        if has_standby and self._is_offered:
            raise ConfigError(
                f"the shard has a standby at {self.to}: `psserver drain` moves it there, and "
                "`psserver standby --withdraw` ends that"
            )
        offer, credentials = self._host.offer(), self._credentials()
        if has_standby:
            self._end_try()
        self.giving.start()
        self._move = offer.id = secrets.token_hex(8)
        self._stays, self._may_serve = order.stays, False
        self._is_offered = self._is_near = False
        self._wakes.clear()
        if order != self._wish:
            self._said = ""
        if order.stays:
            self._wish = order
        else:
            self._wakes.set()
        self._loop = asyncio.get_running_loop()
        self.order, self.problem, self.pause_s = order, "", 0.0
        self._parting = self._new_parting(self._host.address)
        run = self._run(offer, MoveTarget(order.to, credentials))
        self._task = asyncio.create_task(run)

    def withdraw(self) -> None:
        """Ends the wish for a standby; one that is there forgets the shard, unless it serves.

        Raises:
            ConfigError: There is no such wish.
            OSError: That cannot be recorded; the wish stays.
        """
        if not self._wish.stays or self.giving.phase in (Giver.GIVEN, Giver.MOVED):
            raise ConfigError("no standby of this shard is wanted")
        assert self._folder is not None
        if self._may_serve or self.giving.phase is Giver.ASKING:  # It has to be asked, also later.
            write_json(self._folder / STANDBY, {**self._mark, "stays": False})
            self._wish = MoveOrder(to="")
            self._wakes.set()
            return
        (self._folder / STANDBY).unlink(missing_ok=True)
        self._wish = MoveOrder(to="")
        if self._is_offered and self._stays and self.giving.phase is not Giver.SERVING:
            self._followed.unfollow()  # Its task finds that, and gives up.
        elif self._stays:
            self._end_try()
            self._stays = False

    def _end_try(self) -> None:
        """Ends a try to get a standby, which takes long if its machine is lost, or further ones."""
        assert self._task is not None
        self._task.cancel()
        if self.giving.phase is not Giver.SERVING:
            self.giving.give_up()

    def _new_parting(self, source: str) -> Parting:
        """Returns how a standby would part; a shard that is in a register stays there."""
        order = self.order
        place = order.register or (
            "" if order.stays else str(mark_in(self._folder, REGISTER).get("register", ""))
        )
        if not place or self._folder is None:
            return PartingByPerson(order.to, self._credentials, lambda: self._host.renew())
        own = (source, self._move, order.to)
        return PartingByRegister(self._folder, place, order.failover_s or FAILOVER_S, *own)

    @property
    def to(self) -> str:
        """Where the shard is moved, or was last."""
        return self.order.to

    @property
    def phase(self) -> str:
        """The phase, for people: a standby is followed once workers know it."""
        is_early = self._stays and not self._is_standing and self.giving.phase is Giver.FOLLOWED
        return (Giver.COPYING if is_early else self.giving.phase).value

    @property
    def has_standby(self) -> bool:
        """Whether the shard is to have a standby."""
        return self._stays

    @property
    def shares_memory(self) -> bool:
        """Whether new workers may share memory: they could not follow to another machine."""
        is_leaving = self.giving.phase in (Giver.COPYING, Giver.FOLLOWED)
        return self._is_near if is_leaving else self.order.same_host or not self._stays

    @property
    def claim(self) -> Claim | None:
        """The newest claim in a register that is known here."""
        return self._parting.claim

    def restart(self) -> None:
        """Forgets that the shard was given away: it has come back."""
        self.giving, self._move = Giving.resumed(is_given=False), ""
        self._stays, self.order = False, MoveOrder(to="")
        self._wish = self.order

    def resume(self) -> None:
        """Resumes where a former process had given the shard away, or had a standby."""
        self._parting = self._new_parting(self._host.address)
        if self.giving.phase is Giver.GIVEN:
            self._task = asyncio.create_task(self._finish(time.monotonic()))
        elif self.giving.phase is Giver.ASKING:
            self._task = asyncio.create_task(self._ask_standby())
        else:
            self._want_standby()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The move under way, or the last one."""
        return self._task

    @property
    def _mark(self) -> dict[str, object]:
        return {**asdict(self.order), "id": self._move}

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the move under way, or the last one, has sent."""
        return 0 if self._stream is None else self._stream.sent_nbytes

    async def _run(self, offer: pb.OfferRequest, target: MoveTarget) -> None:
        began_s = 0.0
        # The register is to know the process that gets the shard before that serves.
        is_claimed = isinstance(self._parting, PartingByRegister)
        try:
            if is_claimed:
                await self._parting.prepare(offer)
            reply = await asyncio.to_thread(target.offer, offer)
            self._is_offered, self._is_near = True, reply.boot == boot_id()
            self._host.require_movable(reply.boot)
            if self._stays and not self.order.same_host:
                self._host.require_apart(reply.boot)
            await self._copy(target, self.order.mbit)
            if self._stays or is_claimed:
                await self._stand(target, reply.boot)
            await self._announce(reply.boot)
            self.giving.freeze()
            began_s = time.monotonic()
            await self._give(target)
        except (PacelineError, OSError) as problem:
            self.problem = str(problem) or type(problem).__name__
            if not self._stays or self.problem != self._said:  # It is tried again and again.
                log.error(
                    "another process does not follow any more", to=self.to, reason=self.problem
                )
            self._said = self.problem
            self._is_standing = False
            if self.giving.phase is Giver.FROZEN:  # Workers are to hear what comes now.
                await self._host.thaw()
            if self._may_serve and not await self._part():
                await self._lose()
                return
            await self._go_on_alone()
            return
        finally:
            target.close()
        self._followed.unfollow()
        self.giving.give()
        await self._finish(began_s)

    async def _announce(self, boot: str) -> None:
        """Names the target to workers; those that have joined meanwhile must reach it too."""
        await self._host.announce(self.to)
        self._host.require_movable(boot)

    async def _go_on_alone(self) -> None:
        self._followed.unfollow()
        await self._host.announce("")
        if self._is_closed:
            self._is_closed = False
            await self._host.thaw()
        self.giving.give_up()
        self._want_standby()

    def _want_standby(self) -> None:
        """Tries to get the standby that a person wants, also after another order was given up."""
        self._stays = self._wish.stays
        if self._stays:
            self._task = asyncio.create_task(self._follow_again(self._wish))

    async def _follow_again(self, wish: MoveOrder) -> None:
        """Tries to get the standby back, again and again, until there is another order."""
        own = asyncio.current_task()
        while True:
            await asyncio.sleep(RETRY_S)
            if self._task is not own:
                return
            try:
                self.start(wish)
            except PacelineError as problem:
                self.problem = str(problem)
            else:
                return

    # ----- a standby

    async def _stand(self, target: MoveTarget, boot: str) -> None:
        """Keeps the target as a standby, until the shard is to move there.

        Raises:
            PacelineError: It does not follow any more.
        """
        assert self._folder is not None
        await self._announce(boot)
        write_json(self._folder / STANDBY, self._mark)
        self._may_serve = True  # From here on a failure of the stream is left to this task.
        self._require_stream()
        await self._parting.pair()
        epoch = 0 if self.claim is None else self.claim.epoch
        await asyncio.to_thread(target.followed, self._move, epoch)
        self._is_standing, self._said = True, ""
        log.info("the shard has a standby", standby=self.to)
        await self._await_wake(partial(target.sign, self._move, epoch))
        self._is_standing = False
        self._require_stream()
        if self._stays and not self._wish.stays:
            raise ConfigError("no standby is wanted any more")

    async def _await_wake(self, sign: Callable[[], None]) -> None:
        """Waits until the standby is to have the shard, or is away.

        Args:
            sign: Shows the standby that this process lives, also while large changes are sent.
        """
        sign_s = self.order.failover_s / SIGNS if self.order.register else None
        while not self._wakes.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakes.wait(), sign_s)
                return
            with contextlib.suppress(PacelineError):  # The stream will notice it.
                await asyncio.to_thread(sign)

    def _require_stream(self) -> None:
        assert self._stream is not None
        if self._stream.problem:
            raise TransportError(self._stream.problem)

    def _note_failed(self) -> None:
        """Ends the stream, or wakes the task if the target may have been promoted; any thread."""
        if self._may_serve:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._wakes.set)
        else:
            self._followed.unfollow()

    async def _part(self) -> bool:
        """Makes sure that the standby does not serve, nor will; returns False if it does.

        Nothing is answered meanwhile.
        """
        assert self._folder is not None
        if not await self._parting.part(self._close):
            return False
        with contextlib.suppress(OSError):  # Then the next process asks as this one did.
            if self._wish.stays:
                write_json(self._folder / STANDBY, asdict(self._wish))
            else:
                (self._folder / STANDBY).unlink(missing_ok=True)
        self._may_serve = False
        return True

    async def _close(self) -> None:
        if self.giving.phase is not Giver.ASKING:  # Then nothing is open yet.
            self._is_closed = True
            await self._host.fence()

    async def _lose(self) -> None:
        """Ends to serve: the standby was promoted."""
        assert self._folder is not None
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # Then the next process asks the standby again.
            write_json(self._folder / GIVEN, self._mark)
        await self._host.fence()
        self._followed.unfollow()
        self._stays = False
        self.giving.lose()
        await self._finish(began_s)

    async def _ask_standby(self) -> None:
        """Serves again after a kill, unless the standby was promoted meanwhile."""
        if not await self._part():
            await self._lose()
            return
        self._host.reopen()
        self.giving.give_up()
        self._want_standby()

    # ----- the copy, and the end

    async def _copy(self, target: MoveTarget, mbit: int) -> None:
        """Sends all slices, one after the other; each is followed from then on."""
        began_s, nbytes = time.monotonic(), 0
        send = partial(target.put, self._move)
        self._stream = stream = self._followed.follow(send, self._note_failed)
        for one in self._followed.slices(stream):
            nbytes += await one.send()
            if mbit:
                due_s = began_s + nbytes / (mbit * MBIT_NBYTES)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await self._flush(stream)
        stream.is_whole = True
        self.giving.copied()

    async def _flush(self, stream: JournalStream) -> None:
        if not await asyncio.to_thread(stream.flush, FLUSH_S):
            raise TransportError(stream.problem or "the changes of the shard do not arrive in time")

    async def _give(self, target: MoveTarget) -> None:
        """Sends the newest changes; from the mark on the shard is the target's, for good."""
        assert self._folder is not None
        assert self._stream is not None
        await self._host.freeze()
        await self._flush(self._stream)
        spans = await asyncio.to_thread(self._followed.sent_spans)
        await asyncio.to_thread(target.prepare, self._move, spans)
        write_json(self._folder / GIVEN, self._mark)
        with contextlib.suppress(OSError):  # It counts for nothing beside the other mark.
            (self._folder / STANDBY).unlink(missing_ok=True)

    async def _finish(self, began_s: float) -> None:
        """Repeats `begin` until the target answers, and shows workers where the shard is.

        The register learns of it afterwards: the claim there lets nobody else have the shard.
        """
        said = ""
        while True:
            try:
                target = MoveTarget(self.to, self._credentials())
                try:
                    await asyncio.to_thread(target.begin, self._move)
                    self._host.show_moved(self.to)
                    break
                finally:
                    target.close()
            except (PacelineError, OSError) as problem:
                if str(problem) != said:
                    said = str(problem)
                    log.error("the shard was given away, and waits there", to=self.to, reason=said)
            await asyncio.sleep(AGAIN_S)
        self.pause_s = time.monotonic() - began_s
        await self._parting.give()
        self.giving.begun()
        log.warning(
            "shard moved; this process passes on what still comes, until it is stopped",
            to=self.to,
            pause_s=round(self.pause_s, 3),
            sent_nbytes=self.sent_nbytes,
        )


def mark_in(folder: Path | None, name: str) -> dict[str, str]:
    """Returns a mark beside the journals; empty if there is none.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    if folder is None or not (folder / name).exists():
        return {}
    return {key: str(value) for key, value in read_json(folder / name).items()}


def order_of(mark: Mapping[str, str]) -> MoveOrder:
    """Returns the order in a mark, as far as it says one."""
    return MoveOrder(
        to=mark.get("to", ""),
        stays=mark.get("stays") == "True",
        same_host=mark.get("same_host") == "True",
        register=mark.get("register", ""),
        failover_s=float(mark.get("failover_s", "0")),
    )


def described(shard: int, num_shards: int, cluster: str) -> pb.OfferRequest:
    """Returns the part of an offer that both sides must agree on."""
    return pb.OfferRequest(
        shard=shard,
        num_shards=num_shards,
        cluster=cluster,
        protocol=wire.PROTOCOL,
        journal_format=FORMAT,
    )
