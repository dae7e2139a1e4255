"""Checks, as tests run, that a shard's state machines are touched only under its lock.

Every attribute of the machines, and of the objects that hold them, is looked up through a check of
the lock's
owner while `owned` is active. So a reader outside of the lock is found by being run once, however
seldom it would meet a change. An attribute that never changes in the life of an object may be read
by any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from psserver.decisions.barriers import Barriers
from psserver.decisions.job import Job, JobCounters, Life
from psserver.decisions.lifetime import Lifetimes
from psserver.decisions.membership import Member, Membership
from psserver.decisions.newcomers import Newcomers
from psserver.decisions.open_step import OpenStep
from psserver.decisions.open_steps import OpenSteps
from psserver.decisions.parking import Parking
from psserver.decisions.participants import TableParticipants
from psserver.decisions.progress import Progress
from psserver.decisions.shard import Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.slice_workers import SliceWorkers
from psserver.decisions.stalls import Stalls
from psserver.decisions.table import Table
from psserver.durability.recovery import JobRecorder, Recovery
from psserver.engine.barrier_waits import BarrierWaits
from psserver.engine.counters import Counters, Histogram
from psserver.engine.engine import Engine
from psserver.engine.requests import Requests
from psserver.engine.residuals import JobResiduals, ResidualCollection
from psserver.engine.waits import Waits

# Attributes that any thread may read: they are set once, or made to be shared.
FIXED: dict[type, set[str]] = {
    Shard: {"index", "num_shards", "lease_s", "limits", "lifetimes"},
    Lifetimes: set(),
    Job: {"name", "membership", "barriers", "counters"},
    Life: set(),
    Membership: {"num_workers", "min_workers", "lease_s", "is_elastic", "size"},
    Member: {"rank", "incarnation", "restart", "host", "pid", "returns"},
    Table: {"index", "layout", "optimizer", "specs", "is_kept", "nbytes"},
    SliceClock: set(),
    Progress: set(),
    OpenStep: {"key"},
    OpenSteps: set(),
    SliceWorkers: set(),
    Parking: set(),
    Newcomers: set(),
    TableParticipants: set(),
    Barriers: set(),
    Stalls: set(),
    JobCounters: set(),
    Counters: {"times_s"},
    Histogram: {"bounds"},
    ResidualCollection: {"job", "table", "step"},
    JobResiduals: {"is_collecting", "_collections"},
    Waits: set(),
    Recovery: {"journal_nbytes"},
    JobRecorder: set(),
    BarrierWaits: {"arrive", "withdraw", "excuse", "stop_waiting", "_lock"},
}
SHARED = {"jobs", "waiting"}  # Of a `Requests`: the rest guards itself.
PACKAGE = Path(sys.modules["psserver"].__file__ or "").parent
MACHINES = {
    *(str(path) for path in (PACKAGE / "decisions").glob("*.py")),
    *(
        str(PACKAGE / "engine" / f"{name}.py")
        for name in ("barrier_waits", "counters", "residuals", "views", "waits")
    ),
    str(PACKAGE / "durability" / "recovery.py"),
}


class Engines:
    """The engines of one scene, and the locks of all engines so far.

    A connection's thread may end after its scene, when another one is watched already. It reads
    under its own engine's lock, which therefore stays known.

    Attributes:
        current: Engines of this scene; threads read the list, so it is replaced and not cleared.
    """

    def __init__(self) -> None:
        """Starts without engines."""
        self.current: list[Engine] = []
        self._locks: list[Any] = []

    def add(self, engine: Engine) -> None:
        """Adds an engine, from any thread."""
        self._locks.append(engine.lock)
        self.current.append(engine)

    def end_scene(self) -> None:
        """Drops the engines of this scene; their locks stay known."""
        self.current = []

    def is_held(self) -> bool:
        """Returns whether this thread has the lock of any engine."""
        return any(lock._is_owned() for lock in self._locks)


@contextmanager
def owned(engines: Engines) -> Iterator[list[str]]:
    """Yields the reads without an engine's lock so far: which attribute, and where.

    Args:
        engines: The engines of this scene; more may be added meanwhile.
    """
    found: list[str] = []
    classes = [*FIXED, Requests]
    for cls in classes:
        _watch(cls, engines, found)
    try:
        yield found
    finally:
        for cls in classes:
            del cls.__getattribute__


def _watch(cls: Any, engines: Engines, found: list[str]) -> None:
    plain = object.__getattribute__

    def checked(self: object, name: str) -> Any:
        is_watched = _is_guarded(cls, name) and not engines.is_held()
        if is_watched and not _is_copy(self, engines.current):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename in MACHINES:
                frame = frame.f_back  # A test may play with a machine of its own.
            is_ours = frame is not None and PACKAGE in Path(frame.f_code.co_filename).parents
            if frame is not None and is_ours and frame.f_code.co_name != "__init__":
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                found.append(f"{cls.__name__}.{name} is read without the lock at {where}")
        return plain(self, name)

    cls.__getattribute__ = checked


def _is_copy(value: object, engines: Sequence[Engine]) -> bool:
    """Whether it is a counters, or part of one, that no engine counts in: anybody may read it."""
    if not isinstance(value, Counters | Histogram):
        return False
    of_engines = [engine.counters for engine in engines]
    kept = {id(part) for one in of_engines for part in (one, *_parts(one))}
    return id(value) not in kept


def _parts(counters: Counters) -> tuple[Histogram, ...]:
    plain = object.__getattribute__
    return plain(counters, "staleness"), plain(counters, "apply_s")


def _is_guarded(cls: type, name: str) -> bool:
    if cls is Requests:
        return name in SHARED
    return not name.startswith("__") and name not in FIXED[cls]
