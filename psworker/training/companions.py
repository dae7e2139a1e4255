"""Tables that are trained beside the parameters of a model, in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError
from pscore.rules.base import Rule, takes_all
from psworker.job.context import Context
from psworker.rows.join import join_rows
from psworker.training.table import TrainingTable


class Companion(Protocol):
    """Tables of another kind than the model's, whose steps are those of the wrapped optimizer."""

    def start(self, step: int | None) -> None:
        """Begins to train.

        Args:
            step: Step of the training, where all workers make each step together; else None.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def begin_again(self, step: int | None) -> None:
        """Continues after this worker has joined the job again; forgets pushes under way.

        Args:
            step: As for `start`.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def zero_grad(self) -> None:
        """Clears the gradients."""

    def prepare(self) -> None:
        """Checks gradients and hyper-parameters of the step under way, before anything has left.

        Raises:
            GradientError: A gradient holds NaN or Inf.
            ConfigError: A hyper-parameter is wrong.
        """

    def push(self, samples: float, *, skips: bool) -> None:
        """Pushes the gradients of the step under way.

        Args:
            samples: Weight in the mean of the step.
            skips: Whether this worker leaves the step out.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def finish(self) -> None:
        """Ends the step."""

    def close(self) -> None:
        """Ends training: waits until the last pushes are counted.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def end(self) -> None:
        """Ends everything: this worker leaves the job."""


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
    rows: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    rule: Rule,
    context: Context,
    beside: str,
    run: Callable[[Callable[[], Any]], Any],
) -> Companions:
    """Declares the row tables of a model at every shard.

    Args:
        rows: Their optimizer, or several; None: the model has none.
        named: The named parameters of the model.
        rule: Their mode.
        context: This process's place in its job.
        beside: Name of the table of the dense part, as it was when training began.
        run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

    Raises:
        ConfigError: A table has no optimizer, or an optimizer has other parameters.
        JobMismatchError: The job has other row tables; names the difference.
    """
    found = join_rows(rows, named, rule, context.session, beside, run)
    companions = Companions(found)
    context.at_close(companions.end)
    return companions


def _common_step(table: TrainingTable) -> int | None:
    """Returns the step of a table where all workers make each step together; else None."""
    return table.replica.step if takes_all(table.rule) else None
