"""Gradient clipping by the norm of the workers' mean gradient, as DDP's scripts clip.

`torch.nn.utils.clip_grad_norm_` sees the gradient of one worker, before the shards take the mean.
The norm of a mean does not follow from the norms of its parts, so here the workers exchange their
gradients once more, as a named tensor: 4 bytes per element up and down. Each then scales its own
gradient by the same factor, and with it the mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pscore.errors import ConfigError, ReplacedError, UnknownJobError
from psworker.training.setback import Setback
from psworker.training.verbs import drop_named, named

if TYPE_CHECKING:
    from psworker.training.optimizer import DistributedOptimizer

EPSILON = 1e-6  # As in torch.


def clip_grad_norm_(optimizer: DistributedOptimizer, max_norm: float) -> torch.Tensor:
    """Scales this worker's gradients so that the norm of the workers' mean is at most `max_norm`.

    Every worker calls it at every step, between backward and `step` (with a `GradScaler`, after
    `unscale_`). Where a gradient of some worker is not finite nothing is changed.

    Args:
        optimizer: The wrapper.
        max_norm: The largest 2-norm of the mean gradient.

    Returns:
        The norm of the mean gradient before, the same on all workers; Inf if it is not finite.

    Raises:
        ConfigError: The mode's updates do not take every worker's gradient of one step.
        GradientError: Gradients have left during backward.
        PacelineError: This worker is no longer part of the job, or nobody answers.
    """
    rule, session = optimizer.rule, optimizer.session
    if not rule.takes_all:
        raise ConfigError(
            f"in mode {rule} no update is the mean of all workers' gradients of one step; clip "
            "each worker's own with torch.nn.utils.clip_grad_norm_"
        )
    optimizer.gradients.overlap.changed("a gradient")
    if optimizer.setback is not None:  # Likewise.
        drop_named(_table(optimizer))
        return torch.tensor(math.inf)
    grads = [weight.grad for weight in optimizer.bucket.parameters if weight.grad is not None]
    norm: torch.Tensor
    if session.num_workers == 1:
        norm = torch.linalg.vector_norm(_flat(optimizer)[:-1])
    else:
        try:
            norm = _norm_of_mean(optimizer)
        except (ReplacedError, UnknownJobError) as problem:
            # `step` comes back, and this gradient is lost.
            optimizer.setback = Setback(problem, optimizer.replica.step)
            return torch.tensor(math.inf)
    if bool(norm.isfinite()):
        factor = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
        with torch.no_grad():
            for grad in grads:
                grad.mul_(factor.to(grad.device))
    return norm


def _table(optimizer: DistributedOptimizer) -> str:
    return f"clip.{optimizer.exchange.table}"


def _norm_of_mean(optimizer: DistributedOptimizer) -> torch.Tensor:
    """Returns the norm of the workers' mean gradient; Inf where one of them is not finite."""
    name = _table(optimizer)
    flat = _flat(optimizer)
    try:
        tensor = named(name, flat)
        tensor.push(flat, optimizer.samples)
        mean = tensor.pull()
    except (ReplacedError, UnknownJobError):
        drop_named(name)
        raise
    if mean[-1].item() > 0:
        return torch.tensor(math.inf)
    norm: torch.Tensor = torch.linalg.vector_norm(mean[:-1])
    return norm


def _flat(optimizer: DistributedOptimizer) -> torch.Tensor:
    """Returns all gradients as one vector, and a 0; if they are not finite, zeros and a 1."""
    parts = [
        torch.zeros(weight.numel())
        if weight.grad is None
        else weight.grad.detach().float().reshape(-1).cpu()
        for weight in optimizer.bucket.parameters
    ]
    flat = torch.cat([*parts, torch.zeros(1)])
    if not bool(torch.isfinite(flat).all()):
        flat.zero_()
        flat[-1] = 1.0
    return flat
