"""Output of workers, passed on line by line: with the rank in front, or as it is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import IO

COLORS = (36, 33, 32, 35, 34, 31)  # ANSI codes of the prefixes, on a terminal.

Write = Callable[[int, str, IO[str]], None]


class Prefixed:
    """Writes workers' lines with their rank in front, each line as a whole."""

    def __init__(self) -> None:
        """Starts without a line."""
        self._lock = threading.Lock()

    def __call__(self, rank: int, line: str, target: IO[str]) -> None:
        """Writes one line; of a progress bar's line, what a terminal would show of it."""
        text = line.rstrip("\n").rstrip("\r").rpartition("\r")[2]
        label = f"[{rank}]"
        if target.isatty():
            label = f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m"
        with self._lock:
            target.write(f"{label} {text}\n")
            target.flush()


def plain(rank: int, line: str, target: IO[str]) -> None:
    """Writes a worker's line as it is."""
    target.write(line)
    target.flush()


class Drain:
    """Takes the place of a stream that accepts nothing any more: a closed pipe, a full disk.

    Workers go on: a worker whose output nobody reads would stop at its next line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Starts with every stream in use; `tell` is called with a line for a person."""
        self._tell = tell
        self._lock = threading.Lock()
        self._dropped: list[IO[str]] = []

    def drop(self, target: IO[str], problem: Exception) -> None:
        """Throws away from now on what is written to `target`, and says so once."""
        with self._lock:
            if target in self._dropped:
                return
            self._dropped.append(target)
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), target.fileno())
        name = "output" if target is sys.stdout else "error"
        self._tell(
            f"standard {name} takes nothing any more ({problem}): what the workers write there "
            "is dropped, and they go on"
        )
