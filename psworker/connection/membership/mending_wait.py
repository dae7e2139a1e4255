"""A worker's wait until the shards have restored a job of which one of them has lost its part."""

from __future__ import annotations

import logging
import time

from pscore.errors import StateLostError

log = logging.getLogger("paceline")
ASK_S = 0.5  # Until the first question whether it is there; each further wait is longer...
ASK_S_MAX = 2.0  # ...up to this.


class MendingWait:
    """One wait, which begins when a shard is first found without its part."""

    def __init__(self, job: str, patience_s: float) -> None:
        """Starts no wait yet; one ends with an error after `patience_s` seconds."""
        self._job = job
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._next_s = ASK_S

    def over(self) -> MendingWait:
        """Logs the end of the wait, if there was one; returns the wait for another loss."""
        if self._since_s is not None:
            waited_s = time.monotonic() - self._since_s
            log.warning(
                "job %r is restored, and this worker goes on after %.1f s", self._job, waited_s
            )
        return MendingWait(self._job, self._patience_s)

    def wait(self, problem: StateLostError) -> None:
        """Waits a moment, and logs the first of these.

        Raises:
            StateLostError: The whole wait was too long.
        """
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
            log.warning(
                "this worker waits until job %r is restored from a checkpoint: %s",
                self._job,
                problem,
            )
        if now_s - self._since_s >= self._patience_s:
            raise problem
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, ASK_S_MAX)
