"""`psserver` whose shards can be killed at a moment that a test chooses, in the middle of a change.

A test writes lines into the file `armed`, each a number and the name of a moment. The process that
comes to the first line's moment for that number of times takes the line away, and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from psserver.rows import kernels
from psserver.rows.copying import SlabCopy
from psserver.rows.store import RowStore
from psserver.rows.undo import Undo
from psserver.standby import heir, mover
from psserver.standby.handover import Giving
from psserver.standby.pieces import GIVEN, STANDBY, ArrivingJournals
from psserver.standby.target import MoveTarget
from tests.integration.command import Command

ARMED, FOLDER = "armed", "TEST_MOMENTS"


def always(*_: Any) -> bool:
    return True


def is_new_index(keys: Any, places: Any, *_: Any) -> bool:
    """Whether an index is filled that takes the place of a smaller one."""
    return len(keys) > 1 << 10 and not places.any()


def is_of_rows(fd: int, *_: Any) -> bool:
    """Whether a file is one of rows."""
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".rows")


def is_begun(journals: ArrivingJournals) -> bool:
    """Whether a shard that has arrived is to be served."""
    return bool(journals.prepared)


def writes(name: str) -> Callable[..., bool]:
    """Returns whether a mark of this name is written."""
    return lambda path, *_: path.name == name


class Moment(NamedTuple):
    """A call of a function, at its begin or at its end."""

    owner: Any
    name: str
    is_there: Callable[..., bool] = always  # Gets its arguments.
    at_end: bool = False


MOMENTS = {
    "memory is made": Moment(os, "ftruncate", is_of_rows),
    "index grows": Moment(kernels, "put", is_new_index),
    "index has grown": Moment(kernels, "put", is_new_index, at_end=True),
    "rows go": Moment(kernels, "remove", lambda *given: len(given[-1]) > 0, at_end=True),
    "rows have gone": Moment(kernels, "vacate", lambda *given: len(given[-1]) > 0, at_end=True),
    "rows come": Moment(kernels, "occupy"),
    "rows were kept": Moment(Undo, "save", at_end=True),
    "rows come back": Moment(kernels, "bring_back", at_end=True),
    "copy begins": Moment(SlabCopy, "advance"),
    "copy was made": Moment(SlabCopy, "advance", at_end=True),
    "rows are restored": Moment(kernels, "load", at_end=True),
    "rows were restored": Moment(RowStore, "restore", at_end=True),
    "all is copied": Moment(Giving, "copied", at_end=True),
    "standby is noted": Moment(mover, "write_json", writes(STANDBY), at_end=True),
    "answers have ended": Moment(Giving, "freeze", at_end=True),
    "other is prepared": Moment(MoveTarget, "prepare", at_end=True),
    "shard is given": Moment(mover, "write_json", writes(GIVEN), at_end=True),
    "other has begun": Moment(MoveTarget, "begin", at_end=True),
    "all is here": Moment(ArrivingJournals, "prepare"),
    "all is compared": Moment(ArrivingJournals, "prepare", at_end=True),
    "standby has kept it": Moment(ArrivingJournals, "complete", at_end=True),
    "claim was made": Moment(heir, "settle", at_end=True),
    "shard is to begin": Moment(ArrivingJournals, "note_begun"),
    "shard has begun": Moment(ArrivingJournals, "note_begun", at_end=True),
    "journals are moved": Moment(ArrivingJournals, "begin", is_begun, at_end=True),
}


class Dying(Command):
    """Shards with journals under their supervisor, which die at moments."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment[FOLDER] = str(folder)

    def line(self, *arguments: object) -> list[str]:
        program = "from tests.integration.moments import psserver; psserver()"
        return [sys.executable, "-c", program, *map(str, arguments)]

    def arm(self, *moments: tuple[str, int]) -> None:
        """Kills the process that next comes to the first moment so many times, then to the next."""
        lines = "".join(f"{times} {moment}\n" for moment, times in moments)
        (self.folder / ARMED).write_text(lines, encoding="utf-8")

    @property
    def is_over(self) -> bool:
        """Whether a process has died at each moment."""
        return not (self.folder / ARMED).read_text(encoding="utf-8")


def psserver() -> None:
    """Runs `psserver` with its arguments."""
    from psserver.__main__ import main

    for name, moment in MOMENTS.items():
        setattr(moment.owner, moment.name, dying(name, moment))
    main()


def dying(name: str, moment: Moment) -> Callable[..., Any]:
    """Returns the function of a moment, which kills the process there if the test wants it."""
    call, folder = getattr(moment.owner, moment.name), Path(os.environ[FOLDER])
    left: list[int] = []  # Times that it comes there until it dies; empty: it does not know.

    def come_by() -> None:
        armed = folder / ARMED
        lines = armed.read_text(encoding="utf-8").splitlines() if armed.exists() else []
        times, _, wanted = (lines or [""])[0].partition(" ")
        if wanted != name:
            left.clear()
            return
        left[:] = [(left or [int(times)])[0] - 1]
        if not left[0]:
            armed.write_text("".join(f"{line}\n" for line in lines[1:]), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

    def called(*given: Any, **named: Any) -> Any:
        is_there = moment.is_there(*given)
        if is_there and not moment.at_end:
            come_by()
        result = call(*given, **named)
        if is_there and moment.at_end:
            come_by()
        return result

    return called
