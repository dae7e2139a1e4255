"""Loss scaling with `torch.amp.GradScaler`: a step that overflows is left out by all, or by none.

If `step` has an argument `grad_scaler`, the scaler always calls it and passes itself. The gradients
are unscaled here unless the script has done so (`scaler.unscale_`). In a mode whose updates take
every worker's gradient, the workers first agree whether one of them has found Inf or NaN: one
number to the first shard and back. The result replaces the finding that the scaler keeps for its
own gradients, so that `scaler.update()` changes the scale on all workers alike.

The others make the step if one of them calls `skip_step` in it, or had not joined when they agreed.
Then a worker whose gradients overflow leaves out its own, and changes its own scale.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError, GradientError
from pscore.rules.base import takes_all
from psworker.connection.membership.session import Session
from psworker.training.gradients.attempts import Attempts
from psworker.training.table import TrainingTable

HAS_OVERFLOW, HAS_PASSED = 1.0, 2.0  # Values at the barrier; the largest one decides.
ARGUMENT = "grad_scaler"  # Argument of `step`: a scaler looks for it in the signature.

# torch prefers to set two attributes, but these cannot change the scaler's finding.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


class Overflow(Enum):
    """The consequence of an overflow for a step."""

    NONE = "none"
    OWN = "own"  # This worker's gradient is left out.
    ALL = "all"  # All workers leave the step out.


def find_overflow(
    optimizer: torch.optim.Optimizer, scaler: GradScaler, table: TrainingTable, attempts: Attempts
) -> Overflow:
    """Unscales the gradients of a step; returns what must be left out of it.

    Args:
        optimizer: The optimizer that the script gives to the scaler.
        attempts: Numbers of this worker's attempts at its steps.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    unscale(optimizer, scaler)
    flags = scaler._found_inf_per_device(optimizer).values()
    group = table.session.group  # Its processes make one gradient together.
    own = group.largest(max((value.item() for value in flags), default=0.0))
    overflow = Overflow.OWN if own > 0.0 else Overflow.NONE
    if takes_all(table.rule):
        if not _is_alone(table.session):
            overflow = _agree(table, attempts, own)
        elif overflow is Overflow.OWN:
            overflow = Overflow.ALL
    if takes_all(table.rule) or not group.is_alone:
        for value in flags:
            value.fill_(float(overflow is not Overflow.NONE))
    return overflow


def pass_by(table: TrainingTable, attempts: Attempts) -> None:
    """Reports to the workers that agree on the step under way that this one skips it.

    Raises:
        PacelineError: This worker is no longer part of the job, or the shard does not answer.
    """
    session = table.session
    if takes_all(table.rule) and not _is_alone(session):
        session.pass_by(_barrier(table), attempts.number, HAS_PASSED)


def _agree(table: TrainingTable, attempts: Attempts, own: float) -> Overflow:
    """Returns the workers' decision about this worker's attempt at the step."""
    largest, newest = table.session.agree_at(_barrier(table), attempts.number, own)
    if attempts.follow(newest):
        return Overflow.ALL
    if largest == HAS_OVERFLOW:
        attempts.leave_out()
        return Overflow.ALL
    return Overflow.OWN if own > 0.0 else Overflow.NONE


def _barrier(table: TrainingTable) -> str:
    return f"overflow of {table.name}"


def _is_alone(session: Session) -> bool:
    return session.num_workers == 1 and not session.min_workers


def unscale(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """Unscales the gradients of a step, unless the script has done so."""
    if not scaler._found_inf_per_device(optimizer):
        scaler.unscale_(optimizer)


def takes_scaler(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of `step` with the argument in which a scaler passes itself.

    Accelerate replaces `step` around each call by a function with `*args` and `**kwargs` alone.
    """
    if ARGUMENT in inspect.signature(step).parameters:
        return step

    def with_scaler(
        closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> Any:
        return step(closure, grad_scaler=grad_scaler)

    return with_scaler


def refuse_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for a scaler that sets two attributes instead of passing itself."""
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        raise ConfigError(
            f"the GradScaler of torch {torch.__version__} does not pass itself to step(); call "
            "scaler.unscale_(optimizer), and optimizer.step() or optimizer.skip_step()"
        )


def refuse_early() -> None:
    """Raises GradientError for a scaler if gradients have left before they were unscaled."""
    raise GradientError(
        "gradients were pushed during backward, before GradScaler could unscale them; pass "
        "overlap=False to DistributedOptimizer"
    )
