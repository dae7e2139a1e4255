"""A standby that takes the shard over by itself, once the process that has it is silent."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

import structlog

from pscore.errors import ConfigError, PacelineError
from psserver.standby.handover import Taker, Taking
from psserver.standby.registers import Register, newest_in, register_of, settle
from psserver.standby.succession import Claim, take

log = structlog.get_logger()
LOOKS = 20  # Looks at the other process's sign of life within `failover_s`.


class Standing(Protocol):
    """The process that is the standby.

    Attributes:
        num_heard: Calls that the other process has made.
    """

    taking: Taking
    num_heard: int

    def keep(self) -> None:
        """Ends to follow, and records that; raises an `OSError` if there is no room."""

    def drop(self) -> None:
        """Forgets the shard."""

    def serve(self, claim: Claim) -> None:
        """Serves; raises an `OSError` if there is no room."""


class Heir:
    """The tries of a standby to get the shard.

    Silence is counted in looks, so that a standby which was stopped itself does not mistake that
    for the other's silence.

    Attributes:
        known: Epoch of the newest claim that is known to be in the register.
    """

    def __init__(
        self, standing: Standing, shard: str, place: str, failover_s: float, holder: str
    ) -> None:
        """Asks nobody yet.

        Args:
            standing: The standby's process.
            shard: Name of the shard in the register.
            place: The register's.
            failover_s: Seconds of silence after which it tries.
            holder: Address of the process that has the shard.
        """
        self._standing, self._shard, self._place = standing, shard, place
        self._failover_s, self._holder = failover_s, holder
        self.known = 0
        self._register: Register | None = None
        self._said = ""

    def require(self, holder: str, epoch: int) -> None:
        """Checks that the register is the one of the process that has the shard.

        Args:
            holder: That process's name.
            epoch: Epoch of its newest claim.

        Raises:
            ConfigError: It is not, or does not answer.
        """
        try:
            newest = self._open().newest()
        except (OSError, ValueError) as problem:
            raise ConfigError(f"the register at {self._place}: {problem}") from problem
        if newest is None or (newest.holder, newest.epoch) != (holder, epoch):
            raise ConfigError(
                f"{self._place} is not the same place here and for the shard's process: name one "
                "that both machines reach"
            )

    async def watch(self, move: str) -> None:
        """Waits for silence, then tries again and again, until this is no standby any more."""
        standing, looks, heard = self._standing, 0, -1
        while standing.taking.waits_for(move):
            await asyncio.sleep(self._failover_s / LOOKS)
            looks = looks + 1 if standing.num_heard == heard else 0
            heard = standing.num_heard
            if looks >= LOOKS:
                now = time.strftime("%H:%M:%S")
                await self.try_now(move, f"at {now} {self._holder} was silent {self._failover_s} s")

    async def try_now(self, move: str, reason: str) -> None:
        """Tries once."""
        standing, decide = self._standing, partial(take, heir=move, reason=reason)
        try:
            # Before this process gives up to follow.
            await asyncio.to_thread(lambda: newest_in(self._open(), self.known))
            if not standing.taking.waits_for(move):
                return
            if standing.taking.phase is Taker.FOLLOWING:
                standing.keep()
            claim = await asyncio.to_thread(settle, self._open(), decide, self.known)
            if not standing.taking.waits_for(move):
                return
            if claim is None:
                log.warning("the shard goes on without this standby")
                standing.drop()
            else:
                standing.serve(claim)
                log.warning("this standby takes over", epoch=claim.epoch, reason=reason)
        except (PacelineError, OSError, ValueError) as problem:
            self._say("the standby cannot take over yet", problem)

    async def confirm(self, move: str) -> None:
        """Writes that this process has got the shard by a move, until the register knows that.

        The process that gave it does so too, unless it is lost before.
        """
        decide = partial(take, heir=move, reason="it was moved")
        while True:
            try:
                await asyncio.to_thread(settle, self._open(), decide, self.known)
            except (PacelineError, OSError, ValueError) as problem:
                self._say("the register does not know the move yet", problem)
            else:
                return
            await asyncio.sleep(self._failover_s)

    def _say(self, text: str, problem: Exception) -> None:
        if str(problem) != self._said:
            self._said = str(problem)
            log.error(text, reason=self._said)

    def _open(self) -> Register:
        """Returns the register, which is opened once; raises ConfigError if it cannot be used."""
        if self._register is None:
            self._register = register_of(self._place, self._shard)
        return self._register
