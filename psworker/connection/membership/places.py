"""Refusals of a place in a job: none is free, or this process was forked from a worker."""

from __future__ import annotations

import logging
import os
import time

from pscore.errors import ConfigError, NotOverError, RankTakenError

log = logging.getLogger("paceline")
SAY_AFTER_S = 5.0  # A wait is reported after this, and then each time it has doubled.


class PlaceWait:
    """A worker's wait for a free place in a job; it begins with the first refusal."""

    def __init__(self, job: str, patience_s: float) -> None:
        """Starts no wait yet; one ends with an error after `patience_s` seconds."""
        self._job = job
        self._patience_s = patience_s
        self._started_s: float | None = None
        self._say_s = SAY_AFTER_S

    def wait(self, problem: RankTakenError) -> None:
        """Reports the wait in growing intervals.

        Raises:
            RankTakenError: The wait was too long; names the job and the time. A `NotOverError` if
                `problem` is one.
        """
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        waited_s = now_s - self._started_s
        if waited_s >= self._patience_s:
            more = ", or allow more workers with --elastic MIN:MAX"
            raise type(problem)(
                f"job {self._job!r} has had no free rank for {waited_s:.0f} s: {problem}; wait "
                f"longer with PACELINE_TIMEOUT_S{'' if isinstance(problem, NotOverError) else more}"
            ) from problem
        if waited_s >= self._say_s:
            self._say_s *= 2
            log.warning(
                "this worker has waited %.0f s for a free rank in job %r: %s",
                waited_s,
                self._job,
                problem,
            )


def refuse_forked(pid: int, rank: int, job: str) -> None:
    """Refuses a process that was forked from a worker: both would write to one connection.

    Args:
        pid: Process id of the worker.
        rank: Its rank.
        job: Its job.

    Raises:
        ConfigError: This is another process.
    """
    if os.getpid() != pid:
        raise ConfigError(
            f"process {os.getpid()} was forked from worker {rank} of job {job!r} (process {pid}), "
            "which alone takes part in it; start processes that train with `psworker run`, or "
            'with multiprocessing.get_context("spawn")'
        )
