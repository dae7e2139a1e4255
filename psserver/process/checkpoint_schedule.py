"""The process that takes scheduled checkpoints: one for all shards of a start, beside them.

Every few seconds each job that has changed is written as `psserver checkpoint` would write it. One
process does it, one job after the other, so no two are ever taken at once. It is a process of its
own because it holds a copy of a whole job: memory or disk that run out end a checkpoint here, and
no shard and no supervisor. A checkpoint that fails is logged and tried again at the next turn.

The supervisor (checkpoint_keeper.py) holds its standard input: the line `last` asks for a last
checkpoint of each job, the end of the input ends the process at once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from pscore.errors import PacelineError
from pscore.net.credentials import read_credentials
from pscore.pb.ps.v1 import control_pb2
from psserver.exits import Exit
from psserver.logs import setup
from psserver.process.shard_plan import SchedulePlan
from psserver.remote import ask
from psserver.remote.checkpoint import capture, holds_weights, is_finished
from psserver.remote.checkpoint_files import write

log = structlog.get_logger()
LOCK = ".schedule"
KEEP = 3
LAST = "last"

Mark = tuple[object, ...]  # Differs when a job has something new to be saved.


class Schedule:
    """Checkpoints of the jobs of a cluster, taken in turn."""

    def __init__(self, plan: SchedulePlan) -> None:
        """Starts without checkpoints."""
        self._plan = plan
        self._folder = Path(plan.folder)
        self._last = threading.Event()
        self._refused: set[str] = set()  # Jobs without weights on the shards.
        self._taken: dict[str, Mark] = {}  # By job: its mark at its newest checkpoint.
        self._lock_fd: int | None = None

    def run(self) -> None:
        """Writes checkpoints until a last one is requested."""
        is_last = False
        while not is_last:
            is_last = self._last.wait(self._plan.every_s)
            self.take()

    def listen(self) -> None:
        """Waits for words of the supervisor; ends the process when that is gone."""
        for line in sys.stdin:
            if line.strip() == LAST:
                self._last.set()
        os._exit(Exit.OK)

    def take(self) -> None:
        """Writes a checkpoint of each job that has changed since its last one."""
        try:
            self._claim()
            credentials = read_credentials(token_file=self._plan.token_file)
            statuses = ask.statuses(self._plan.addresses, credentials)
        except (PacelineError, OSError) as problem:
            log.warning("no checkpoints written; the last ones are kept", reason=str(problem))
            return
        for job in statuses[0].jobs:
            mark = mark_of(statuses, job.job)
            if mark is None or mark == self._taken.get(job.job):
                continue
            if not holds_weights(job):
                self._refuse(job.job)
                continue
            try:
                taken = capture(self._plan.addresses, credentials, job.job, weights_only=False)
                path = write(self._folder, taken, keep=KEEP)
            except (PacelineError, OSError, MemoryError) as problem:
                log.warning(
                    "no checkpoint written; the last one is kept",
                    job=job.job,
                    reason=str(problem) or type(problem).__name__,
                )
                continue
            self._taken[job.job] = mark
            log.info("checkpoint written", job=job.job, at=taken.position, path=str(path))

    def _refuse(self, job: str) -> None:
        """Logs once that a job has no checkpoints."""
        if job not in self._refused:
            self._refused.add(job)
            log.warning(
                "no checkpoints of this job: its workers run the optimizer and have the weights; "
                "let the script save state_dict()",
                job=job,
            )

    def _claim(self) -> None:
        """Keeps the processes of other starts out of the folder.

        Raises:
            BlockingIOError: Another one uses it.
            OSError: The folder cannot be used.
        """
        if self._lock_fd is not None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            os.close(fd)
            raise BlockingIOError(
                problem.errno,
                f"another psserver writes its checkpoints into {self._folder}; give each a "
                "--state-dir of its own",
            ) from problem
        except OSError:  # A file system without locks.
            os.close(fd)
            return
        self._lock_fd = fd


def mark_of(statuses: Sequence[control_pb2.StatusReply], job: str) -> Mark | None:
    """Returns what changes with each update of a job; None if it has no weights yet."""
    found = [other for status in statuses for other in status.jobs if other.job == job]
    tables = [table for other in found for table in other.tables if table.num_slices]
    if not tables or any(table.version_min < 0 for table in tables):
        return None
    versions = [(t.name, t.mode, t.version_min, t.version_max) for t in tables]
    return (is_finished(found[0]), *versions)


def main(text: str) -> None:
    """Runs the process; `text` is its plan."""
    plan = SchedulePlan.from_json(text)
    stream = setup.rotating(plan.log_file, plan.log_max_mb)
    setup.configure(plan.log_format, plan.log_level, stream, shard="all")
    for number in (signal.SIGTERM, signal.SIGINT):  # The supervisor decides when it ends.
        signal.signal(number, signal.SIG_IGN)
    schedule = Schedule(plan)
    threading.Thread(target=schedule.listen, name="listen", daemon=True).start()
    schedule.run()
    sys.stderr.flush()
    os._exit(Exit.OK)
