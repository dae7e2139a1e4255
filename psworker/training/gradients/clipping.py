"""Gradient clipping by the norm of the workers' mean gradient, as DDP's scripts clip.

`torch.nn.utils.clip_grad_norm_` sees the gradient of one worker, before the shards take the mean.
The norm of a mean does not follow from the norms of its parts. So the workers exchange their
gradients once more, as a named tensor: 4 bytes per element up and down. Each worker then scales its
own gradient by the same factor, which scales the mean.

The vector ends with the number of the attempt at the step (attempts.py). A worker that has joined
or come back finds there whether the others have clipped the step that it begins with: then it uses
their norm. A worker that skips the step pushes zeros of no weight.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from pscore.errors import LOST, ConfigError
from pscore.rules.base import takes_all
from psworker.model.copies import on_host
from psworker.model.dtensors import local
from psworker.model.finite import is_finite
from psworker.model.grad_views import dense
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.gradients.agreement import run_in_group
from psworker.training.gradients.attempts import Attempts
from psworker.training.gradients.gradients import Gradients
from psworker.training.gradients.sharded import ShardedGradients
from psworker.training.table import TrainingTable
from psworker.training.verbs import declared, named

EPSILON = 1e-6  # As in torch.
BASE, NUM_DIGITS = 1 << 12, 6  # Digits of the number behind the vector.


def clip(
    table: TrainingTable, gradients: Gradients, recovery: WorkerRecovery, max_norm: float
) -> torch.Tensor:
    """Clips the gradients as `psworker.clip_grad_norm_` describes, and returns the mean's norm.

    Args:
        max_norm: The largest 2-norm of the mean gradient.
    """
    if not takes_all(table.rule):
        raise ConfigError(
            f"in mode {table.rule.name} the mean of all workers' gradients is not known before "
            "step(); clip each worker's own with torch.nn.utils.clip_grad_norm_"
        )
    gradients.overlap.changed("a gradient")
    if recovery.failure is not None:  # `step` rejoins, and this gradient is lost.
        return torch.tensor(math.inf)
    gradients.attempts.clipped = gradients.attempts.number
    name = _name(table)
    try:
        if isinstance(gradients, ShardedGradients):
            norm = _norm_of_parts(table, gradients, name)
        elif table.session.num_processes == 1:
            norm = torch.linalg.vector_norm(_flat(table)[:-1])
        else:
            norm = _norm_of_mean(table, gradients.attempts, name)
    except LOST as problem:  # Likewise.
        recovery.note(problem)
        return torch.tensor(math.inf)
    if bool(norm.isfinite()):
        factor = torch.clamp(max_norm / (norm + EPSILON), max=1.0).to(table.flat.device)
        parameters = table.flat.parameters
        grads = [local(grad) for one in parameters if (grad := one.grad) is not None]
        if grads:
            with torch.no_grad():
                torch._foreach_mul_(grads, factor)
    return norm


def _norm_of_parts(table: TrainingTable, gradients: ShardedGradients, name: str) -> torch.Tensor:
    """Returns the norm of the mean gradient of a sharded model, whose processes have parts of it.

    The processes that push the same slices exchange them, one of each group.
    """
    group, flat = gradients.group, _checked(gradients.own_means())
    is_alone = table.session.num_workers == 1

    def declare(rank: int) -> list[float]:
        if rank == group.rank:
            named(name, _numbered(flat, 0), alone=True)
        return []

    def norm() -> list[float]:
        mean = (
            flat
            if is_alone
            else _mean(gradients.attempts, name, flat, gradients.samples, alone=True)
        )
        return [float(torch.linalg.vector_norm(mean[:-1], dtype=torch.float64)), float(mean[-1])]

    if not is_alone:
        for rank in range(group.size):  # Shards number tables in the order of their declaration.
            run_in_group(group, partial(declare, rank), 0, lambda: False)
    rows = run_in_group(group, norm, 2, lambda: False)
    is_bad = any(bad for _, bad in rows)
    return torch.tensor(math.inf if is_bad else math.hypot(*(one for one, _ in rows)))


def _norm_of_mean(table: TrainingTable, attempts: Attempts, name: str) -> torch.Tensor:
    """Returns the norm of the workers' mean gradient; Inf if one of them is not finite."""
    mean = _mean(attempts, name, _flat(table), table.progress.samples)
    if mean[-1].item() > 0:
        return torch.tensor(math.inf)
    norm: torch.Tensor = torch.linalg.vector_norm(mean[:-1])
    return norm


def _mean(
    attempts: Attempts, name: str, flat: torch.Tensor, samples: float, *, alone: bool = False
) -> torch.Tensor:
    """Returns the workers' mean of a vector; `alone`: of one process of each group."""
    tensor = named(name, _numbered(flat, 0), alone=alone)
    if tensor.round > 0 and not tensor.has_pushed:  # Others may have clipped this step.
        mean = tensor.pull()
        attempts.follow(_number(mean))
        if _number(mean) == attempts.number:
            return mean[:-NUM_DIGITS]
    tensor.push(_numbered(flat, attempts.number), samples)
    return tensor.pull()[:-NUM_DIGITS]


def pass_by(table: TrainingTable, gradients: Gradients) -> None:
    """Pushes zeros of no weight, if the others may clip the step that this worker skips.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    tensor, attempts = declared(_name(table)), gradients.attempts
    if tensor is not None and tensor.has_pushed and attempts.clipped != attempts.number:
        attempts.clipped = attempts.number
        zeros = torch.zeros(tensor.lanes.numel - NUM_DIGITS, dtype=torch.float32, device="cpu")
        tensor.push(_numbered(zeros, attempts.number), 0.0)


def _name(table: TrainingTable) -> str:
    """Returns the name of the tensor; each process that has a part of the model has its own."""
    name = f"clip.{table.exchange.table}"
    return f"{name}.{table.session.group.rank}" if table.flat.is_sharded else name


def _numbered(flat: torch.Tensor, number: int) -> torch.Tensor:
    """Returns a vector with a number behind it, in digits that float32 holds."""
    digits = [number // BASE**place % BASE for place in range(NUM_DIGITS)]
    return torch.cat([flat, torch.tensor(digits, dtype=torch.float32)])


def _number(mean: torch.Tensor) -> int:
    """Returns the number behind a mean of vectors that have the same one."""
    digits = mean[-NUM_DIGITS:].round().long().tolist()
    return sum(int(digit) * BASE**place for place, digit in enumerate(digits))


def _flat(table: TrainingTable) -> torch.Tensor:
    """Returns all gradients as one vector, then 0; if they are not finite, zeros, then 1."""
    parts = [  # On their device, which then copies them all at once.
        torch.zeros(weight.numel(), device=weight.device, dtype=torch.float32)
        if weight.grad is None
        else dense(weight.grad).float().reshape(-1)
        for weight in table.flat.parameters
    ]
    return _checked(torch.cat(parts))


def _checked(flat: torch.Tensor) -> torch.Tensor:
    """Returns a vector on the host, then 0; if it is not finite, zeros, then 1."""
    flat = torch.cat([on_host(flat), torch.zeros(1, dtype=torch.float32, device="cpu")])
    if not is_finite(flat):
        flat.zero_()
        flat[-1] = 1.0
    return flat
