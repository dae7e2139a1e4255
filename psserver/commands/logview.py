"""`psserver logs`: the log files of one run in the order of their time stamps."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from psserver.exits import CommandError, Exit
from psserver.logs.rotation import former
from psserver.process.run_dir import RunDirectory, StartedRun

POLL_S = 0.2
STAMP = re.compile(r'^(?:\{.*?"timestamp": ")?(\d{4}-\d\d-\d\dT[\d:.]+Z)')
TAIL_NBYTES_MAX = 8 << 20  # Most bytes of each file.


def files(run: StartedRun, shard: int | None) -> list[Path]:
    """Returns the log files of a run, or of one of its shards.

    Raises:
        CommandError: It logs to its terminal, or has no such shard.
    """
    if not run.detached:
        raise CommandError(
            Exit.USAGE, f"process {run.pid} was started without --detach, it logs to its terminal"
        )
    if shard is not None and shard not in {entry.index for entry in run.shards}:
        raise CommandError(Exit.USAGE, f"shard is {shard}, must be in 0..{len(run.shards) - 1}")
    chosen = [entry.log for entry in run.shards if shard in (None, entry.index)]
    if shard is None:
        chosen.append(run.supervisor_log)
    return [Path(name) for name in chosen if name is not None]


def last_files(directory: RunDirectory, port: int | None, shard: int | None) -> list[Path]:
    """Returns the log files of the last run on this machine, which has ended.

    Args:
        port: Only of runs with this port of shard 0.

    Raises:
        CommandError: No detached run has left logs there, or it had no such shard.
    """
    files = directory.last_logs(port)
    if not files:
        where = "" if port is None else f" on port {port}"
        raise CommandError(
            Exit.NO_ANSWER,
            f"no psserver runs{where} according to {directory.path}, and there are no logs "
            f"of an earlier one; "
            "if it was started with --state-dir, give the same directory",
        )
    if shard is None:
        return files
    chosen = [file for file in files if file.stem == f"shard-{shard}"]
    if not chosen:
        names = ", ".join(file.name for file in files)
        raise CommandError(Exit.USAGE, f"no log of shard {shard} in {files[0].parent}: {names}")
    return chosen


class LogView:
    """Reads files on from where it last was."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Starts near the end of long files, else at the beginning."""
        # By file: its inode, which a rotation keeps, and the offset of the next line.
        self._at: dict[Path, tuple[int, int]] = {}
        for path in paths:
            oldest = former(path) if former(path).exists() else path
            self._at[path] = (0, 0)
            with contextlib.suppress(FileNotFoundError):
                about = oldest.stat()
                self._at[path] = (about.st_ino, max(0, about.st_size - TAIL_NBYTES_MAX))

    def read(self) -> list[str]:
        """Returns the lines that are new, oldest first."""
        stamped: list[tuple[str, str]] = []
        for path in self._at:
            stamp = ""
            for line in self._lines(path):
                match = STAMP.search(line)
                stamp = match[1] if match else stamp  # A traceback stays with its line.
                stamped.append((stamp, line))
        stamped.sort(key=lambda entry: entry[0])
        return [line for _, line in stamped]

    def follow(self, run: StartedRun) -> Iterator[list[str]]:
        """Yields new lines until the run ends."""
        is_alive = True
        while is_alive:
            is_alive = run.is_alive()
            if lines := self.read():
                yield lines
            elif is_alive:
                time.sleep(POLL_S)

    def _lines(self, path: Path) -> list[str]:
        """Returns the rest of the file, and all of the next if it has been rotated."""
        lines: list[str] = []
        for name in (former(path), path):
            with contextlib.suppress(FileNotFoundError), name.open("rb") as file:
                inode, offset = self._at[path]
                number = os.fstat(file.fileno()).st_ino
                if number != inode and name != path:
                    continue  # Read long ago.
                file.seek(offset if number == inode else 0)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._at[path] = (number, file.tell() - len(data) + len(whole))
                lines += whole.decode(errors="replace").splitlines(keepends=True)
        return lines
