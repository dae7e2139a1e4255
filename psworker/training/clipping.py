"""Gradient clipping by the norm of the workers' mean gradient, as DDP's scripts clip.

`torch.nn.utils.clip_grad_norm_` sees the gradient of one worker, before the shards take the mean.
The norm of a mean does not follow from the norms of its parts. So the workers exchange their
gradients once more, as a named tensor: 4 bytes per element up and down. Each worker then scales its
own gradient by the same factor, which scales the mean.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from pscore.errors import ConfigError, ReplacedError, UnknownJobError
from pscore.rules.base import takes_all
from psworker.model.dtensors import local
from psworker.model.grad_views import dense
from psworker.training.agreement import together
from psworker.training.gradients import Gradients
from psworker.training.recovery import Recovery
from psworker.training.sharded_gradients import ShardedGradients
from psworker.training.table import TrainingTable
from psworker.training.verbs import drop_named, named

EPSILON = 1e-6  # As in torch.


def clip(
    table: TrainingTable, gradients: Gradients, recovery: Recovery, max_norm: float
) -> torch.Tensor:
    """Clips the gradients as `psworker.clip_grad_norm_` describes, and returns the mean's norm.

    Args:
        table: The table that is trained.
        gradients: The gradients of the step under way.
        recovery: Rejoins after a failed step.
        max_norm: The largest 2-norm of the mean gradient.
    """
    if not takes_all(table.rule):
        raise ConfigError(
            f"in mode {table.rule.name} the mean of all workers' gradients is not known before "
            "step(); clip each worker's own with torch.nn.utils.clip_grad_norm_"
        )
    gradients.overlap.changed("a gradient")
    name = f"clip.{table.exchange.table}"
    if recovery.failure is not None:  # `step` rejoins, and this gradient is lost.
        drop_named(name)
        return torch.tensor(math.inf)
    norm: torch.Tensor
    if isinstance(gradients, ShardedGradients):
        try:
            norm = _norm_of_parts(table, gradients, name)
        except (ReplacedError, UnknownJobError) as problem:  # Likewise.
            recovery.note(problem)
            return torch.tensor(math.inf)
    elif table.session.num_processes == 1:
        norm = torch.linalg.vector_norm(_flat(table)[:-1])
    else:
        try:
            norm = _norm_of_mean(table, name)
        except (ReplacedError, UnknownJobError) as problem:  # Likewise.
            recovery.note(problem)
            return torch.tensor(math.inf)
    if bool(norm.isfinite()):
        factor = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
        with torch.no_grad():
            for parameter in table.flat.parameters:
                if parameter.grad is not None:
                    grad = local(parameter.grad)
                    grad.mul_(factor.to(grad.device))
    return norm


def _norm_of_parts(table: TrainingTable, gradients: ShardedGradients, name: str) -> torch.Tensor:
    """Returns the norm of the mean gradient of a sharded model, whose processes have parts of it.

    The processes that push the same slices exchange them, one of each group.
    """
    group, flat = gradients.group, _checked(gradients.own_means())
    is_alone = table.session.num_workers == 1
    name = f"{name}.{group.rank}"

    def declare(rank: int) -> list[float]:
        if rank == group.rank:
            named(name, flat, alone=True)
        return []

    def norm() -> list[float]:
        mean = flat if is_alone else _mean(name, flat, gradients.samples, alone=True)
        return [float(torch.linalg.vector_norm(mean[:-1], dtype=torch.float64)), float(mean[-1])]

    if not is_alone:
        for rank in range(group.size):  # Shards number tables in the order of their declaration.
            together(group, partial(declare, rank), 0, lambda: False)
    rows = together(group, norm, 2, lambda: False)
    is_bad = any(bad for _, bad in rows)
    return torch.tensor(math.inf if is_bad else math.hypot(*(one for one, _ in rows)))


def _norm_of_mean(table: TrainingTable, name: str) -> torch.Tensor:
    """Returns the norm of the workers' mean gradient; Inf if one of them is not finite."""
    mean = _mean(name, _flat(table), table.progress.samples)
    if mean[-1].item() > 0:
        return torch.tensor(math.inf)
    norm: torch.Tensor = torch.linalg.vector_norm(mean[:-1])
    return norm


def _mean(name: str, flat: torch.Tensor, samples: float, *, alone: bool = False) -> torch.Tensor:
    """Returns the workers' mean of a vector; `alone`: of one process of each group."""
    try:
        tensor = named(name, flat, alone=alone)
        tensor.push(flat, samples)
        return tensor.pull()
    except (ReplacedError, UnknownJobError):
        drop_named(name)
        raise


def _flat(table: TrainingTable) -> torch.Tensor:
    """Returns all gradients as one vector, then 0; if they are not finite, zeros, then 1."""
    parts = [
        torch.zeros(weight.numel())
        if weight.grad is None
        else dense(weight.grad).float().reshape(-1).cpu()
        for weight in table.flat.parameters
    ]
    return _checked(torch.cat(parts))


def _checked(flat: torch.Tensor) -> torch.Tensor:
    """Returns a vector on the host, then 0; if it is not finite, zeros, then 1."""
    flat = torch.cat([flat.cpu(), torch.zeros(1)])
    if not bool(torch.isfinite(flat).all()):
        flat.zero_()
        flat[-1] = 1.0
    return flat
