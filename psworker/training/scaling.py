"""Loss scaling with `torch.amp.GradScaler`: a step that overflows is left out by all, or by none.

If `step` has an argument `grad_scaler`, the scaler always calls it and passes itself. The gradients
are unscaled here unless the script has done so (`scaler.unscale_`). In a mode whose updates take
every worker's gradient, the workers first agree whether one of them has found Inf or NaN: one
number to the first shard and back. The result replaces the finding that the scaler keeps for its
own gradients, so that `scaler.update()` changes the scale on all workers alike.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError, GradientError
from pscore.rules.base import takes_all
from psworker.connection.session import Session

if TYPE_CHECKING:
    from pscore.rules.base import Rule

ARGUMENT = "grad_scaler"  # Argument of `step`: a scaler looks for it in the signature.

# torch prefers to set two attributes, but these cannot change the scaler's finding.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


def overflows(
    optimizer: torch.optim.Optimizer, scaler: GradScaler, rule: Rule, session: Session, name: str
) -> bool:
    """Unscales the gradients of a step; returns whether it must be left out.

    Args:
        optimizer: The optimizer that the script gives to the scaler.
        scaler: The scaler of the script.
        rule: The job's mode.
        session: This worker's part in the job.
        name: Name of the table that is trained.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    unscale(optimizer, scaler)
    found = scaler._found_inf_per_device(optimizer).values()
    largest = max((value.item() for value in found), default=0.0)
    if session.group is not None:  # Its processes make one gradient together.
        largest = max(given for (given,) in session.group.gather([largest]))
    if takes_all(rule) and (session.num_workers > 1 or session.min_workers):
        largest = session.agree(f"overflow of {name}", largest)
    if session.group is not None or takes_all(rule):
        for value in found:
            value.fill_(largest)
    return largest > 0.0


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
    """Refuses a scaler that sets two attributes instead of passing itself.

    Raises:
        ConfigError: The attributes are set: the gradients are still scaled.
    """
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        raise ConfigError(
            f"the GradScaler of torch {torch.__version__} does not pass itself to step(); call "
            "scaler.unscale_(optimizer), and optimizer.step() or optimizer.skip_step()"
        )


def refuse_early() -> None:
    """Refuses a scaler if gradients have left before they were unscaled.

    Raises:
        GradientError: Always.
    """
    raise GradientError(
        "gradients were pushed during backward, before GradScaler could unscale them; pass "
        "overlap=False to DistributedOptimizer"
    )
