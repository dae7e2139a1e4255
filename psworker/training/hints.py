"""Hints about two mistakes of a script that raise no error, each given once.

A step without any gradient usually means that `backward` was left out, or came before `zero_grad`.
And a gradient that was changed between `backward` and `step` was usually clipped with torch's
function, which sees one worker's gradient: DDP's scripts clip the mean with the same line.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from pscore.rules.base import takes_all
from pscore.timing.waiting import PaceSums, advice_line
from psworker.training.gradients.gradients import Gradients
from psworker.training.table import TrainingTable

log = logging.getLogger("paceline")
NO_GRADIENT = (
    "step() found no gradient in any parameter: did backward() run since zero_grad()? The step "
    "counts, and this worker adds nothing to it; skip_step() ends a step whose batch cannot be used"
)
CHANGED = (
    "a gradient was changed between backward() and step(): if that is "
    "torch.nn.utils.clip_grad_norm_, it clips the gradient of each worker before the mean is "
    "taken, where DDP clips the mean; psworker.clip_grad_norm_(optimizer, max_norm) does as DDP "
    "(docs/training.md)"
)


class Hints:
    """The hints of one wrapper."""

    def __init__(self) -> None:
        """Starts without a table."""
        self._given: set[str] = set()
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._made: int | None = None  # Version of the first gradient when backward has made it.

    def follow(self, table: TrainingTable, gradients: Gradients) -> None:
        """Watches the gradients of a table from now on, instead of those of a former one.

        Args:
            table: The table that is trained.
            gradients: Its gradients; with overlap each change of them is an error, not a hint.
        """
        self.end()
        self._table, self._gradients = table, gradients
        has_others = table.session.num_processes > 1
        if has_others and not (gradients.overlap.is_wanted or table.flat.is_sharded):
            first: Any = table.flat.parameters[0]
            self._handle = first.register_post_accumulate_grad_hook(self._note)

    def check(self) -> None:
        """Gives the hints that apply to the step that begins."""
        parameters, made = self._table.flat.parameters, self._made
        self._made = None
        if all(parameter.grad is None for parameter in parameters):
            self._give(NO_GRADIENT)
        elif made is not None and takes_all(self._table.rule):
            grad, attempts = parameters[0].grad, self._gradients.attempts
            if grad is not None and grad._version != made and attempts.clipped != attempts.number:
                self._give(CHANGED)

    def sum_up(self) -> None:
        """Logs, on the first worker, the share of its waits and a mode that would take less."""
        session, pace = self._table.session, self._table.session.pace.message()
        own = PaceSums(
            rank=session.rank,
            num_steps=pace.num_steps,
            steps_s=pace.steps_s,
            waits_s=pace.waits_s,
            requests_s=pace.requests_s,
            step_s=pace.step_s,
        )
        line = advice_line(str(self._table.rule), [own])
        if line and session.rank == 0:
            log.info("%s", line)

    def end(self) -> None:
        """Watches no gradient any more."""
        if self._handle is not None:
            self._handle.remove()

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._made = parameter.grad._version

    def _give(self, hint: str) -> None:
        if hint not in self._given:
            self._given.add(hint)
            log.warning("%s", hint)
