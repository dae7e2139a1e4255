"""A wait for another worker: it asks the first shard for news, and is reported when it is long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from pscore.errors import ServerUnavailableError
from psworker.connection.membership.session import Session
from psworker.peers.patience import has_no_end

log = logging.getLogger("paceline")
ASK_AFTER_S = 0.5  # Then after twice as long, and so on.
SAY_AFTER_S = 7.0


class LongWait:
    """One wait of this worker, from `with` to the end of its block."""

    def __init__(
        self, session: Session, name: Callable[[], str], ranks: Sequence[int] = ()
    ) -> None:
        """Prepares a wait.

        Args:
            name: Returns a description of the awaited event.
            ranks: The workers whose models are awaited.
        """
        self._session = session
        self._name = name
        self._ranks = tuple(ranks)

    def __enter__(self) -> LongWait:
        """Begins the wait."""
        timeline = self._session.timeline
        self._begin_ns = 0 if timeline is None else timeline.now_ns()
        self._started_s = time.monotonic()
        self._ask_s, self._say_s = ASK_AFTER_S, SAY_AFTER_S
        return self

    def check(self) -> None:
        """Asks for news and reports the wait, where it is time; called several times a second.

        Raises:
            PacelineError: This worker is no longer part of the job.
            ServerUnavailableError: The first shard is silent too, so the wait may have no end.
        """
        session = self._session
        session.require_own()
        session.check()
        waited_s = time.monotonic() - self._started_s
        first = session.links[0]
        if has_no_end(waited_s, first.silent_s, session.lease_s, first.patience.limit_s):
            self._ask_first_shard(waited_s)
        if waited_s >= self._ask_s:
            self._ask_s *= 2
            session.heartbeats.awaits = self._ranks
            session.heartbeats.hurry()  # The other may have left, or been found dead.
        if waited_s >= self._say_s:
            self._say_s *= 2
            what = self._name()
            session.waits = f"{what}, for {waited_s:.0f} s"
            log.warning("worker %d has waited %.0f s for %s", session.rank, waited_s, what)

    def _ask_first_shard(self, waited_s: float) -> None:
        """Asks the shard that knows who is lost; this process may itself have been stopped."""
        try:
            self._session.live()
        except ServerUnavailableError as problem:
            raise ServerUnavailableError(
                f"worker {self._session.rank} has waited {waited_s:.0f} s for {self._name()}, and "
                f"cannot learn whether it is lost: {problem}"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._session.pace.waited_for_peer(time.monotonic() - self._started_s)
        self._session.waits, self._session.heartbeats.awaits = "", ()
        if self._session.timeline is not None:
            self._session.timeline.span("wait", self._begin_ns, what=self._name())
