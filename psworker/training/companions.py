"""Tables that are trained beside the parameters of a model, in the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError
from pscore.rules.base import Rule, takes_all
from psworker.job.companions import JOINS, Companion, Run
from psworker.job.context import Context
from psworker.training.table import TrainingTable


class Companions:
    """All companions of a table, perhaps none; each method calls that of each."""

    def __init__(self, found: Sequence[Companion] = ()) -> None:
        """Keeps the companions `found`, in this order."""
        self._found = found

    def start(self, table: TrainingTable) -> None:
        """Begins to train at the step of a table, which has begun."""
        for companion in self._found:
            companion.start(_common_step(table))

    def begin_again(self, table: TrainingTable) -> None:
        """Continues at the step of a table, after this worker has joined the job again."""
        for companion in self._found:
            companion.begin_again(_common_step(table))

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for companion in self._found:
            companion.zero_grad()

    def require_unscaled(self, grad_scaler: GradScaler | None) -> None:
        """Refuses a loss that was scaled: companions do not unscale their gradients.

        Raises:
            ConfigError: There is a scaler and a companion.
        """
        if grad_scaler is not None and self._found:
            raise ConfigError(
                "GradScaler scales the gradients of row tables, and cannot unscale them; train in "
                "bfloat16, which needs no scaler: torch.autocast(device, dtype=torch.bfloat16)"
            )

    def prepare(self) -> None:
        """Checks the step under way, before anything of it has left."""
        for companion in self._found:
            companion.prepare()

    def push(self, samples: float, *, skips: bool) -> None:
        """Pushes the gradients of the step under way, with their weight in the mean."""
        for companion in self._found:
            companion.push(samples, skips=skips)

    def finish(self) -> None:
        """Ends the step."""
        for companion in self._found:
            companion.finish()

    def close(self) -> None:
        """Ends training: waits until the last pushes are counted."""
        for companion in self._found:
            companion.close()

    def end(self) -> None:
        """Ends everything: this worker leaves the job."""
        for companion in self._found:
            companion.end()


def join_companions(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    rule: Rule,
    context: Context,
    beside: str,
    run: Run,
) -> Companions:
    """Declares the tables beside a model's own at every shard, as `JoinCompanions` describes.

    Args:
        optimizers: Their optimizer, or several; None: the model has no such tables.
        beside: Name of the table of the dense part, as it was when training began.
        run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

    Raises:
        ConfigError: A table has no optimizer, or an optimizer has other parameters.
        JobMismatchError: The job has other tables; names the difference.
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer)
    given: list[Any] = [optimizers] if is_one else list(cast(Sequence[Any], optimizers or ()))
    if given and not JOINS:
        raise ConfigError(
            "rows= is the optimizer of row tables, and this model has none, such as "
            "psworker.Embedding; leave it out"
        )
    joined = [join(given, named, rule, context.session, beside, run) for join in JOINS]
    companions = Companions([companion for each in joined for companion in each])
    context.at_close(companions.end)
    return companions


def _common_step(table: TrainingTable) -> int | None:
    """Returns the step of a table where all workers make each step together; else None."""
    return table.replica.step if takes_all(table.rule) else None
