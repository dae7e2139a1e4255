"""A worker's wait until the shards have restored a job of which one of them has lost its part."""

from __future__ import annotations

import logging
import time

from pscore.errors import StateLostError

log = logging.getLogger("paceline")
ASK_S = 0.5  # From one question to the next.


class MendingWait:
    """One wait, which begins when a shard is first found without its part."""

    def __init__(self, job: str, patience_s: float) -> None:
        """Starts no wait yet; one ends with an error after `patience_s` seconds."""
        self._job = job
        self._patience_s = patience_s
        self._since_s: float | None = None

    def again(self) -> MendingWait:
        """Returns the wait for another loss."""
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
        time.sleep(ASK_S)
