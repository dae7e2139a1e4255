"""One step of training: the work of `optimizer.step()` and `optimizer.skip_step()`, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import LOST, GradientError
from pscore.observe.timeline import recorded
from pscore.types import Role
from psworker.connection.accounts.left_out import LeftOut
from psworker.connection.accounts.trace import RoundSpans
from psworker.job.companions import Companion
from psworker.training.arguments import list_trained, require_groups
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.gradients import clipping, scaling
from psworker.training.gradients.gradients import Gradients
from psworker.training.gradients.scaling import Overflow
from psworker.training.state.buffers import Buffers
from psworker.training.state.global_weights import warn_of_changes
from psworker.training.table import TrainingTable


class Steps:
    """Makes the steps of one worker."""

    def __init__(
        self,
        wrapper: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        table: TrainingTable,
        gradients: Gradients,
        buffers: Buffers,
        recovery: WorkerRecovery,
        left_out: LeftOut,
        companions: Sequence[Companion],
    ) -> None:
        """Starts before the first step.

        Args:
            wrapper: The optimizer that the script holds; its groups have the hyper-parameters.
            inner: The user's own optimizer, which some modes run on the worker.
        """
        self._wrapper = wrapper
        self._inner = inner
        self._table = table
        self._gradients = gradients
        self._buffers = buffers
        self._recovery = recovery
        self._left_out = left_out
        self._companions = companions
        timeline = table.session.timeline
        self._trained = list_trained(wrapper.param_groups)
        self._rounds = None if timeline is None else RoundSpans(timeline)

    def run(self, grad_scaler: GradScaler | None, *, skips: bool = False) -> None:
        """Makes one step, or leaves it out; after an error that shards may know of, rejoins."""
        table, recovery = self._table, self._recovery
        timeline, number = table.session.timeline, table.replica.step
        begin_ns = 0 if timeline is None else timeline.now_ns()
        refused = False
        with recovery.recovers():
            try:
                refused = self._make_step(grad_scaler, skips=skips)
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
                recovery.look_around()
            else:
                recovery.come_back()
                self._left_out.given_up()
            table.exchange.payloads.raise_refused()
            if refused:
                raise GradientError("another process of this worker's group refused its gradient")
            self._gradients.check_before()
        table.session.pace.round_steps = table.replica.round_steps or 0
        table.session.passed.at_start = False
        table.session.pace.end_step()
        table.exchange.traffic.num_steps += 1
        if timeline is not None:
            timeline.span("optimizer.step", begin_ns, step=number)

    def _note_rounds(self, step: int) -> None:
        """Records the rounds that a step has ended, in a timeline."""
        opened = self._table.replica.round
        if self._rounds is not None and opened.role is not None:
            self._rounds.end_step(step, opened.num_inner_of)

    def _make_step(self, grad_scaler: GradScaler | None, *, skips: bool) -> bool:
        """Makes a step, unless all workers leave it out, or this one has to rejoin first.

        Returns:
            Whether another process of this worker has refused a gradient that was on a GPU.
        """
        if self._recovery.failure is not None:
            if grad_scaler is not None:
                scaling.unscale(self._wrapper, grad_scaler)
            return False
        self._check()
        overflow = Overflow.NONE if grad_scaler is None else self._find_overflow(grad_scaler)
        if overflow is not Overflow.ALL:
            self._finish_step(skips=skips or overflow is Overflow.OWN)
        return False

    def _check(self) -> None:
        """Checks what can be wrong before a step with gradients, weights and hyper-parameters."""
        if self._table.set_hyper(self._wrapper.param_groups):
            self._gradients.overlap.changed("a learning rate or other hyper-parameter")
        require_groups(self._wrapper.param_groups, self._trained, self._inner.param_groups)
        self._gradients.check()
        self._table.flat.check_weights()
        warn_of_changes(self._table)
        for companion in self._companions:
            companion.prepare()

    def _find_overflow(self, scaler: GradScaler) -> Overflow:
        """Unscales the gradients, and returns what is to be left out of the step."""
        if self._gradients.overlap.has_begun:
            scaling.refuse_early()
        return scaling.find_overflow(self._wrapper, scaler, self._table, self._gradients.attempts)

    def _push(self, *, skips: bool) -> None:
        """Pushes the gradients that have not left during backward, or none of them.

        A worker that skips the step reports it to those that may agree on a scale or a norm.
        """
        if skips:
            scaling.pass_by(self._table, self._gradients.attempts)
            clipping.pass_by(self._table, self._gradients)
            self._gradients.push_none()
        else:
            self._gradients.push_rest()

    def _finish_step(self, *, skips: bool) -> None:
        """Sends the remaining gradients, and brings in the weights for the next step."""
        table = self._table
        plan, number = table.replica.plan(), table.replica.step
        if skips and not self._table.rule.by_step:
            for companion in self._companions:
                companion.push(0.0, skips=True)
            return  # No worker waits for this worker's gradient.
        if plan.push is Role.GRADIENT:
            self._push(skips=skips)
        for companion in self._companions:
            companion.push(table.progress.samples, skips=skips)
        if plan.inner:
            table.local_step.make(skips=skips)
        table.finish_step(table.progress.samples)
        table.local_step.begin()
        table.show_weights()
        self._buffers.post(0.0 if skips else table.progress.samples)
        self._gradients.settle()  # From here on the script may write to `.grad`.
        for companion in self._companions:
            companion.finish()
        if table.means is not None:
            table.means.show()
            with recorded(table.session.timeline, "local update", step=number):
                self._inner.step()
            table.flat.gather_weights()
            table.flat.note_weights()
