"""Repetition of calls to one shard while it does not answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from pscore.awake import awake_s
from pscore.errors import (
    DamagedError,
    PacelineError,
    ServerUnavailableError,
    TransportError,
)
from pscore.net import rpc
from pscore.net.addresses import explain_silence, is_closed
from psworker.transports.interrupts import takes_effect

log = logging.getLogger("paceline")
T = TypeVar("T")
CALL_TIMEOUT_S = 20.0
DELAY_S = 0.1
DELAY_S_MAX = 2.0
SAY_AFTER_S = 5.0


class RetryPolicy:
    """Repeats calls to one address until they are answered or the time limit is over.

    Attributes:
        limit_s: Longest time without an answer, in seconds.
        heard_s: Time of the shard's last answer of any kind; of the monotonic clock.
        is_over: Set when the link closes: then nothing is repeated.
        delay_s_max: Longest pause between two attempts, in seconds.
    """

    def __init__(
        self,
        address: str,
        limit_s: float,
        explain: Callable[[], PacelineError | None] = lambda: None,
    ) -> None:
        """Sets the limit for calls to `address`.

        Args:
            limit_s: Longest time without an answer, in seconds.
            explain: Returns the reason why further attempts are useless, or None; asked once for
                each call.
        """
        self._explain = explain
        self.address = address
        self.limit_s = limit_s
        self.heard_s = time.monotonic()
        self.is_over = False
        self.delay_s_max = DELAY_S_MAX
        self._is_known = False  # Whether a shard has answered, or its absence was logged.

    def call(self, attempt: Callable[[], T]) -> T:
        """Returns the result of the first `attempt` that fails neither by network nor by bytes.

        Raises:
            PacelineError: The shard refused, or did not answer in time.
        """
        started_s = awake_s()
        delay_s, said_s = DELAY_S, SAY_AFTER_S
        is_explained = False
        while True:
            tried_s = time.monotonic()
            try:
                result = attempt()
                self._is_known = True
                return result
            except grpc.RpcError as failure:
                error = rpc.error_of(failure, self.address)
                if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.heard_s > tried_s:
                    started_s = awake_s()  # The shard lives, and only this call has to wait.
            except (TransportError, DamagedError) as failure:
                error = failure
            if self.is_over or not isinstance(error, TransportError | DamagedError):
                raise error
            if not is_explained:
                is_explained = True
                if reason := self._explain():
                    raise reason
                self._tell_closed()
            waited_s = awake_s() - started_s
            if waited_s >= self.limit_s:
                raise self._unavailable(waited_s, error)
            if waited_s >= said_s:
                said_s *= 2
                why = explain_silence(self.address)
                text = "%s has not answered for %.0f s; this side waits %.0f s more%s"
                left_s = self.limit_s - waited_s
                log.warning(text, self.address, waited_s, left_s, why and f": {why}")
            with takes_effect():
                time.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self.delay_s_max)

    def _tell_closed(self) -> None:
        """Logs once, before the first answer, that the address is closed."""
        is_new, self._is_known = not self._is_known, True
        if is_new and is_closed(self.address):
            text = "nothing listens on %s; this side waits %.0f s for a shard to start there"
            log.warning(text, self.address, self.limit_s)

    def _unavailable(self, waited_s: float, error: PacelineError) -> ServerUnavailableError:
        port = self.address.rpartition(":")[2]
        remedy = explain_silence(self.address) or f"start one with `psserver start --port {port}`"
        return ServerUnavailableError(
            f"no shard answers at {self.address} after {waited_s:.1f} s ({error}); {remedy}; "
            "its address comes from PACELINE_SERVERS or servers="
        )
