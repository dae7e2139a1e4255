"""Tables that are trained beside the parameters of a model, in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.errors import ConfigError
from pscore.rules.base import Rule, takes_all
from psworker.job.companions import FINDERS, WARNINGS, Companion, Run
from psworker.job.context import Context
from psworker.training.table import Agree, TrainingTable


def require_unscaled(companions: Sequence[Companion], grad_scaler: GradScaler | None) -> None:
    """Raises ConfigError for a loss that was scaled: companions do not unscale their gradients."""
    if grad_scaler is not None and companions:
        raise ConfigError(
            "GradScaler scales the gradients of row tables, and cannot unscale them; train in "
            "bfloat16, which needs no scaler: torch.autocast(device, dtype=torch.bfloat16)"
        )


def have_gradient(companions: Sequence[Companion]) -> bool:
    """Returns whether any has one in the step that begins; warns of tables that are none of any."""
    for warn in WARNINGS:
        warn()
    return any(each.has_gradient for each in companions)


def find_companions(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    rule: Rule,
    context: Context,
    beside: str,
    run: Run,
) -> Callable[[], list[Companion]]:
    """Checks the tables beside a model's own; returns the function that declares them.

    It does so at every shard, as `FindCompanions` describes. So wrong arguments are refused before
    the job has any table of the model.

    Args:
        optimizers: Their optimizer, or several; None: the model has no such tables.
        beside: Name of the table of the dense part, as it was when training began.
        run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

    Raises:
        ConfigError: A table has no optimizer, or an optimizer has other parameters.
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer)
    if not is_one and not isinstance(optimizers, Sequence | None):
        raise ConfigError(f"rows is {optimizers!r}, must be an optimizer, or a list of them")
    given: list[Any] = [optimizers] if is_one else list(cast(Sequence[Any], optimizers or ()))
    if given and not FINDERS:
        raise ConfigError(
            "rows= is the optimizer of row tables, and this model has none, such as "
            "psworker.Embedding; leave it out"
        )
    found = [find(given, named, rule, context.session, beside, run) for find in FINDERS]

    def declare() -> list[Companion]:
        companions = [companion for each in found for companion in each()]
        for companion in companions:
            context.at_close(companion.end)
        return companions

    return declare


def begin_together(
    table: TrainingTable, companions: Sequence[Companion], begin: Callable[[Agree], None]
) -> None:
    """Begins with a model's table and those beside it: with one step, the newest of any slice.

    Else a worker's steps had other numbers beside the model than in it, and one that has made its
    last step could be awaited there. Where steps wait for workers, the others' next one waits for
    this worker in the tables that it has asked, so all are asked before any is told. Rounds, and
    steps that may close without a worker, have numbers of their own.

    Args:
        begin: Begins with the model's table. Its argument returns the first push there, given the
            one that its slices expect.
    """
    waits: list[Callable[[], None]] = []
    asked = {each: each.ask() for each in companions} if _is_counted_alike(table.rule) else {}

    def agree(first: int) -> int:
        origin, by_step = table.exchange.origin, table.rule.by_step
        theirs = [step for each, step in asked.items() if each.by_step or not by_step]
        first = max([first, *(origin.clock + step - origin.step for step in theirs)])
        step = origin.step + max(0, first - origin.clock)
        waits.extend(each.begin_at(step) for each in asked)
        return first

    begin(agree)
    for each in companions if not asked else ():
        each.ask()
        waits.append(each.begin_at(None))
    for wait in waits:
        wait()


def begin_beside(table: TrainingTable, companions: Sequence[Companion]) -> None:
    """Begins with the tables beside a model's, which itself begins later."""
    for each in companions:
        each.ask()
        each.begin_at(table.replica.step if _is_counted_alike(table.rule) else None)()


def _is_counted_alike(rule: Rule) -> bool:
    """Returns whether each step of a worker is one push, of the tables beside the model too."""
    is_alone = not (rule.by_step or rule.outer_optimizer or rule.gossip)
    return is_alone or takes_all(rule)
