"""Writes what a script reports, and the worker's pace, as scalars: for TensorBoard and the like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pscore.errors import ConfigError
from psworker.connection.accounts.reports import RATE, TOKENS
from psworker.connection.accounts.traffic import Traffic
from psworker.connection.membership.session import Session


class Writer(Protocol):
    """As much of `torch.utils.tensorboard.SummaryWriter` as is needed."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Writes one value of a step."""


class Scalars:
    """Scalars of one worker."""

    def __init__(self, writer: Writer, session: Session) -> None:
        """Starts to count the pace; raises ConfigError if `writer` has no `add_scalar`."""
        if not callable(getattr(writer, "add_scalar", None)):
            raise ConfigError(
                f"report_to() got a {type(writer).__name__}, must be a SummaryWriter: an object "
                "with add_scalar(tag, value, step)"
            )
        self._writer = writer
        self._session = session
        self._pace = session.pace.message()

    def write(self, names: Iterable[str], step: int, traffic: Traffic) -> None:
        """Writes the newest reported values of some names, and the pace since the last call.

        Args:
            step: Steps of the training behind this worker.
            traffic: The bytes of this worker so far.
        """
        values: Mapping[str, float] = self._session.heartbeats.reports.values
        extra = [RATE] if TOKENS in (names := list(names)) else []
        for name in [*names, *extra]:
            if name in values:
                self._writer.add_scalar(name, values[name], step)
        former, pace = self._pace, self._session.pace.message()
        self._pace = pace
        if count := pace.num_steps - former.num_steps:
            self._add("step_seconds", (pace.steps_s - former.steps_s) / count, step)
            self._add("wait_seconds", (pace.waits_s - former.waits_s) / count, step)
        self._add("pushed_bytes", traffic.pushed_nbytes, step)
        self._add("pulled_bytes", traffic.pulled_nbytes, step)

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(f"paceline/{name}", value, step)
