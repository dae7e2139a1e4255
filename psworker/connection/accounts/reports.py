"""The values that a script reports of its training (`optimizer.report`), for status and metrics.

They travel with the heartbeats to the first shard, which shows the newest. Nothing waits for them,
and training does not depend on them.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pscore.errors import ConfigError
from pscore.types import REPORTED_LENGTH_MAX, REPORTED_MAX
from psworker.connection.accounts.traffic import Traffic

log = logging.getLogger("paceline")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOKENS, RATE = "tokens", "tokens_per_s"
PUSHED, PULLED, OF_DDP = (f"{what}_bytes_per_token" for what in ("pushed", "pulled", "ddp"))
ADDED = (RATE, PUSHED, PULLED, OF_DDP)  # Names of values that the worker computes.
WINDOW_S = 20.0  # The rate is that of so many seconds.
APART_S = 0.25  # Counts that are kept for it are at least so far apart.


class Reports:
    """The newest values of one worker; a heartbeat's thread reads them.

    Attributes:
        values: By name. Replaced as a whole, because another thread reads it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Starts without values; `now` returns seconds."""
        self.values: Mapping[str, float] = {}
        self._now = now
        self._counts: deque[tuple[float, float]] = deque()  # Times, and all tokens until then.
        self._warned: set[str] = set()

    def put(self, given: Mapping[str, Any]) -> None:
        """Replaces the values of some names; one that is not finite is left out, with a warning.

        Args:
            given: Numbers, or tensors of one element. `tokens` is the number since the last
                report, and is shown as a sum and as a rate.

        Raises:
            ConfigError: A name or a value is wrong, or there are too many names.
        """
        fresh = {name: _number(name, value) for name, value in given.items()}
        for name in [name for name, value in fresh.items() if not math.isfinite(value)]:
            self._warn(name, fresh.pop(name))
        if TOKENS in fresh:
            if fresh[TOKENS] < 0:
                raise ConfigError(f"tokens is {fresh[TOKENS]:g}, must be 0 or more")
            fresh |= self._count(fresh[TOKENS])
        values = {**self.values, **fresh}
        names = [name for name in values if name not in ADDED]
        if len(names) > REPORTED_MAX:
            raise ConfigError(
                f"report() has {len(names)} names, {REPORTED_MAX} are possible: {', '.join(names)}"
            )
        self.values = values

    def put_bytes(self, traffic: Traffic, ddp_nbytes: float) -> None:
        """Replaces the bytes per token, if there are tokens: payloads of all steps so far.

        Args:
            traffic: The bytes of this worker, and its steps.
            ddp_nbytes: Bytes that a worker of DDP would send in a step, and receive.
        """
        tokens = self.values.get(TOKENS, 0.0)
        if tokens:
            self.values = {
                **self.values,
                PUSHED: traffic.pushed_nbytes / tokens,
                PULLED: traffic.pulled_nbytes / tokens,
                OF_DDP: ddp_nbytes * traffic.num_steps / tokens,
            }

    def _count(self, tokens: float) -> dict[str, float]:
        """Returns all tokens so far, and their rate in the last seconds, once there is one."""
        now_s, total = self._now(), self.values.get(TOKENS, 0.0) + tokens
        counts = self._counts
        while len(counts) > 1 and now_s - counts[1][0] > WINDOW_S:
            counts.popleft()
        rates: dict[str, float] = {}
        if counts and now_s > counts[0][0]:
            since_s, before = counts[0]
            rates = {RATE: (total - before) / (now_s - since_s)}
        if not counts or now_s - counts[-1][0] >= APART_S:
            counts.append((now_s, total))
        return {TOKENS: total, **rates}

    def _warn(self, name: str, value: float) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("report(): %s is %s, its last finite value stays", name, value)


def _number(name: str, value: Any) -> float:
    """Returns a reported value as a number.

    Raises:
        ConfigError: Name or value cannot be reported.
    """
    if not NAME.fullmatch(name) or len(name) > REPORTED_LENGTH_MAX or name in ADDED:
        raise ConfigError(
            f"report() has the name {name[:REPORTED_LENGTH_MAX]!r}, must be an identifier of at "
            f"most {REPORTED_LENGTH_MAX} letters, digits and _, and not {', '.join(ADDED)}"
        )
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"report() has {name} of type {type(value).__name__}, must be a number or a tensor of "
            "one element"
        ) from None
