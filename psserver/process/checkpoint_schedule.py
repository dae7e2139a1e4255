"""The process that takes scheduled checkpoints: one for all shards of a start, beside them.

Every few seconds each job that has changed is written as `psserver checkpoint` would write it, one
job after the other. Each has a thread, so a job whose workers do not answer delays only its own
checkpoint: the jobs after it wait at most half of the interval, together, and then start beside it.
It is a process of its own because it holds a copy of a whole job: memory or disk that run out end
a checkpoint here, and no shard and no supervisor. A checkpoint that fails is logged and tried again
at the next turn.

The supervisor (checkpoint_keeper.py) holds its standard input: the line `last` asks for a last
checkpoint of each job, the end of the input ends the process at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import structlog

from pscore.errors import PacelineError, ThreadError
from pscore.net.credentials import Credentials, read_credentials
from pscore.pb.ps.v1 import checkpoint_pb2, control_pb2
from pscore.threads import OwnedThread
from psserver.copies.copier import Copier, fetch
from psserver.copies.places import place_of
from psserver.decisions.shard import JOBS_MAX
from psserver.durability.journal_dir import Lock, lock_folder
from psserver.exits import Exit
from psserver.logs import setup
from psserver.mending.mender import Mender
from psserver.process.shard_plan import SchedulePlan
from psserver.remote import ask
from psserver.remote.checkpoint import JobShards, capture, holds_weights, is_finished
from psserver.remote.checkpoint_files import Checkpoint, expire, in_files, write

log = structlog.get_logger()
LOCK = ".schedule"
KEEP = 3
LAST = "last"
STOPPING = ".stopping"  # In the folder while last checkpoints are taken.
MEND_S = 1.0  # From one look for lost jobs to the next.
LAST_PATIENCE_S = 1.0  # Seconds that the last checkpoints wait for each other, of `--grace-s`.

Mark = tuple[object, ...]  # Differs when a job has something new to be saved.


class CheckpointSchedule:
    """Checkpoints of the jobs of a cluster, taken in turn."""

    def __init__(self, plan: SchedulePlan) -> None:
        self._plan = plan
        self._folder = Path(plan.folder)
        self._last = threading.Event()
        self._refused: set[str] = set()  # Jobs without weights on the shards.
        self._taken: dict[str, Mark] = {}  # By job: its mark at its newest checkpoint.
        self._bases: dict[str, Checkpoint] = {}  # By job: the newest one, in its files.
        self._pool = ThreadPoolExecutor(JOBS_MAX, thread_name_prefix="checkpoint")
        self._under_way: dict[str, Future[None]] = {}  # By job: its newest checkpoint.
        self._lock: Lock | None = None
        credentials = partial(read_credentials, token_file=plan.token_file)
        self._mender = Mender(plan.addresses, [self._folder], credentials, self._fetch)
        self._copier: Copier | None = None
        if plan.copies is not None:
            self._copier = Copier(self._folder, plan.copies, KEEP, self._report_copies)

    def run(self) -> None:
        """Writes checkpoints until a last one is requested, and copies until it is copied."""
        is_last, due_s = False, time.monotonic()
        self._copy()
        while not is_last:
            now_s = time.monotonic()
            due_s = max(due_s + self._plan.every_s, now_s)  # From one begin to the next.
            is_last = self._last.wait(due_s - now_s)
            self.take(is_last=is_last)
        with contextlib.suppress(OSError):
            (self._folder / STOPPING).unlink(missing_ok=True)
        if self._copier is not None:
            self._copier.finish()
        self._note_last(is_over=True)

    def begin(self) -> None:
        """Keeps the folder, and whether the process before was killed at its last checkpoints."""
        with contextlib.suppress(OSError):  # `take` tries it again, and says why it cannot be.
            self._claim()
            if not (self._folder / STOPPING).exists():
                return
            (self._folder / STOPPING).unlink()
            log.warning(
                "the last stop was cut short: its checkpoint is missing; journals lack no "
                "acknowledged push. Let a stop take 30 s (docker stop --time 30, "
                "stop_grace_period: 30s)",
                path=str(self._folder),
            )

    def _copy(self, expired: Sequence[Path] = ()) -> None:
        """Starts to copy new checkpoints to the second place, if there is one."""
        if self._copier is not None:
            self._copier.begin(expired)

    def _report_copies(self, problem: str, count: int) -> None:
        """Reports to shard 0 how the copies fare; the next attempt repeats it."""
        address, request = self._plan.addresses[0], checkpoint_pb2.NoteCopiesRequest()
        request.place, request.problem, request.count = str(self._plan.copies), problem, count
        with contextlib.suppress(PacelineError, OSError):
            shards = JobShards([address], read_credentials(token_file=self._plan.token_file))
            try:
                shards.call(0, lambda stub: stub.NoteCopies, request)
            finally:
                shards.close()

    def mend(self) -> None:
        """Restores what a shard has lost, until the last checkpoints are wanted."""
        while not self._last.wait(MEND_S):
            self._mender.look()

    def _fetch(self) -> None:
        """Brings checkpoints back from the second place, if there is one.

        Raises:
            OSError, ValueError, PacelineError: It cannot be used.
        """
        if self._plan.copies is not None:
            fetch(self._folder, place_of(self._plan.copies))

    def listen(self) -> None:
        """Waits for words of the supervisor; ends the process when that is gone."""
        for line in sys.stdin:
            if line.strip() == LAST:
                if self._lock is not None:
                    with contextlib.suppress(OSError):
                        (self._folder / STOPPING).touch(mode=0o600)
                self._note_last(is_over=False)
                self._last.set()
        os._exit(Exit.OK)

    def _note_last(self, *, is_over: bool) -> None:
        """Announces to all shards that the last checkpoints begin, or are over."""
        with contextlib.suppress(PacelineError, OSError):
            credentials = read_credentials(token_file=self._plan.token_file)
            ask.note_last(self._plan.addresses, credentials, is_over=is_over)

    def take(self, *, is_last: bool = False) -> None:
        """Writes a checkpoint of each job that has changed since its last one.

        Returns when all are written, or a little after half of the interval: those that take longer
        continue in their threads, and the next turn starts no other one of the same job.

        Args:
            is_last: Return only when all are written, also those that were under way before.
        """
        self._forget_done()
        try:
            self._claim()
            credentials = read_credentials(token_file=self._plan.token_file)
            statuses = ask.statuses(self._plan.addresses, credentials, is_patient=True)
            ask.follow(self._plan.addresses, statuses)
        except (PacelineError, OSError) as problem:
            log.warning("no checkpoints written; the last ones are kept", reason=str(problem))
            return
        patience_s = min(self._plan.every_s / 2, LAST_PATIENCE_S if is_last else math.inf)
        deadline_s = time.monotonic() + patience_s
        for job in statuses[0].jobs:
            former = self._under_way.get(job.job)
            mark = mark_of(statuses, job.job)
            if mark is None or (former is not None and not is_last):
                continue
            if not holds_weights(job):
                self._refuse(job.job)
                continue
            self._mender.note(job.job, statuses)
            started = self._pool.submit(self._save, job.job, mark, credentials, former)
            self._under_way[job.job] = started
            wait([started], max(0.0, deadline_s - time.monotonic()))
        if is_last:
            wait(self._under_way.values())
        self._forget_done()
        expired = expire(self._folder, self._plan.keep_checkpoints_s)
        self._copy(expired)
        for path in expired:
            log.info("checkpoint of an ended or forgotten job deleted", path=str(path))

    def _save(
        self, job: str, mark: Mark, credentials: Credentials, former: Future[None] | None
    ) -> None:
        """Writes a checkpoint of one job, after its `former` one; runs in a thread of its own."""
        if former is not None:
            wait([former])
        if mark == self._taken.get(job):
            return
        try:
            base = self._bases.pop(job, None)
            taken = capture(self._plan.addresses, credentials, job, weights_only=False, base=base)
            path = write(self._folder, taken, keep=KEEP)
            self._bases[job] = in_files(path, taken)
        except (PacelineError, OSError, MemoryError) as problem:
            log.warning(
                "no checkpoint written; the last one is kept",
                job=job,
                reason=str(problem) or type(problem).__name__,
            )
            return
        self._taken[job] = mark
        self._copy()
        log.info("checkpoint written", job=job, at=taken.position, path=str(path))

    def _forget_done(self) -> None:
        """Forgets the checkpoints that are done, and logs the errors that no one expects."""
        for job, one in list(self._under_way.items()):
            if one.done():
                del self._under_way[job]
                if (problem := one.exception()) is not None:
                    log.error(
                        "no checkpoint written because of a bug; the last one is kept",
                        job=job,
                        exc_info=problem,
                    )

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
        if self._lock is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            busy = (
                f"another psserver writes its checkpoints into {self._folder}; give each a "
                "--state-dir of its own"
            )
            self._lock = lock_folder(self._folder / LOCK, busy)


def mark_of(statuses: Sequence[control_pb2.StatusReply], job: str) -> Mark | None:
    """Returns what changes with each update of a job; None if it has no weights yet."""
    found = [other for status in statuses for other in status.jobs if other.job == job]
    tables = [table for other in found for table in other.tables if table.num_slices]
    if not tables or any(table.version_min < 0 for table in tables):
        return None
    versions = [(t.name, t.mode, t.version_min, t.version_max) for t in tables]
    return (is_finished(found[0]), *versions)


def _end(error: ThreadError) -> None:
    """Ends the process, which the supervisor no longer reaches; it starts another one."""
    log.error("the process that writes checkpoints ends", reason=str(error))
    os._exit(Exit.BUG)


def main(text: str) -> None:
    """Runs the process; `text` is its plan."""
    plan = SchedulePlan.from_json(text)
    stream = setup.rotating(plan.log_file, plan.log_max_mb)
    setup.configure(plan.log_format, plan.log_level, stream, shard="all")
    schedule = CheckpointSchedule(plan)
    schedule.begin()
    OwnedThread(schedule.listen, "listen", _end).start()
    if len(plan.addresses) > 1:
        OwnedThread(schedule.mend, "mend", _end).start()
    schedule.run()
    sys.stderr.flush()
    os._exit(Exit.OK)
