"""The gradients of a step in a group: averaged among its processes, then pushed in parts.

Each slice is added up at the process that owns it, which pushes the mean, weighted by the samples
of each process. The sums are collectives, so all processes start them in one order: with overlap
that of the flat vector, in which backward makes them; else that of the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pscore.errors import GradientError
from pscore.types import Role
from psworker.group.local_group import LocalGroup, Pending
from psworker.model.device import is_on_device
from psworker.model.finite import is_finite
from psworker.training.gradients.gradients import Gradients
from psworker.training.gradients.overlap import INSTEAD, EarlyGradients
from psworker.training.table import TrainingTable


class GroupGradients(Gradients):
    """The gradients of one step, of which this process pushes its part."""

    def __init__(
        self,
        table: TrainingTable,
        group: LocalGroup,
        overlap: EarlyGradients,
        begin: Callable[[], object],
    ) -> None:
        """Starts before the first step; arguments are those of the base class."""
        # Weight of the group's gradient in the mean; known once all have begun the step.
        self.samples = 0.0
        self.all_skip = False  # Whether every process leaves the step out.
        self.group = group
        self._sums: dict[int, Pending] = {}  # By slice, in the order of their start.
        self._problem: GradientError | None = None  # Found during backward.
        self._has_weight = False  # Whether `samples` is that of the step.
        self._samples_here = 0.0  # Samples of this process.
        self._weights: list[float] = []  # By parameter: samples of the processes that have it.
        super().__init__(table, overlap, begin)

    # ----- during backward

    def _leave_early(self, index: int) -> None:
        """Gathers one gradient during backward, and adds up the slices that are complete."""
        self._agree_on_weight(self._table.progress.samples)
        try:
            self._gather([index])
        except GradientError as problem:  # Raised at the end of the step, by all processes.
            self._problem = self._problem or problem
            self._part_of(index).fill_(torch.nan)
            self._gathered.add(index)
        self.overlap.moved(index, self._flat.parameters[index])
        for part in self._slices_of[index]:
            self._missing[part] -= 1
        while len(self._sums) < len(self._missing) and not self._missing[len(self._sums)]:
            self._start_sum(len(self._sums), self._table.progress.samples)
        self._push_early()

    def _push_early(self) -> None:
        """Pushes own slices whose sums have come: then every process has all gradients of them."""
        for index in self._table.parts.own:
            pending = self._sums.get(index)
            if pending is None or not pending.is_done():
                return
            if index in self._pushed or not self._exchange.has_landed(index):
                continue
            pending.wait()
            grad = self._flat.grads_of(index)
            if not (is_on_device(grad) or is_finite(grad)):
                return  # `step` raises the error.
            if self.samples:
                self._flat.grads_of(index).div_(self.samples)
            self._push(index, in_backward=True)

    # ----- at the end of a step

    def check(self) -> None:
        """Checks that gradients that left during backward have not changed since.

        The flat gradients hold sums by now, so a change that torch does not count is not noticed.

        Raises:
            GradientError: The script has changed one of them.
        """
        self.overlap.check(self._flat.parameters)

    def complete(self, *, skips: bool) -> None:
        """With overlap, starts the sums that backward has not started, also after an error.

        Args:
            skips: Whether this process leaves the step out.

        Raises:
            GroupError: A process of the group has ended.
        """
        if not (self.overlap.is_wanted and self._replica.plan().push is Role.GRADIENT):
            return
        samples = 0.0 if skips else self._table.progress.samples
        if skips and self._sums:
            self._problem = self._problem or GradientError(
                "a part of this step's gradients has left during backward, so the step cannot be "
                f"left out; {INSTEAD}"
            )
        self._agree_on_weight(samples)
        try:
            self._gather_all(skips=skips)
        except GradientError as problem:
            self._problem = self._problem or problem
        for index in range(len(self._sums), len(self._missing)):
            self._start_sum(index, samples)

    def prepare(self, *, skips: bool) -> list[float]:
        """Makes this process's gradients ready to be added up.

        Returns:
            `num_numbers` numbers for `agree`.

        Raises:
            GradientError: A gradient holds NaN or Inf, or has left before the step is left out.
        """
        if self._problem is not None:
            raise self._problem
        if not self._sums:
            self._gather_all(skips=skips)
        samples = 0.0 if skips else self._table.progress.samples
        has = [weight.grad is not None and not skips for weight in self._flat.parameters]
        return [float(skips), samples, *(samples * has_one for has_one in has)]

    @property
    def num_numbers(self) -> int:
        """Length of the result of `prepare`."""
        return 2 + len(self._flat.parameters)

    def agree(self, rows: Sequence[Sequence[float]]) -> bool:
        """Records the results of all `prepare`s; returns whether all processes leave the step out.

        Args:
            rows: By local rank.
        """
        totals = [sum(column) for column in zip(*rows, strict=True)]
        self.samples, self._weights = totals[1], totals[2:]
        self._samples_here = rows[self.group.rank][1]
        self.all_skip = totals[0] == self.group.size
        return self.all_skip

    def push_rest(self) -> None:
        """Adds up the slices that were not added up during backward, and pushes own ones."""
        order = range(len(self._missing) - 1, -1, -1)
        for index in order:
            if index not in self._sums:
                self._start_sum(index, self._samples_here)
        try:
            for index in self._pushed:
                self._end_slice(index)
            for index in self._replica.front_first():
                if index not in self._pushed:
                    self._sums[index].wait()
                    self._divide(index)
                    self._push(index)
                    self._end_slice(index)
        finally:
            self._await_sums()

    def average_all(self) -> None:
        """Replaces the gradient of each parameter by the group's mean, in every process."""
        grads = self._flat.grads
        if self._samples_here != 1.0:
            grads.mul_(self._samples_here)
        self.group.add(grads).wait()
        with torch.no_grad():
            for index, parameter in enumerate(self._flat.parameters):
                weight = self._weights[index]
                if weight > 0:
                    mean = self._part_of(index).div_(weight).view(parameter.shape)
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(mean)

    def push_none(self) -> None:
        """Ends the step without a gradient of this group."""
        self._await_sums()
        for index in self._replica.front_first():
            self._push(index, is_empty=True)

    def end(self) -> None:
        """Ends the step."""
        self._await_sums()
        super().end()

    def begin_again(self) -> None:
        """Starts the step again; nothing of it has left."""
        self._await_sums()
        super().begin_again()

    def _agree_on_weight(self, samples: float) -> None:
        """Adds up the samples of the step, once; with overlap it begins with that."""
        if not self._has_weight:
            self._has_weight = True
            (self.samples,) = self.group.sum([samples])

    def _start_sum(self, index: int, samples: float) -> None:
        """Starts to add up a slice at its owner."""
        part = self._flat.grads_of(index)
        if samples != 1.0:
            part.mul_(samples)
        self._sums[index] = self.group.add_at(part, self._table.parts.owners[index])

    def _divide(self, index: int) -> None:
        """Turns the sum of a slice into the mean over the processes that have each gradient."""
        spec, part = self._table.layout.slices[index], self._flat.grads_of(index)
        weights = {self._weights[segment.tensor] for segment in spec.segments}
        if len(weights) == 1:
            (weight,) = weights
            if weight not in (0.0, 1.0):
                part.div_(weight)
            return
        for segment in spec.segments:
            if self._weights[segment.tensor] > 0:
                part[segment.start : segment.stop].div_(self._weights[segment.tensor])

    def _present(self, index: int) -> int:
        if not self._weights:  # During backward: only slices that are complete are pushed.
            return -1
        segments = self._table.layout.slices[index].segments
        has = [self._weights[segment.tensor] > 0 for segment in segments]
        return sum(bit << position for position, bit in enumerate(has))

    def _weight(self) -> float:
        return self.samples

    def _part_of(self, index: int) -> torch.Tensor:
        start = self._table.layout.offsets[index]
        return self._flat.grads[start : start + self._flat.parameters[index].numel()]

    def _gather_all(self, *, skips: bool) -> None:
        """Copies all gradients into the flat vector; zeros if the step is left out."""
        indices = range(len(self._flat.parameters))
        if not skips:
            self._gather(indices)
            return
        for index in indices:
            if index not in self._gathered:
                self._await_room(index)
                self._flat.clear_grad(index)

    def _await_sums(self) -> None:
        """Waits until the flat gradients are free, and forgets the step's sums."""
        sums, self._sums = list(self._sums.values()), {}
        self._problem, self._has_weight, self._weights = None, False, []
        for pending in sums:
            pending.wait()
