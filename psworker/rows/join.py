"""Finds the row tables of a model, and declares them with their optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from pscore.errors import ConfigError
from pscore.rows.spec import Rows
from pscore.rules.base import Rule
from pscore.table_names import BESIDE
from psworker.connection.membership.session import Session
from psworker.job.companions import FINDERS, WARNINGS, Declare
from psworker.rows.hyper import counterpart
from psworker.rows.modules import EmbeddingTable, tables_of, warn_of_tables
from psworker.rows.row_tables import RowTables, Run, ShardRows

TABLE = "rows"
FORM = "DistributedOptimizer(dense, model.named_parameters(), rows=optimizer)"


def find_rows(
    optimizers: Sequence[torch.optim.Optimizer],
    named: Sequence[tuple[str, torch.nn.Parameter]],
    rule: Rule,
    session: Session,
    beside: str,
    run: Run,
) -> Declare:
    """Checks the row tables of a model; returns the function that declares them at every shard.

    Those of each optimizer are declared together.

    Args:
        beside: Name of the table of the dense part, as it was when training began.
        run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

    Raises:
        ConfigError: A table has no optimizer, or two, or an optimizer has other parameters; or rows
            cannot be trained in this mode.
    """
    for optimizer in optimizers:
        counterpart(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = [parameter for group in groups for parameter in group["params"]]
    _require_once(given)
    if given:
        Rows(tables=()).require_rule(rule)
    for table in tables_of(given).values():
        if isinstance(table.source, ShardRows):
            raise ConfigError(
                f"row table {table.name!r} has rows on the shards, of another "
                "DistributedOptimizer: a second one would begin with its first rows; make one "
                "optimizer for both"
            )
    found = tables_of([*given, *(parameter for _, parameter in named)])
    _require_names(found, named)
    if given and not session.group.is_alone:
        raise ConfigError(
            "several processes of one host are one worker here, and row tables need a worker each; "
            "pass local_group=None to DistributedOptimizer"
        )
    covered = {id(parameter) for parameter in given}
    for parameter, table in found.items():
        if parameter not in covered and table.weight.requires_grad:
            raise ConfigError(
                f"row table {table.name!r} has no optimizer: pass one of [table.weight, ...] as "
                f"rows=, {FORM}, or freeze it with table.weight.requires_grad_(False)"
            )
    makers = []
    for number, optimizer in enumerate(optimizers):
        name = f"{beside}{BESIDE}{TABLE}" + (f".{number}" if number else "")
        tables, numbers = _tables_in(optimizer, found)
        makers.append(partial(RowTables, name, optimizer, tables, numbers, rule, session, run))
    return lambda: [make() for make in makers]


def _tables_in(
    optimizer: torch.optim.Optimizer, found: dict[int, EmbeddingTable]
) -> tuple[list[EmbeddingTable], list[int]]:
    """Returns the row tables of an optimizer, and the number of the group of each.

    Raises:
        ConfigError: It has another parameter.
    """
    tables, groups = [], []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in found:
                raise ConfigError(
                    f"the optimizer of rows has a parameter {list(parameter.shape)} that is no "
                    f"placeholder of a row table; pass [table.weight, ...] to it: {FORM}"
                )
            tables.append(found[id(parameter)])
            groups.append(number)
    return tables, groups


def _require_once(given: Sequence[torch.nn.Parameter]) -> None:
    """Raises ConfigError if two optimizers have one table: each would train rows of its own."""
    for parameter in given:
        if sum(each is parameter for each in given) > 1:
            names = " ".join(table.name for table in tables_of([parameter]).values())
            raise ConfigError(
                f"row table {names!r} is in two optimizers of rows; pass its weight to one of them"
            )


def _require_names(
    found: dict[int, EmbeddingTable], named: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Names each table without a name after its module in the model.

    Raises:
        ConfigError: A table is not in the model and has no name, or two have the same.
    """
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in named}
    for parameter, table in found.items():
        table.name = table.name or names.get(parameter, "")
        if not table.name:
            raise ConfigError(
                "a row table has no name: pass name= to it, or named_parameters() of the model "
                "that it is part of"
            )
    taken = [table.name for table in found.values()]
    for name in taken:
        if taken.count(name) > 1:
            raise ConfigError(f"two row tables have the name {name!r}")


FINDERS.append(find_rows)  # Every module of this folder is imported behind this one.
WARNINGS.append(warn_of_tables)
