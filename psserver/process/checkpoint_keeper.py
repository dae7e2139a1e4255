"""The supervisor's end of scheduled checkpoints: starts their process, and asks it for a last one.

The process (checkpoint_schedule.py) ends when its standard input does, so it does not outlive this
one. When it dies by itself it is started again after a pause: shards and training do not notice.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from pscore.errors import ThreadError
from pscore.threads import OwnedThread
from psserver.process.spare import SAFE
from psserver.process.supervisor import ended

log = structlog.get_logger()
PAUSE_S_MIN = 0.5
PAUSE_S_MAX = 60.0
SETTLED_S = 60.0


class Keeper:
    """The process that takes the checkpoints of one start."""

    def __init__(self, last_s: float) -> None:
        """Starts nothing yet; `last_s` is the time that the last checkpoints may take."""
        self._last_s = last_s
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_ending = threading.Event()
        self._lock = threading.Lock()  # Lock of `_process`, the one that runs, and of its input.

    def start(self, plan: Callable[[], str]) -> None:
        """Starts the process, unless it runs already; `plan` returns its plan."""
        if self._thread is None:
            self._thread = OwnedThread(partial(self._keep, plan()), "keeper", _note_end)
            self._thread.start()

    def last(self) -> None:
        """Requests the last checkpoint of each job that has changed, and ends the process."""
        with self._lock:
            self._is_ending.set()
            process = self._process
            if process is None and self._thread is not None:
                log.warning("no last checkpoint is written: the process that writes them has died")
            if process is not None and process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write("last\n")
                    process.stdin.flush()
        try:
            if process is not None:
                process.wait(self._last_s)
        except subprocess.TimeoutExpired:
            log.warning(
                "no last checkpoint was written in time; earlier ones are kept",
                waited_s=self._last_s,
            )
        self.close()

    def close(self) -> None:
        """Ends the process at once; a second call does nothing."""
        with self._lock:
            self._is_ending.set()
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _keep(self, plan: str) -> None:
        """Starts the process again whenever it has died, until the end is wanted.

        An engine may signal all processes of a container or unit. The process inherits this
        thread's mask, so it writes the last checkpoints first, even if it has only just begun.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        pause_s = PAUSE_S_MIN
        while not self._is_ending.is_set():
            started_s = time.monotonic()
            how = self._run(plan)
            if self._is_ending.is_set():
                return
            if time.monotonic() - started_s > SETTLED_S:
                pause_s = PAUSE_S_MIN
            log.error(
                "the process that writes checkpoints died; it is started again",
                how=how,
                pause_s=pause_s,
            )
            self._is_ending.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _run(self, plan: str) -> str:
        """Runs the process to its end; returns how it ended, in words."""
        try:
            with self._lock:
                if self._is_ending.is_set():
                    return "was no longer needed"
                self._process = process = subprocess.Popen(
                    [sys.executable, *SAFE, "-m", "psserver", "schedule", plan],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                    text=True,
                )
        except OSError as problem:  # No memory or descriptors are left for it.
            return f"could not be started: {problem}"
        status = process.wait()
        with self._lock:
            self._process = None
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        return ended(status)


def _note_end(error: ThreadError) -> None:
    log.error("no further scheduled checkpoints are written", reason=str(error))
