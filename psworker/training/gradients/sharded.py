"""The gradients of a step where each process of a group holds a part of the model.

FSDP2 averages a DTensor's gradient over its mesh during backward, and leaves each process its part
of the mean. At `step` the parts come to the processes that push the slices
(psworker/group/routes.py). A parameter that every process holds whole, outside of FSDP2 and of
the tensor parallel plan, has a gradient in each of them, which are averaged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pscore.errors import GradientError
from psworker.group.local_group import LocalGroup
from psworker.model.grad_views import dense
from psworker.model.sharded import ShardedModel
from psworker.training.gradients.agreement import run_in_group
from psworker.training.gradients.gradients import Gradients
from psworker.training.gradients.group import GroupGradients
from psworker.training.gradients.overlap import EarlyGradients
from psworker.training.table import TrainingTable


class ShardedGradients(GroupGradients):
    """The gradients of one step of a sharded model, of which this process pushes its slices."""

    _flat: ShardedModel

    def prepare(self, *, skips: bool) -> list[float]:
        """Checks this process's gradients, and waits until the flat ones may be written.

        Returns:
            `num_numbers` numbers for `agree`.

        Raises:
            GradientError: A gradient holds NaN or Inf.
        """
        if not skips:
            self._flat.check_grads(self._replica.step)
        numbers = self._numbers()
        return [1.0, *[0.0] * (len(numbers) - 1)] if skips else numbers

    def agree(self, rows: Sequence[Sequence[float]]) -> bool:
        """Records the results of all `prepare`s; returns whether the step is left out.

        Args:
            rows: By local rank.

        Raises:
            GradientError: Some processes leave the step out and some do not, or they give
                gradients different weights: FSDP2 has averaged them already, with equal ones.
        """
        skips, samples = [row[0] for row in rows], [row[1] for row in rows]
        if len(set(skips)) > 1:
            raise GradientError(
                f"{int(sum(skips))} of the {len(rows)} processes of a sharded model called "
                "skip_step(), but the gradient of each is in the parts of all: call it in all"
            )
        if len(set(samples)) > 1:
            raise GradientError(
                f"the processes of a sharded model have the samples {samples}, but its gradients "
                "are averaged with equal weights: set the same optimizer.samples in all"
            )
        return super().agree(rows)

    def push_rest(self) -> None:
        """Brings the gradients to the processes that push them, and pushes own slices."""
        self._average(self._flat.plain())
        self._flat.gather_sharded()
        for index in self._replica.front_first():
            self._push(index)

    def own_means(self) -> torch.Tensor:
        """Returns the group's mean gradient in the slices of this process; all processes call it.

        Raises:
            GradientError: The processes give their gradients different weights.
            ReplacedError: The worker has to rejoin.
        """
        rows = run_in_group(self.group, self._numbers, self.num_numbers, lambda: False)
        self.agree(rows)
        self._average(self._flat.plain())
        self._flat.gather_sharded()
        return self._flat.grads

    def _numbers(self) -> list[float]:
        """Waits until the flat gradients may be written; returns the numbers for `agree`."""
        for index in self._table.parts.own:
            self._exchange.acknowledged(index)
        samples = self._table.progress.samples
        has = [parameter.grad is not None for parameter in self._flat.parameters]
        return [0.0, samples, *(samples * has_one for has_one in has)]

    def average_all(self) -> None:
        """Replaces the gradients of parameters that are not sharded by the group's mean."""
        self._average(self._flat.plain())

    def _average(self, indices: Sequence[int]) -> None:
        """Averages the gradients of some parameters over the processes that have one."""
        indices = [index for index in indices if self._weights[index] > 0]
        if not indices:
            return
        parameters = [self._flat.parameters[index] for index in indices]
        with torch.no_grad():
            total = torch.cat(
                [
                    torch.zeros(one.numel(), device=one.device, dtype=torch.float32)
                    if one.grad is None
                    else dense(one.grad).reshape(-1).float() * self._samples_here
                    for one in parameters
                ]
            )
            self.group.add(total).wait()
            parts = torch.split_with_sizes(total, [one.numel() for one in parameters])
            for index, parameter, part in zip(indices, parameters, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_((part / self._weights[index]).view(parameter.shape))


def make_gradients(
    table: TrainingTable, overlap: EarlyGradients, begin: Callable[[], object]
) -> Gradients:
    """Returns the gradients of this worker, or of this process of it.

    Args:
        begin: Called before the first gradient of a step leaves during backward.
    """
    group = table.group
    if not isinstance(group, LocalGroup):
        return Gradients(table, overlap, begin)
    kind = ShardedGradients if table.flat.is_sharded else GroupGradients
    return kind(table, group, overlap, begin)
