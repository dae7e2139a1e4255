"""Loss scaling with `torch.amp.GradScaler`: a step that overflows is left out by all, or by none.

The scaler calls a `step` that has an argument `grad_scaler` in any case, and passes itself. The
gradients are unscaled here unless the script has done so (`scaler.unscale_`). Where an update takes
every worker's gradient of a step, the workers first agree whether one of them has found Inf or NaN:
one number to the first shard and back. The result replaces the finding that the scaler keeps of its
own gradients, so that `scaler.update()` changes the scale on all workers alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError, GradientError
from psworker.connection.session import Session

if TYPE_CHECKING:
    from pscore.rules.base import Rule

# torch would rather set two attributes; they give no way to change the finding of the scaler.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


def overflows(
    optimizer: torch.optim.Optimizer, scaler: GradScaler, rule: Rule, session: Session, name: str
) -> bool:
    """Unscales the gradients of a step; returns whether it must be left out.

    Args:
        optimizer: As the script has given it to the scaler.
        scaler: The script's.
        rule: The job's mode.
        session: This worker's part in the job.
        name: Of the table that is trained.

    Raises:
        PacelineError: This worker is no longer part of the job, or nobody answers.
    """
    unscale(optimizer, scaler)
    found = scaler._found_inf_per_device(optimizer).values()
    largest = max((value.item() for value in found), default=0.0)
    if rule.takes_all and (session.num_workers > 1 or session.min_workers):
        largest = session.agree(f"overflow of {name}", largest)
        for value in found:
            value.fill_(largest)
    return largest > 0.0


def unscale(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """Unscales the gradients of a step, unless the script has done so."""
    if not scaler._found_inf_per_device(optimizer):
        scaler.unscale_(optimizer)


def refuse_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a scaler that does not pass itself but leaves two attributes.

    Raises:
        ConfigError: There are such attributes: the gradients are still scaled.
    """
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        raise ConfigError(
            f"the GradScaler of torch {torch.__version__} does not pass itself to step(); call "
            "scaler.unscale_(optimizer), and optimizer.step() or optimizer.skip_step()"
        )


def refuse_early() -> None:
    """Refuses a scaler where gradients have left before they were unscaled.

    Raises:
        GradientError: Always.
    """
    raise GradientError(
        "gradients were pushed during backward, before GradScaler could unscale them; pass "
        "overlap=False to DistributedOptimizer"
    )
