"""The gradients of a step on their way from `.grad` to the shards: during backward, or at `step()`.

With overlap a slice leaves when backward has made its last gradient; what is left leaves at
`step()`. Without it all gradients are looked at before the first one leaves, so that a step with a
NaN can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pscore.errors import GradientError
from pscore.types import Role
from psworker.training.overlap import INSTEAD, Overlap
from psworker.training.table import TrainingTable


class Gradients:
    """The gradients of one step."""

    def __init__(
        self,
        table: TrainingTable,
        overlap: Overlap,
        begin: Callable[[], object],
    ) -> None:
        """Starts before the first step.

        Args:
            table: The table that is trained.
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
        self._kept: set[int] = set()  # Parameters that had left before an error in the step.
        slices = table.layout.slices
        self._index = {id(parameter): i for i, parameter in enumerate(table.flat.parameters)}
        self._missing = [0] * len(slices)  # Gradients of each slice still to come.
        self._slices_of: list[list[int]] = [[] for _ in table.flat.parameters]
        for spec in slices:
            for segment in spec.segments:
                self._slices_of[segment.tensor].append(spec.index)
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
            hook: Calls `made`.
        """
        if self.overlap.is_wanted:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                for parameter in self._flat.parameters
            ]

    def unwatch(self) -> None:
        """Removes what `watch` has added to the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def made(self, parameter: torch.Tensor) -> None:
        """Sends what `parameter` completes, whose gradient backward has made.

        Raises:
            GradientError: It holds NaN or Inf, or has left already in this step.
            ConfigError: A hyper-parameter is wrong.
            PacelineError: A shard refused something, or nobody answers.
        """
        if self._replica.plan().push is not Role.GRADIENT:
            return
        index = self._index[id(parameter)]
        if not self.overlap.has_begun:
            self._begin()
        self.overlap.made(index, self._flat.parameters[index])
        if index not in self._kept:
            self._leave_early(index)

    def _leave_early(self, index: int) -> None:
        """Gathers one gradient during backward, and pushes the slices that it completes."""
        self._gather([index])
        lent = self._flat.lent
        if lent.takes(index) and self._lends(index):
            lent.lend(index)
        if lent.has(index):
            lent.stamp(index)
        self.overlap.moved(index, self._flat.parameters[index])
        for part in self._slices_of[index]:
            self._missing[part] -= 1
            is_ready = self._missing[part] == 0 and part not in self._pushed
            if is_ready and self._exchange.has_landed(part):
                self._push(part, in_backward=True)  # Else `step` does, which may wait.

    # ----- at the end of a step

    def check(self) -> None:
        """Checks that what has left during backward is what the gradients are now.

        Raises:
            GradientError: The script has changed one of them.
        """
        changed = self._flat.changed_grad(
            index
            for index in self.overlap.check(self._flat.parameters)
            if index in self._gathered and index not in self._kept
        )
        if changed is not None:
            self.overlap.refuse(changed)

    def push_rest(self) -> None:
        """Sends the gradients that have not left during backward.

        With overlap one slice is on its way while the next is looked at; else all are looked at
        first, so that the step can be left out.
        """
        if not self.overlap.is_wanted:
            self._gather(range(len(self._flat.parameters)))
            plan = self._replica.plan()
            if plan.compress or plan.flush:
                self._exchange.payloads.require_room(self._table.grads(), self._flat.present)
        for index in self._replica.front_first():
            if index not in self._pushed:
                self._gather([part.tensor for part in self._table.layout.slices[index].segments])
                self._push(index)

    def push_none(self) -> None:
        """Takes part in the step without a gradient.

        Raises:
            GradientError: Some have left already.
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
        self._take_anew(set())

    def begin_again(self) -> None:
        """Takes the step's gradients anew, but for slices that have left: they keep theirs."""
        self._flat.lent.part_all()  # Shards may still read what lies there.
        slices = enumerate(self._slices_of)
        self._take_anew({index for index, parts in slices if self._pushed.issuperset(parts)})

    def _take_anew(self, kept: set[int]) -> None:
        self._kept, self._gathered = kept, set(kept)
        self.overlap.forget()
        for spec in self._table.layout.slices:
            self._missing[spec.index] = len(spec.segments)

    def settle(self) -> None:
        """Waits until the script may write to each `.grad` again."""
        for index in self._flat.lent.end_step():
            self._await_room(index)

    # ----- inside

    def _await_room(self, index: int) -> None:
        """Waits until the former gradient of a parameter has left the flat vector."""
        for part in self._slices_of[index]:
            self._exchange.acknowledged(part)

    def _gather(self, indices: Sequence[int]) -> None:
        """Brings gradients into the flat vector, once, after the former ones have left it."""
        lent, made = self._flat.lent, []
        indices = [index for index in indices if index not in self._gathered]
        for index in indices:
            self._await_room(index)
            if self._flat.parameters[index].grad is None:
                self._flat.clear_grad(index)
                continue
            made.append(index)
            if lent.has(index) and not self._lends(index):
                lent.part(index)
        self._flat.gather_grads(made, self._replica.step)
        self._gathered.update(indices)

    def _lends(self, index: int) -> bool:
        """Whether a gradient is acknowledged by the end of the step, or soon after it has left."""
        plan = self._replica.plan()
        waits = plan.block and plan.pull
        return waits or self._exchange.maps_grads(self._slices_of[index])

    def _push(self, index: int, *, in_backward: bool = False, is_empty: bool = False) -> None:
        """Sends one slice, after a pull of it that is still under way."""
        self._exchange.run(self._replica.land(index))
        present, active = self._flat.present(index), self._replica.parts[index].active
        present = 0 if is_empty else present
        active[:] = [present >> position & 1 for position in range(len(active))]
        flat, samples = (
            self._flat.grads_of(index),
            0.0 if is_empty else self._table.progress.samples,
        )
        self._replica.push(index, flat, present, samples, self._exchange, in_backward=in_backward)
        self._pushed.add(index)
