"""A log file of bounded size: when it is full it becomes `NAME.1`, and a new one begins.

The process that writes rotates the file itself, between two lines. Its standard error is the file,
so lines of C libraries go there too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from psserver.logs.patient import Patient

STDERR = 2


def former(path: Path) -> Path:
    """Returns the name of the file that `path` was before."""
    return path.with_name(f"{path.name}.1")


class RotatingLog:
    """Standard error, which is a file; use it where a stream is wanted."""

    def __init__(self, path: Path, nbytes_max: int) -> None:
        """Redirects standard error to the file.

        Args:
            nbytes_max: Beyond it the file is rotated; 0: never.
        """
        self._path = path
        self._nbytes_max = nbytes_max
        self._lines = Patient(sys.stderr)

    def write(self, text: str) -> int:
        """Writes a line."""
        self._lines.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the file, and rotates it if it is full."""
        with contextlib.suppress(OSError):  # Where no file can be made, the old one grows on.
            sys.stderr.flush()
            held = os.fstat(STDERR)
            if self._nbytes_max and held.st_size >= self._nbytes_max:
                self._turn_over(held)

    def _turn_over(self, held: os.stat_result) -> None:
        named = self._path.stat()
        if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):  # Else another has done so.
            self._path.replace(former(self._path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(self._path, flags, 0o600)
        os.dup2(file, STDERR)
        os.close(file)
