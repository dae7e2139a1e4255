"""Moves a shard to another process: copies it slice by slice, pauses it, and gives it away.

From its copy on, each change of a slice is sent before it is answered (stream.py), so nothing but
the newest changes is left for the pause.

The decisions are in handover.py. The shard's process does the rest (`Host`): it stops and resumes
the answers to workers, and passes later calls on once the shard has moved.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from pscore.errors import PacelineError, TransportError
from pscore.net import wire
from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.durability.journal_dir import FORMAT
from psserver.durability.sealed import read_json, write_json
from psserver.standby.handover import Giver, Giving
from psserver.standby.pieces import GIVEN, SentSpan
from psserver.standby.stream import JournalStream, Sender
from psserver.standby.target import MoveTarget

log = structlog.get_logger()
AGAIN_S = 0.2  # Before `begin` is repeated.
FLUSH_S = 30.0  # Longest wait until the target has all changes.
MBIT_NBYTES = 125_000


class FirstCopy(Protocol):
    """A slice that joins the stream."""

    async def send(self) -> int:
        """Sends it, and from then on all its changes; returns its bytes once they are there."""


class Host(Protocol):
    """The process that has the shard."""

    def offer(self) -> pb.OfferRequest:
        """Returns a description of the shard; raises a `PacelineError` if it cannot be moved."""

    def require_movable(self, boot: str) -> None:
        """Raises a `PacelineError` if a worker could not follow to a machine with this boot."""

    def follow(self, send: Sender, failed: Callable[[], None]) -> JournalStream:
        """Opens a stream of all changes of small files and new tables."""

    def slices(self, stream: JournalStream) -> Iterable[FirstCopy]:
        """Yields the slices that are there, which join the stream one by one."""

    def unfollow(self) -> None:
        """Ends the stream; may be called by any thread, and again."""

    def sent_spans(self) -> list[SentSpan]:
        """Returns all that counts, with its hashes; nothing may change the journals."""

    async def announce(self, address: str) -> None:
        """Names the next address to all workers, and waits until they know it."""

    async def freeze(self) -> None:
        """Ends the answers to workers; returns when nothing changes the journals any more."""

    async def thaw(self) -> None:
        """Resumes them."""

    def show_moved(self, address: str) -> None:
        """Passes later calls on to `address`."""


class Mover:
    """The moves of one shard.

    Attributes:
        giving: The decisions.
        to: Where the shard is moved, or was last.
        problem: Why the last move was given up; empty if it was not.
        pause_s: Length of its pause; 0 before its end.
    """

    def __init__(
        self, folder: Path | None, host: Host, credentials: Callable[[], Credentials]
    ) -> None:
        """Continues the move that a former process has decided, if there is one.

        Args:
            folder: Folder of the journals; None: there are none, and the shard cannot be moved.
            host: The process that has the shard.
            credentials: Returns the token for everything.
        """
        self._folder, self._host, self._credentials = folder, host, credentials
        given = given_in(folder)
        self.giving = Giving.resumed(is_given=bool(given))
        self.to, self._move = given.get("to", ""), given.get("id", "")
        self._stream: JournalStream | None = None
        self.problem, self.pause_s = "", 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, to: str, mbit: int) -> None:
        """Begins to move the shard to `to`, with at most `mbit` Mbit/s before the pause.

        Raises:
            PacelineError: It is being moved, has been, or cannot be moved.
        """
        offer, credentials = self._host.offer(), self._credentials()
        self.giving.start()
        self._move = offer.id = secrets.token_hex(8)
        self.to, self.problem, self.pause_s = to, "", 0.0
        run = self._run(offer, mbit, MoveTarget(to, credentials))
        self._task = asyncio.get_running_loop().create_task(run)

    def restart(self) -> None:
        """Forgets that the shard was given away: it has come back."""
        self.giving, self.to, self._move = Giving.resumed(is_given=False), "", ""

    def resume(self) -> None:
        """Repeats `begin` where a former process had given the shard away."""
        if self.giving.phase is Giver.GIVEN:
            self._task = asyncio.get_running_loop().create_task(self._finish(time.monotonic()))

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The move under way, or the last one."""
        return self._task

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the move under way, or the last one, has sent."""
        return 0 if self._stream is None else self._stream.sent_nbytes

    async def _run(self, offer: pb.OfferRequest, mbit: int, target: MoveTarget) -> None:
        began_s = 0.0
        try:
            reply = await asyncio.to_thread(target.offer, offer)
            self._host.require_movable(reply.boot)
            await self._copy(target, mbit)
            await self._host.announce(self.to)
            self.giving.freeze()
            began_s = time.monotonic()
            await self._give(target)
        except (PacelineError, OSError) as problem:
            self.problem = str(problem) or type(problem).__name__
            log.error("a move is given up; the shard stays", to=self.to, reason=self.problem)
            self._host.unfollow()
            await self._host.announce("")
            if self.giving.phase is Giver.FROZEN:
                await self._host.thaw()
            self.giving.give_up()
            return
        finally:
            target.close()
        self._host.unfollow()
        self.giving.give()
        await self._finish(began_s)

    async def _copy(self, target: MoveTarget, mbit: int) -> None:
        """Sends all slices, one after the other; each is followed from then on."""
        began_s, nbytes = time.monotonic(), 0
        send = partial(target.put, self._move)
        self._stream = stream = self._host.follow(send, self._host.unfollow)
        for one in self._host.slices(stream):
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
        spans = await asyncio.to_thread(self._host.sent_spans)
        await asyncio.to_thread(target.prepare, self._move, spans)
        write_json(self._folder / GIVEN, {"to": self.to, "id": self._move})

    async def _finish(self, began_s: float) -> None:
        """Repeats `begin` until the target answers, and shows workers where the shard is."""
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
        self.giving.begun()
        log.warning(
            "shard moved; this process passes on what still comes, until it is stopped",
            to=self.to,
            pause_s=round(self.pause_s, 3),
            sent_nbytes=self.sent_nbytes,
        )


def given_in(folder: Path | None) -> dict[str, str]:
    """Returns the mark of a shard that was given away; empty if there is none.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    if folder is None or not (folder / GIVEN).exists():
        return {}
    return {name: str(value) for name, value in read_json(folder / GIVEN).items()}


def described(shard: int, num_shards: int, cluster: str) -> pb.OfferRequest:
    """Returns the part of an offer that both sides must agree on."""
    return pb.OfferRequest(
        shard=shard,
        num_shards=num_shards,
        cluster=cluster,
        protocol=wire.PROTOCOL,
        journal_format=FORMAT,
    )
