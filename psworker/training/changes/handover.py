"""The optimizer's state between the shards and the workers, where a change of the mode moves it.

In modes without a server the workers run the wrapped optimizer, in most others the shards run its
counterpart. A change from one kind to the other continues with another table (growth.py). The state
comes along: from the shards each worker gets a copy, and the shards get the mean of the workers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pscore.errors import ConfigError
from pscore.optimizers.base import Optimizer
from pscore.rules.base import Rule
from psworker.training.changes.growth import Kept
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.state.state_dict import fill, torch_state
from psworker.training.table import TrainingTable
from psworker.training.verbs import named


def moves_optimizer(former: Rule, rule: Rule) -> bool:
    """Returns whether a change of the mode moves the optimizer from or to modes without a server.

    Args:
        former: The mode now.
        rule: The next mode.
    """
    is_other = former.outer_optimizer != rule.outer_optimizer
    return is_other and bool(former.gossip or rule.gossip)


def require_possible(table: TrainingTable, rule: Rule, optimizer: Optimizer) -> None:
    """Refuses a change that would lose something.

    Raises:
        ConfigError: The job is elastic, or one of the modes has its state in the workers alone.
    """
    if table.session.min_workers:
        raise ConfigError(
            f"{table.rule} cannot become {rule} in a job whose workers come and go: another worker "
            "would declare the table with which the job began; start a new job"
        )
    if not (table.optimizer.holds_weights and optimizer.holds_weights):
        raise ConfigError(
            f"{table.rule} cannot become {rule} where the shards return mean gradients "
            "(optimizer_on='worker'): save state_dict() and start a new job"
        )


def hand_over(
    former: TrainingTable,
    recovery: WorkerRecovery,
    kept: Kept,
    inner: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    rule: Rule,
    optimizer: Optimizer,
) -> Kept:
    """Returns the state for the next table, and gives the wrapped optimizer its own.

    All workers call it.

    Args:
        former: The former table, to which no worker pushes any more.
        kept: The result of `growth.leave`.

    Raises:
        PacelineError: A shard does not answer.
    """
    if former.rule.outer_optimizer and rule.alike:
        former.local_step.share_state()
    if not former.rule.outer_optimizer:
        plain = {"state": {}, "param_groups": _numbered(groups)}
        state = torch_state(former, recovery, groups, plain, None)
        inner.load_state_dict({"state": state["state"], "param_groups": plain["param_groups"]})
        inner.param_groups = groups
    # The state of an optimizer over rounds, which the shards run in some modes, begins anew.
    means, counts = _means(former, {} if rule.outer_optimizer else inner.state, optimizer)
    return replace(kept, state=means, counts=counts)


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns parameter groups as a state dict has them: with numbers for parameters."""
    numbered, first = [], 0
    for group in groups:
        num = len(group["params"])
        numbered.append({**group, "params": list(range(first, first + num))})
        first += num
    return numbered


def _means(
    table: TrainingTable, state: Mapping[Any, Mapping[str, Any]], optimizer: Optimizer
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Returns the mean of the workers' states as the shards keep it, and steps per parameter."""
    counts = [0] * len(table.layout.tensors)
    flat = {name: np.zeros(table.layout.numel, np.float32) for name in optimizer.state_names}
    for index, parameter in enumerate(table.flat.parameters) if flat else ():
        entry: Mapping[str, Any] = state.get(parameter, {})
        counts[index] = int(entry.get("step", bool(entry)))
        for name, array in flat.items():
            fill(table, optimizer, array, entry.get(name), index, name)
    means: dict[str, np.ndarray] = {}
    for name, array in flat.items():
        shared = named(f"{table.name}.{name}", torch.from_numpy(array))
        shared.push(torch.from_numpy(array))
        means[name] = shared.pull().numpy()
    return means, counts
