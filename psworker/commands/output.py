"""Passes on the output of workers line by line, with or without the rank in front."""

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
        self._lock = threading.Lock()

    def __call__(self, rank: int, line: str, target: IO[str]) -> None:
        """Writes one line; for a progress bar, the part that a terminal would show."""
        text = line.rstrip("\n").rstrip("\r").rpartition("\r")[2]
        label = f"[{rank}]"
        if target.isatty():
            label = f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m"
        with self._lock:
            target.write(f"{label} {text}\n")
            target.flush()


def plain(rank: int, line: str, target: IO[str]) -> None:
    """Writes a worker's line unchanged."""
    target.write(line)
    target.flush()


class Drain:
    """Replaces streams that accept no more output: a closed pipe, a full disk.

    Workers continue: a worker whose output is not read would stop at its next line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Starts with every stream in use; `tell` is called with a line for a person."""
        self._tell = tell
        self._lock = threading.Lock()
        self._dropped: list[IO[str]] = []

    def drop(self, target: IO[str], problem: Exception) -> None:
        """Discards later output to `target`, and reports it once."""
        with self._lock:
            if target in self._dropped:
                return
            self._dropped.append(target)
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), target.fileno())
        name = "output" if target is sys.stdout else "error"
        self._tell(
            f"standard {name} accepts no more output ({problem}): what the workers write there "
            "is dropped, and they continue"
        )
