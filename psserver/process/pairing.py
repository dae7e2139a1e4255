"""Two places of one shard: the process that does not have it becomes the standby of the other one.

The shard begins at the first place. After it has moved to the second one, by `psserver drain` or
because the standby has taken over, the first place passes calls on and is the standby, and so on.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from pscore.errors import ConfigError, PacelineError
from pscore.net.credentials import Credentials
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from pscore.text import is_loopback
from psserver.durability.journal_dir import JournalDir
from psserver.durability.sealed import write_json
from psserver.engine.engine import Engine
from psserver.process.shard_plan import PairPlan
from psserver.standby.handover import Giving, Taking, is_free
from psserver.standby.pieces import GIVEN, REGISTER, STANDBY, TAKEN
from psserver.standby.registers import register_of
from psserver.standby.succession import left_to

log = structlog.get_logger()
ASK_S = 1.0
SETTLE_S = 15.0  # A process that has just given its shard away may be about to end.
ANSWER_S_MAX = 10.0
MARKS = (GIVEN, REGISTER, STANDBY, TAKEN)


class Pairing:
    """The wish of one place to be the standby of the other one, when it does not have the shard."""

    def __init__(
        self,
        plan: PairPlan,
        own: str,
        engine: Engine,
        journals: JournalDir,
        credentials: Callable[[], Credentials],
    ) -> None:
        """Asks nobody yet.

        Args:
            own: Address of this process, as the other place reaches it.
            credentials: Returns the token for everything.
        """
        self._plan, self._own = plan, own
        self._engine, self._journals, self._credentials = engine, journals, credentials

    async def keep(self, giving: Callable[[], Giving], taking: Callable[[], Taking]) -> None:
        """Asks the other place, again and again, while this one has no shard and is no standby."""

        def wants() -> bool:
            jobs, begins_here = bool(self._engine.jobs), self._plan.is_first
            return is_free(giving(), taking(), begins_here=begins_here, has_jobs=jobs)

        said = ""
        while True:
            await asyncio.sleep(ASK_S)
            if wants() and self._engine.jobs:
                await asyncio.sleep(SETTLE_S)
            if not wants():
                continue
            try:
                self._clear()
                await asyncio.to_thread(self._ask)
            except (PacelineError, OSError) as problem:
                if str(problem) != said:
                    said = str(problem)
                    log.warning("this is no standby yet", of=self._plan.other, reason=said)

    def _clear(self) -> None:
        """Frees what the shard has left here when it moved."""
        for name in list(self._engine.jobs):
            self._engine.forget(name, is_forced=True)
        for folder in self._journals.found():
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self) -> None:
        """Asks the other place for the shard's changes; raises a `PacelineError` if it refuses."""
        channel = self._credentials().channel(self._plan.other)
        wanted = pb.MoveRequest(to=self._own, stays=True, register=self._plan.register)
        wanted.same_host = is_loopback(self._own.rpartition(":")[0])  # It is meant, then.
        wanted.failover_s = self._plan.failover_s if self._plan.register else 0.0
        try:
            standby_pb2_grpc.StandbyStub(channel).Move(wanted, timeout=ANSWER_S_MAX)
        except grpc.RpcError as failure:
            raise error_of(failure, self._plan.other) from failure
        finally:
            channel.close()


def note_given(folder: Path, plan: PairPlan) -> None:
    """Records that the other place has the shard, where the journals that said so are lost.

    Raises:
        ConfigError: The register cannot be read, or its shard is neither new nor there.
    """
    has_any = any((folder / name).exists() for name in MARKS) or any(folder.glob("*/"))
    if has_any or not (plan.is_first and plan.register):
        return
    try:
        newest = register_of(plan.register, folder.name).newest()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot use the register at {plan.register}: {problem}") from problem
    there = left_to(newest, plan.other)
    if there is not None:
        write_json(folder / GIVEN, {"id": there.holder, "to": there.address})
