"""A worker's wait for shards' answers, with reports of the answer it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pscore.partition import Layout
from psworker.connection.session import Session

log = logging.getLogger("paceline")
T = TypeVar("T")
SAY_AFTER_S = 7.0  # Longer than a pull waits at a shard, whose report comes first.
SILENT_S = 3.0  # Without a heartbeat's answer for so long, a shard counts as not answering.


class AnswerWait:
    """Waits for the answers of shards to pushes and pulls of one table."""

    def __init__(
        self, session: Session, name: str, layout: Layout, check: Callable[[], None]
    ) -> None:
        """Prepares to wait.

        Args:
            session: This worker's part in the job.
            name: Name of the table.
            layout: Its slices.
            check: Raises an error that makes waiting pointless; called every second.
        """
        self._session = session
        self._name = name
        self._layout = layout
        self._check = check

    def wait(self, future: Future[T], index: int, what: str) -> T:
        """Returns the answer, and records the wait in the timeline.

        Args:
            future: The answer.
            index: The slice.
            what: A description of the answer, for people.

        Raises:
            PacelineError: The shard refused the request, or does not answer.
        """
        timeline = self._session.timeline
        if timeline is None or future.done():
            return self._await(future, index, what)
        begin_ns = timeline.now_ns()
        try:
            return self._await(future, index, what)
        finally:
            timeline.span("wait", begin_ns, what=f"{what} of slice {index}")

    def _await(self, future: Future[T], index: int, what: str) -> T:
        self._session.require_own()
        started_s, say_s = time.monotonic(), SAY_AFTER_S
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    self._session.check()
                    self._check()
                text, is_silent = self._describe(index, what)
                self._session.waits = text if is_silent else ""
                waited_s = time.monotonic() - started_s
                if waited_s >= say_s:
                    say_s *= 2
                    log.warning(
                        "worker %d has waited %.0f s for %s", self._session.rank, waited_s, text
                    )
        finally:
            self._session.waits = ""

    def _describe(self, index: int, what: str) -> tuple[str, bool]:
        """Returns a description of the wait, and whether the shard does not answer."""
        shard = self._layout.slices[index].shard
        link = self._session.links[shard]
        where = f"{what} of slice {index} of {self._name!r} from shard {shard} at {link.address}"
        if link.silent_s >= SILENT_S:
            return f"{where}, which has not answered for {link.silent_s:.0f} s", True
        return f"{where}, which waits for {link.waiting_for or 'others'}", False
