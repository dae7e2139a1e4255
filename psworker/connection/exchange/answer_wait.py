"""A worker's wait for shards' answers, with reports of the answer it waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from pscore.partition import Layout
from psworker.connection.membership import taking_part
from psworker.connection.membership.session import Session
from psworker.transports.interrupts import takes_effect
from psworker.transports.request_future import RequestFuture

log = logging.getLogger("paceline")
T = TypeVar("T")
SAY_AFTER_S = 7.0  # Longer than a pull waits at a shard, whose report comes first.
CHECK_S = 1.0  # Interval at which a wait is checked for being pointless.
MEANWHILE_S = 0.1  # The same, where an action is to be repeated.
# A shard counts as not answering after so long without a heartbeat's answer, of which there is one
# in a fifth of a lease.
SILENT_S = 3.0
SILENT_SHARE = 0.4


class AnswerWait:
    """Waits for the answers of shards to pushes and pulls of one table.

    Attributes:
        meanwhile: An action that a wait repeats, for others that wait for this worker; or None.
        upload: Uploads the first numbers of the table; a wait calls it once no worker of a lower
            rank is left to do so. None: this worker has none, or has done so.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        layout: Layout,
        check: Callable[[], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares to wait.

        Args:
            check: Raises an error that makes waiting pointless; called every `CHECK_S`.
            before: Called before each wait: sends what the answer may depend on.
        """
        self._session = session
        self._name = name
        self._layout = layout
        self._check = check
        self._before = before
        self.meanwhile: Callable[[], None] | None = None
        self.upload: Callable[[], None] | None = None

    @property
    def _check_s(self) -> float:
        return CHECK_S if self.meanwhile is None else MEANWHILE_S

    def wait(self, future: Future[T], index: int, what: str) -> T:
        """Returns the answer, and records the wait in the timeline.

        Args:
            what: A description of the answer, for people.

        Raises:
            PacelineError: The shard refused the request, or does not answer.
        """
        if future.done():
            self._session.require_own()
            return future.result()
        return self._await(lambda: future.result(timeout=self._check_s), index, what)

    def wait_for_any(self, answers: Mapping[int, RequestFuture[Any]], what: str) -> int:
        """Returns the first slice whose answer has come, and records the wait in the timeline.

        Args:
            answers: The answer of each slice, in the order in which they are expected.

        Raises:
            PacelineError: A shard does not answer.
        """
        came = threading.Event()

        def wake(_: Future[Any]) -> None:
            came.set()

        for answer in answers.values():
            answer.add_done_callback(wake)

        def first() -> int:
            if not came.wait(self._check_s):
                raise TimeoutError
            return next(index for index, answer in answers.items() if answer.done())

        try:
            return self._await(first, next(iter(answers)), what)
        finally:
            for answer in answers.values():
                answer.remove_done_callback(wake)

    def meet(self) -> None:
        """Meets workers that come or end, if they wait for this one."""
        if self.meanwhile is not None:
            self.meanwhile()

    def _await(self, poll: Callable[[], T], index: int, what: str) -> T:
        """Returns what `poll` returns once it no longer raises `TimeoutError`."""
        self._before()
        timeline, begin_s = self._session.timeline, time.monotonic()
        begin_ns = 0 if timeline is None else timeline.now_ns()
        try:
            return self._repeat(poll, index, what)
        finally:
            self._session.pace.waited(time.monotonic() - begin_s)
            if timeline is not None:
                timeline.span("wait", begin_ns, what=f"{what} of slice {index}")

    def _repeat(self, poll: Callable[[], T], index: int, what: str) -> T:
        self._session.require_own()
        started_s, say_s = time.monotonic(), SAY_AFTER_S
        try:
            while True:
                try:
                    with takes_effect():
                        return poll()
                except TimeoutError:
                    self._session.check()
                    self._check()
                    self.meet()
                    if self.upload is not None and taking_part.is_first(self._session):
                        upload, self.upload = self.upload, None  # It waits for acknowledgements.
                        upload()
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
        if link.silent_s >= max(SILENT_S, SILENT_SHARE * self._session.lease_s):
            return f"{where}, which has not answered for {link.silent_s:.0f} s", True
        return f"{where}, which waits for {link.waiting_for or 'others'}", False
