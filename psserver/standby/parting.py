"""How a shard and its standby find out which of them has the shard: by a person, or a register."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from pscore.errors import ConfigError, PacelineError
from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.durability.sealed import read_json, write_json
from psserver.standby.pieces import REGISTER, TAKEN
from psserver.standby.registers import Register, register_of, settle
from psserver.standby.succession import Claim, alone, give, pair
from psserver.standby.target import MoveTarget

log = structlog.get_logger()
AGAIN_S = 0.2  # Before a call is repeated.
PART_S = 3.0  # Longest wait for a standby's answer before the shard goes on without it.
Step = Callable[[], Awaitable[None]]


class Parting(Protocol):
    """The end of a pair, as the process that has the shard decides it.

    Attributes:
        claim: The newest claim that is known here; None: nothing is claimed.
    """

    claim: Claim | None

    async def prepare(self, offer: pb.OfferRequest) -> None:
        """Writes into an offer what the standby has to know; raises a `PacelineError`."""

    async def pair(self) -> None:
        """Permits the standby to take the shard from now on; raises a `PacelineError`."""

    async def part(self, close: Step) -> bool:
        """Makes sure that the standby does not serve, nor will; returns False if it does.

        Args:
            close: Ends the answers to workers, where this may take long.
        """

    async def give(self) -> None:
        """Names the process that the shard was given to, for those who ask later."""


class PartingByPerson:
    """A standby that only a person promotes.

    If it cannot be asked, the shard gets another number: workers that know it join no process with
    the former one.
    """

    def __init__(self, to: str, credentials: Callable[[], Credentials], renew: Step) -> None:
        """Begins nothing.

        Args:
            to: The standby.
            credentials: Returns the token for everything.
            renew: Gives the shard another number, and waits until all live workers know it.
        """
        self._to, self._credentials, self._renew = to, credentials, renew
        self.claim: Claim | None = None

    async def prepare(self, offer: pb.OfferRequest) -> None:
        """Does nothing: the standby waits for a person."""

    async def pair(self) -> None:
        """Does nothing: likewise."""

    async def give(self) -> None:
        """Does nothing: nobody else asks."""

    async def part(self, close: Step) -> bool:
        """Asks the standby, and renews the shard's number if that does not answer."""
        deadline_s = time.monotonic() + PART_S
        while True:
            target = MoveTarget(self._to, self._credentials())
            try:
                return not await asyncio.to_thread(target.release)
            except (PacelineError, OSError) as problem:
                if time.monotonic() >= deadline_s and await self._goes_on(problem):
                    return True
            finally:
                target.close()
            await asyncio.sleep(AGAIN_S)

    async def _goes_on(self, problem: Exception) -> bool:
        """Renews the shard's number; returns False if that cannot be recorded."""
        reason = str(problem) or type(problem).__name__
        try:
            await self._renew()
        except OSError as full:  # The next process would have the former number.
            log.error("no answers: no standby, and no room", standby=self._to, reason=str(full))
            return False
        log.error("the shard goes on without it", standby=self._to, reason=reason)
        return True


class PartingByRegister:
    """A standby that takes over by itself, by a claim that only one of the two can write."""

    def __init__(
        self, folder: Path, place: str, failover_s: float, source: str, move: str, to: str
    ) -> None:
        """Asks nobody yet.

        Args:
            place: The register's.
            failover_s: Seconds of silence after which the standby tries to take over.
            source: Address of this process.
            to: Its address.
        """
        self._folder, self._place, self._failover_s = folder, place, failover_s
        self._source, self._move, self._to = source, move, to
        self._register: Register | None = None
        self._shard = folder.name
        self._holder, self._known = "", 0  # And the epoch of the newest claim that was seen.
        self.claim: Claim | None = None

    async def prepare(self, offer: pb.OfferRequest) -> None:
        """Claims the shard for this process alone, so that the standby can see that.

        Raises:
            ConfigError: The shard is another process's, or the register cannot be used.
        """
        await self._settle(self._alone("it is to get a standby"))
        if self.claim is None:
            raise ConfigError(
                f"the register at {self._place} says that another process has the shard: name "
                "another place if that is of a former cluster"
            )
        offer.register, offer.failover_s = self._place, self._failover_s
        offer.holder, offer.epoch = self._holder, self.claim.epoch

    async def pair(self) -> None:
        """Names the standby in the register.

        Raises:
            ConfigError: The shard is another process's, or the register cannot be used.
        """
        await self._settle(
            lambda newest: pair(newest, self._holder, self._source, self._move, self._to)
        )

    async def part(self, close: Step) -> bool:
        """Claims the shard for this process alone, or finds that the standby has it."""
        is_closed = False
        while True:
            asked = asyncio.create_task(self._settle(self._alone("the standby is away")))
            is_over, _ = await asyncio.wait([asked], timeout=PART_S)  # A file system may hang.
            problem = asked.exception() if is_over else TimeoutError(f"no answer for {PART_S:g} s")
            if problem is not None and not is_closed:
                log.error("no answers: neither standby nor register", reason=str(problem))
                await close()
                is_closed = True
            try:
                await asked
            except PacelineError:
                await asyncio.sleep(AGAIN_S)
            else:
                return self.claim is not None

    async def give(self) -> None:
        """Names the process that has the shard now, again and again until the register has it."""
        while True:
            try:
                await self._settle(lambda newest: give(newest, self._holder, self._move, self._to))
            except PacelineError as problem:
                log.error("the register does not know the move yet", reason=str(problem))
            else:
                return
            await asyncio.sleep(AGAIN_S)

    def _alone(self, reason: str) -> Callable[[Claim | None], Claim | None]:
        return lambda newest: alone(newest, self._holder, self._source, reason)

    async def _settle(self, decide: Callable[[Claim | None], Claim | None]) -> None:
        try:
            self.claim = await asyncio.to_thread(self._settle_now, decide)
        except (OSError, ValueError) as problem:
            reason = str(problem) or type(problem).__name__
            raise ConfigError(f"the register at {self._place}: {reason}") from problem

    def _settle_now(self, decide: Callable[[Claim | None], Claim | None]) -> Claim | None:
        if self._register is None:
            self._holder, self._known = name_in(self._folder, self._place)
            self._register = register_of(self._place, self._shard)
        claim = settle(self._register, decide, self._known)
        if claim is not None and claim.epoch > self._known:
            self._known = claim.epoch
            with contextlib.suppress(OSError):  # The next process knows an older one then.
                keep_name(self._folder, self._place, self._holder, self._known)
        return claim


def name_in(folder: Path, place: str) -> tuple[str, int]:
    """Returns the name of the process with these journals in registers, and keeps it.

    Args:
        place: The register that it uses from now on.

    Returns:
        The name, and the epoch of the newest claim that was seen in this register.

    Raises:
        OSError, ValueError: It cannot be read, or written.
    """
    holder, known = secrets.token_hex(8), 0
    for name, key in ((REGISTER, "holder"), (TAKEN, "id")):
        if (folder / name).exists():
            mark = read_json(folder / name)
            holder = str(mark[key])
            known = int(str(mark.get("epoch", 0))) if mark.get("register") == place else 0
            break
    keep_name(folder, place, holder, known)
    return holder, known


def keep_name(folder: Path, place: str, holder: str, epoch: int) -> None:
    """Keeps a process's name in a register, and the newest epoch it knows; raises OSError."""
    write_json(folder / REGISTER, {"register": place, "holder": holder, "epoch": epoch})
