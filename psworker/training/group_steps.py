"""One step of training where several processes are one worker.

Twice in a step the processes agree (agreement.py): when each has its gradients, so that a step is
made by all or by none; and when each has pushed and pulled its own slices, so that an error in one
of them is an error in all. Then the weights of all slices are copied to all processes.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from pscore.errors import LOST, GradientError, ReplacedError
from pscore.types import Role
from psworker.training.gradients import scaling
from psworker.training.gradients.agreement import together
from psworker.training.gradients.group import GroupGradients
from psworker.training.gradients.scaling import Overflow
from psworker.training.state.global_weights import warn_of_changes
from psworker.training.steps import Steps


class GroupSteps(Steps):
    """Makes the steps of one process of a group."""

    def __init__(self, gradients: GroupGradients, *parts: Any) -> None:
        """Starts before the first step.

        Args:
            gradients: The gradients of the step under way.
            parts: Arguments of `Steps`.
        """
        super().__init__(*parts)
        self._group = gradients.group
        self._sums = gradients

    def run(self, grad_scaler: GradScaler | None, *, skips: bool = False) -> None:
        """Makes one step, or leaves it out; after an error that shards may know of, rejoins."""
        table, recovery = self._table, self._recovery
        timeline, number = table.session.timeline, table.replica.step
        begin_ns = 0 if timeline is None else timeline.now_ns()
        refused = False
        with recovery.recovers():
            try:
                refused = self._make_group_step(grad_scaler, skips=skips)
            except LOST as problem:
                if recovery.failure is None:
                    recovery.note(problem, number)
            if recovery.failure is None:
                table.exchange.missed.end_step()
                table.progress.locate(number)
                self._note_rounds(number)
                self._gradients.end()
                self._left_out.ended()
                # For a scheduler that was made before the wrapper, which warns without it.
                self._inner._opt_called = True  # type: ignore[attr-defined]
            else:
                recovery.come_back()
                self._left_out.given_up()
            table.exchange.payloads.raise_refused()
            if refused:
                raise GradientError("another process of this worker's group refused its gradient")
        table.session.pace.end_step()
        table.exchange.traffic.num_steps += 1
        if timeline is not None:
            timeline.span("optimizer.step", begin_ns, step=number)

    def _make_group_step(self, scaler: GradScaler | None, *, skips: bool) -> bool:
        """Makes a step; returns whether a process has refused a gradient that was on a GPU."""
        table = self._table
        if scaler is not None:
            self._together(lambda: self._check(scaler), 0)
            overflow = scaling.find_overflow(self._wrapper, scaler, table, self._gradients.attempts)
            if overflow is Overflow.ALL:
                return False
            skips = skips or overflow is Overflow.OWN
        self._sums.complete(skips=skips)
        rows = self._together(lambda: self._prepare(skips=skips), self._sums.num_numbers)
        if self._sums.agree(rows) and not table.rule.by_step:
            return False  # No worker waits for this worker's gradient.
        skips = self._sums.all_skip
        plan = table.replica.plan()
        changes = plan.push is not None or plan.lands  # Inner steps are the same everywhere.
        ends = self._together(lambda: self._push_and_pull(skips=skips), 2)
        table.parts.agree([given for given, _ in ends])
        if changes:
            table.parts.gather()
            table.show_weights()
        table.flat.note_weights()
        self._buffers.post(0.0 if skips else table.progress.samples)
        return any(refused for _, refused in ends)

    def _together(self, part: Any, count: int) -> list[list[float]]:
        return together(self._group, part, count, lambda: self._gradients.have_left)

    def _check(self, scaler: GradScaler | None) -> list[float]:
        """Checks what can be wrong before a step, and unscales the gradients."""
        failure = self._recovery.failure
        if failure is not None:
            raise ReplacedError(str(failure.problem))
        if self._table.set_hyper(self._wrapper.param_groups):
            self._gradients.overlap.changed("a learning rate or other hyper-parameter")
        self._gradients.check()
        self._table.flat.check_weights()
        warn_of_changes(self._table)
        if scaler is not None:
            if self._gradients.overlap.has_begun:
                scaling.refuse_early()
            scaling.unscale(self._wrapper, scaler)
        return []

    def _prepare(self, *, skips: bool) -> list[float]:
        self._check(None)
        return self._sums.prepare(skips=skips)

    def _push_and_pull(self, *, skips: bool) -> list[float]:
        """Pushes and pulls this process's slices; returns its next push, and a refusal."""
        table, plan = self._table, self._table.replica.plan()
        if plan.push is Role.GRADIENT:
            if skips:
                self._pass_by()
                self._sums.push_none()
            else:
                self._sums.push_rest()
        if plan.inner and not skips:
            self._sums.average_all()
            table.local_step.make(skips=False)
        here = table.progress.samples * self._group.size  # A step that all leave out counts too.
        table.finish_step(here if skips else self._sums.samples)
        return [table.parts.next_push, float(table.exchange.payloads.has_refused)]
