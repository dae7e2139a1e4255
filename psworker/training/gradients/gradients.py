"""Gathers the gradients of a step from `.grad` and pushes them, during backward or at `step()`.

With overlap a slice leaves when backward has made its last gradient; the others leave at `step()`.
Without overlap all gradients are checked before the first one leaves, so that a step with a NaN can
be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pscore.errors import GradientError
from pscore.types import Role
from psworker.model.device import is_on_device
from psworker.training.gradients.attempts import Attempts
from psworker.training.gradients.overlap import INSTEAD, EarlyGradients
from psworker.training.table import TrainingTable
from psworker.transports.interrupts import held


class Gradients:
    """The gradients of one step."""

    def __init__(
        self, table: TrainingTable, overlap: EarlyGradients, begin: Callable[[], object]
    ) -> None:
        """Starts before the first step.

        Args:
            overlap: Whether gradients leave during backward.
            begin: Called before the first gradient of a step leaves during backward.
        """
        self.overlap = overlap
        self._table = table
        self._flat = table.flat
        self._exchange = table.exchange
        self._replica = table.replica
        self._begin = begin
        self._gathered: set[int] = set()  # Parameters.
        self._pushed: set[int] = set()  # Slices.
        self._ready: list[int] = []  # Slices with all gradients that an earlier pull holds back.
        self._kept: set[int] = set()  # Parameters that had left before an error in the step.
        slices = table.layout.slices
        self._index = {id(parameter): i for i, parameter in enumerate(table.flat.parameters)}
        self._missing = [0] * len(slices)  # Gradients of each slice still to come.
        self._slices_of: list[list[int]] = [[] for _ in table.flat.parameters]
        self._tensors_of = [[segment.tensor for segment in spec.segments] for spec in slices]
        for part, tensors in enumerate(self._tensors_of):
            for tensor in tensors:
                self._slices_of[tensor].append(part)
        self.accumulates = False  # Whether backward only adds to `.grad`.
        # Numbers of the rounds in which workers agree before a step.
        self.attempts = Attempts(table.session, table.replica)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.end()

    @property
    def have_left(self) -> bool:
        """Whether a part of this step has been pushed."""
        return bool(self._pushed)

    # ----- during backward

    def watch(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Registers `hook` for each parameter's gradient with autograd, if overlap is wanted.

        Args:
            hook: A function that calls `made`.
        """
        if self.overlap.is_wanted:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                for parameter in self._flat.parameters
            ]

    def unwatch(self) -> None:
        """Removes the hooks that `watch` has registered."""
        while self._handles:
            self._handles.pop().remove()

    def made(self, parameter: torch.Tensor) -> None:
        """Pushes the slices that `parameter` completes; backward has made its gradient.

        Raises:
            GradientError: It holds NaN or Inf, or has left already in this step.
            ConfigError: A hyper-parameter is wrong.
            PacelineError: A shard refused something, or does not answer.
        """
        if self.accumulates or self._replica.plan().push is not Role.GRADIENT:
            return
        index = self._index[id(parameter)]
        if not self.overlap.has_begun:
            self._begin()
        self.overlap.made(index, self._flat.parameters[index])
        if index not in self._kept:
            self._leave_early(index)

    def _leave_early(self, index: int) -> None:
        """Pushes the slices that a gradient completes during backward.

        On a CPU it is gathered at once, while it is in the cache. A GPU gathers those of a slice
        together: each call from Python takes longer than most of these copies.
        """
        if not is_on_device(self._flat.grads):
            self._gather([index])
            views = self._flat.views
            if views.can_attach(index) and self._may_attach(index):
                views.attach(index)
            if views.has(index):
                views.stamp(index)
            self.overlap.moved(index, self._flat.parameters[index])
        for part in self._slices_of[index]:
            self._missing[part] -= 1
            if self._missing[part] == 0 and part not in self._pushed:
                self._ready.append(part)
        if not self._ready:  # After most gradients.
            return
        with held(), self._exchange.together:
            for part in [part for part in self._ready if self._exchange.has_landed(part)]:
                self._ready.remove(part)
                self._gather(self._tensors_of[part])
                self._push(part, in_backward=True)  # `step` pushes the others: it may wait.

    # ----- at the end of a step

    def check(self) -> None:
        """Checks that gradients that left during backward have not changed since.

        A GPU compares them while the step continues; `check_before` has the result.

        Raises:
            GradientError: The script has changed one of them, or one of the step before.
        """
        self.check_before(waits=True)
        changed = self._flat.changed_grad(
            index
            for index in self.overlap.check(self._flat.parameters)
            if index in self._gathered and index not in self._kept
        )
        if changed is not None:
            self.overlap.refuse(changed)

    def check_before(self, *, waits: bool = False) -> None:
        """Raises the error that the last comparison on a GPU has found, if it is over.

        Args:
            waits: Whether to wait for it.

        Raises:
            GradientError: The script has changed a gradient that had left.
        """
        changed = self._flat.changed_before(waits=waits)
        if changed is not None:
            self.overlap.refuse(changed)

    def push_rest(self) -> None:
        """Pushes the gradients that did not leave during backward.

        With overlap one slice is sent while the next is checked; else all are checked first, so
        that the step can be left out. Slices leave in the order in which their earlier pulls land.
        Where a step does not wait for its own pulls, each slice's part of it ends at once.
        """
        replica, exchange = self._replica, self._exchange
        left = [index for index in replica.front_first() if index not in self._pushed]
        if not (self.overlap.is_wanted and replica.plan().block):
            self._check_all(left)
        for index in self._pushed:
            self._end_slice(index)
        with exchange.together:
            while left:
                index = exchange.next_landed(left)
                left.remove(index)
                self._gather(self._tensors_of[index])
                self._push(index)
                self._end_slice(index)

    def push_none(self) -> None:
        """Ends the step without a gradient of this worker.

        Raises:
            GradientError: Some gradients have left already.
        """
        if self._pushed:
            raise GradientError(
                "a part of this step's gradients was pushed during backward, so the step cannot "
                f"be left out; {INSTEAD}"
            )
        for index in self._replica.front_first():
            self._push(index, is_empty=True)

    def end(self) -> None:
        """Ends the step."""
        self._pushed.clear()
        self._reset(set())

    def begin_again(self) -> None:
        """Starts the step again, except for slices that have left: they keep their gradients."""
        self._flat.views.detach_all()  # Shards may still read that memory.
        slices = enumerate(self._slices_of)
        self._reset({index for index, parts in slices if self._pushed.issuperset(parts)})

    def _reset(self, kept: set[int]) -> None:
        self._kept, self._gathered = kept, set(kept)
        self.overlap.forget()
        self._ready.clear()
        for spec in self._table.layout.slices:
            self._missing[spec.index] = len(spec.segments)

    def settle(self) -> None:
        """Waits until the script may write to each `.grad` again."""
        for index in self._flat.views.end_step():
            self._await_room(index)

    def _await_room(self, index: int) -> None:
        """Waits until the previous gradient of a parameter has left the flat vector."""
        for part in self._slices_of[index]:
            self._exchange.acknowledged(part)

    def _gather(self, indices: Sequence[int]) -> None:
        """Copies gradients into the flat vector, once, after the previous ones have left it."""
        views, made = self._flat.views, []
        indices = [index for index in indices if index not in self._gathered]
        for index in indices:
            self._await_room(index)
            if self._flat.parameters[index].grad is None:
                self._flat.clear_grad(index)
                continue
            made.append(index)
            if views.has(index) and not self._may_attach(index):
                views.detach(index)
        self._flat.gather_grads(made, self._replica.step)
        self._gathered.update(indices)

    def _may_attach(self, index: int) -> bool:
        """Returns whether a gradient is acknowledged by the end of the step, or soon after."""
        plan = self._replica.plan()
        waits = plan.block and plan.pull
        return waits or self._exchange.maps_grads(self._slices_of[index])

    def _push(self, index: int, *, in_backward: bool = False, is_empty: bool = False) -> None:
        """Pushes one slice, after waiting for a pull of it that is under way."""
        self._exchange.run(self._replica.land(index))
        present, active = self._present(index), self._replica.parts[index].active
        present = 0 if is_empty else present
        active[:] = [present >> position & 1 for position in range(len(active))]
        flat, samples = self._flat.grads_of(index), 0.0 if is_empty else self._weight()
        self._replica.push(index, flat, present, samples, self._exchange, in_backward=in_backward)
        self._pushed.add(index)

    def _check_all(self, left: Sequence[int]) -> None:
        """Refuses a gradient of the slices that are left before the step changes anything."""
        self._gather(range(len(self._flat.parameters)))
        plan = self._replica.plan()
        if plan.compress or plan.flush:
            grads = {index: self._flat.grads_of(index) for index in left}
            self._exchange.payloads.require_room(grads, self._flat.present)

    def _end_slice(self, index: int) -> None:
        """Ends the step of a slice that has left, where the mode allows it; backward is over."""
        self._replica.end_slice(index, self._flat.grads_of(index), self._exchange)

    def _present(self, index: int) -> int:
        """Returns which segments of a slice have a gradient, as `FlatModel.present` does."""
        return self._flat.present(index)

    def _weight(self) -> float:
        """Returns the weight of the step's gradient in the mean."""
        return self._table.progress.samples
