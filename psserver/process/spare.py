"""A spare process beside the shards: it has loaded all that a shard needs, and waits for a plan.

Loading is most of a shard's start. So when a shard dies, the spare process becomes its next one.
Like every shard it ends when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import IO

from psserver.process.shard_plan import ShardPlan

SPARE = "-"  # In place of the plan on the command line: it comes by standard input.
CHUNK_NBYTES = 64 << 10


def leave_deleted_folder() -> None:
    """Changes to / if the working directory was deleted: nothing compiles where there is none."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


leave_deleted_folder()
# A file of the user's named like a module must not be found, unless Paceline itself is found there.
SAFE = [] if sys.path[:1] == [os.getcwd()] else ["-P"]


def start_process(plan: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts the process of a shard.

    Args:
        plan: Its plan as JSON, or `SPARE`.
        stderr: Where its standard error goes; None: to our own.

    Raises:
        OSError: The machine has no room for it.
    """
    return subprocess.Popen(
        [sys.executable, *SAFE, "-m", "psserver", "shard", plan],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        process_group=0,  # Ctrl-C at a terminal is ours to pass on.
    )


class SpareProcess:
    """The spare process of a supervisor, if there is one now."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Number of the process; 0: there is none."""
        return 0 if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Starts one, unless there is one; without room for it there is none."""
        if self._popen is None:
            with suppress(OSError):
                self._popen = start_process(SPARE)

    def take(self, plan: ShardPlan) -> subprocess.Popen[bytes] | None:
        """Makes the spare process the shard of a plan, and returns it; None: there is none."""
        popen, self._popen = self._popen, None
        if popen is None:
            return None
        assert popen.stdin is not None
        with suppress(BrokenPipeError):
            popen.stdin.write(plan.to_json().encode() + b"\n")
            popen.stdin.flush()
            return popen
        _end(popen)
        return None

    def end(self) -> None:
        """Ends it."""
        popen, self._popen = self._popen, None
        if popen is not None:
            _end(popen)


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


def await_plan() -> ShardPlan | None:
    """Waits, as the spare process, for a plan; None: standard input has ended before.

    Standard error then goes to the log file of that shard, as that of a process started for it.
    """
    text = b""
    while not text.endswith(b"\n"):
        chunk = os.read(sys.stdin.fileno(), CHUNK_NBYTES)
        if not chunk:
            return None
        text += chunk
    plan = ShardPlan.from_json(text.decode())
    if plan.log_file is not None:
        with suppress(OSError), open(plan.log_file, "ab", buffering=0) as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    return plan
