"""One step of training where several processes are one worker.

Twice in a step the processes agree (agreement.py): when each has its gradients, so that a step is
made by all or by none; and when each has pushed and pulled its own slices, so that an error in one
of them is an error in all. Then the weights of all slices are copied to all processes.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from pscore.types import Role
from psworker.training.gradients import scaling
from psworker.training.gradients.agreement import run_in_group
from psworker.training.gradients.group import GroupGradients
from psworker.training.gradients.scaling import Overflow
from psworker.training.steps import Steps


class GroupSteps(Steps):
    """Makes the steps of one process of a group."""

    _gradients: GroupGradients

    def _make_step(self, grad_scaler: GradScaler | None, *, skips: bool) -> bool:
        """Makes a step; returns whether a process has refused a gradient that was on a GPU."""
        table, gradients = self._table, self._gradients
        if grad_scaler is not None:
            self._run_together(lambda: self._unscale(grad_scaler), 0)
            overflow = self._find_overflow(grad_scaler)
            if overflow is Overflow.ALL:
                return False
            skips = skips or overflow is Overflow.OWN
        gradients.complete(skips=skips)
        rows = self._run_together(lambda: self._prepare(skips=skips), gradients.num_numbers)
        if gradients.agree(rows) and not table.rule.by_step:
            return False  # No worker waits for this worker's gradient.
        skips = gradients.all_skip
        plan = table.replica.plan()
        changes = plan.push is not None or plan.lands  # Inner steps are the same everywhere.
        ends = self._run_together(lambda: self._push_and_pull(skips=skips), 2)
        table.parts.agree([given for given, _ in ends])
        if changes:
            table.parts.gather()
            table.show_weights()
        table.flat.note_weights()
        self._buffers.post(0.0 if skips else table.progress.samples)
        return any(refused for _, refused in ends)

    def _run_together(self, part: Any, count: int) -> list[list[float]]:
        return run_in_group(self._gradients.group, part, count, lambda: self._gradients.have_left)

    def _check(self) -> None:
        self._recovery.require_place()
        super()._check()

    def _unscale(self, scaler: GradScaler) -> list[float]:
        self._check()
        if self._gradients.overlap.has_begun:
            scaling.refuse_early()
        scaling.unscale(self._wrapper, scaler)
        return []

    def _prepare(self, *, skips: bool) -> list[float]:
        self._check()
        return self._gradients.prepare(skips=skips)

    def _push_and_pull(self, *, skips: bool) -> list[float]:
        """Pushes and pulls this process's slices; returns its next push, and a refusal."""
        table, plan = self._table, self._table.replica.plan()
        if plan.push is Role.GRADIENT:
            self._push(skips=skips)
        if plan.inner and not skips:
            self._gradients.average_all()
            table.local_step.make(skips=False)
        # A step that all leave out counts too.
        here = table.progress.samples * self._gradients.group.size
        table.finish_step(here if skips else self._gradients.samples)
        return [table.parts.next_push, float(table.exchange.payloads.has_refused)]
