"""`state_dict` and `load_state_dict` of the wrapper: torch's format, with the shards' state in it.

The usual keys hold what `torch.optim` keeps there, so a plain torch optimizer can load the state,
and the state of a plain torch optimizer can be loaded here. The key `paceline` holds the step, the
mode and the residuals of error feedback, each as one flat vector in the model's own order, which is
the same for any number of shards. In a mode whose workers run the wrapped optimizer themselves, the
usual keys hold that worker's state, and `paceline` holds the shards' state too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pscore.errors import ConfigError
from pscore.json_text import count_of
from pscore.optimizers.base import Optimizer
from pscore.text import counted
from pscore.types import FloatArray, Role
from psworker.connection.membership import taking_part
from psworker.job.companions import Companion
from psworker.model.sharded import refuse_sharded
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.table import TrainingTable

log = logging.getLogger("paceline")
Groups = Sequence[Mapping[str, Any]]
BARRIER = "load_state_dict"
INSTEAD = (
    "`psserver checkpoint` and `psserver restore` keep weights and the shards' optimizer state, in "
    "whole tensors; torch.distributed.checkpoint keeps the state of an optimizer that workers run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """A state dict in the layout of the table."""

    arrays: list[FloatArray]  # State arrays of the shards' optimizer, (layout.numel,) each.
    counts: list[int]  # Optimizer steps of each parameter.
    step: int  # Steps of training behind it.
    samples_seen: float
    compressor: dict[str, FloatArray]  # Residuals, (layout.numel,) each.


def torch_state(
    table: TrainingTable,
    recovery: WorkerRecovery,
    param_groups: Groups,
    plain: dict[str, Any],
    inner: dict[int, Any] | None,
    *,
    at_round: bool = False,
) -> dict[str, Any]:
    """Returns the state of the wrapper and of the shards' optimizer.

    Args:
        plain: Its `torch.optim.Optimizer.state_dict`.
        inner: State of the wrapped optimizer if this worker runs it, else None.
        at_round: Whether the model holds the global weights (`Progress.behind`).
    """
    step, seen = table.progress.behind(at_round=at_round)
    if step != table.replica.step:
        log.warning(
            "state_dict() at step %d is inside a round: with the global weights it continues from "
            "step %d, where the round began, and its steps are made again",
            table.replica.step,
            step,
        )
    refuse_sharded(table.flat, "state_dict()", INSTEAD)
    holds_weights = table.optimizer.holds_weights
    flat, counts = pull_state(table, recovery) if holds_weights else ({}, [])
    order = _torch_order(table, param_groups)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, steps in enumerate(counts):
        if steps == 0:
            continue
        entry = {
            name: _state_of(table, flat[name], index, name) for name in table.optimizer.state_names
        }
        if table.optimizer.torch_has_step:
            entry["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        if entry:
            state[order[index]] = entry
    table.exchange.flush()
    return {
        "state": state if inner is None else inner,
        "param_groups": plain["param_groups"],
        "paceline": {
            "step": step,
            "samples_seen": seen,
            "mode": str(table.rule),
            "compression": str(table.exchange.spec.compressor),
            **({"counts": torch.tensor(counts, device="cpu")} if holds_weights else {}),
            "outer": {} if inner is None else state,
            "compressor_state": {
                name: torch.from_numpy(array)
                for name, array in table.exchange.compressor_state().items()
            },
        },
    }


def read_state(
    table: TrainingTable, param_groups: Groups, state_dict: Mapping[str, Any]
) -> LoadedState:
    """Returns a state dict of `torch_state`, or of a plain torch optimizer, in the table's layout.

    Raises:
        ConfigError: The state is of another model or optimizer.
    """
    refuse_sharded(table.flat, "load_state_dict()", INSTEAD)
    given: object = state_dict
    if not (isinstance(given, Mapping) and {"state", "param_groups"} <= given.keys()):
        raise ConfigError(
            "load_state_dict() of the optimizer takes what its state_dict() returned, with 'state' "
            "and 'param_groups': neither a model's nor a file that holds both"
        )
    try:
        table.require_hyper(state_dict["param_groups"])
    except ConfigError as problem:
        raise ConfigError(
            f"the state does not fit: {problem}; is it of another optimizer?"
        ) from None
    names, layout = table.optimizer.state_names, table.layout
    order = _torch_order(table, param_groups)
    own = state_dict.get("paceline", {})
    step = count_of(int(own.get("step", table.replica.step)), "step of the state")
    flat = {name: np.zeros(layout.numel, dtype=np.float32) for name in names}
    counts = [0] * len(order)
    entries = own.get("outer", {}) if table.rule.outer_optimizer else state_dict["state"]
    if not table.optimizer.holds_weights:  # The wrapped optimizer has it.
        entries = {}
    if left_out := entries.keys() - order.values():
        log.warning(
            "the state of %s that were frozen when DistributedOptimizer was made is left out: make "
            "it with all parameters that the state has, and freeze them after that",
            counted(len(left_out), "parameter"),
        )
    saved = own.get("counts", ())  # In the order of the table that was saved.
    for index, position in order.items():
        entry = entries.get(position)
        if entry is None:
            continue
        steps = entry.get("step", saved[index] if len(saved) == len(order) else 1)
        counts[index] = count_of(int(steps), "a count of steps in the state")
        for name in names:
            fill(table, table.optimizer, flat[name], entry.get(name), index, name)
    compressor = own.get("compressor_state", {})
    for name, array in compressor.items():
        if array.shape != (layout.numel,):
            raise ConfigError(
                f"{name} of the compressor has shape {list(array.shape)} in the state, "
                f"{[layout.numel]} here"
            )
    return LoadedState(
        arrays=[flat[name] for name in names],
        counts=counts,
        step=step,
        samples_seen=float(own.get("samples_seen", step * table.progress.samples)),
        compressor={name: array.numpy() for name, array in compressor.items()},
    )


def restore(table: TrainingTable, loaded: LoadedState, companions: Sequence[Companion]) -> bool:
    """Restores a state on the shards, from the lowest rank, and here; all workers call it.

    Args:
        companions: The tables beside it, which stay, and count their steps from that of the state.

    Returns:
        Whether it has; not for a worker that came late, if the others have gone on since: the job
        would go back, and they do not come here.

    Raises:
        PacelineError: A shard refused something, or does not answer.
    """
    session = table.session
    comes_late = session.passed.at_start  # It has pushed nothing.
    if not comes_late:
        _end_steps(table, companions)
    is_lowest, places = taking_part.is_lowest_or_passed(session, BARRIER)
    if places:
        return False
    if comes_late:
        _end_steps(table, companions)

    def bring() -> None:
        table.upload(Role.STATE, loaded.arrays, loaded.counts, loaded.step)
        for companion in companions:
            companion.locate(loaded.step)

    taking_part.bring_once(session, BARRIER, bring, is_mine=is_lowest, holds=True)
    if table.rule.alike:  # Each worker may have loaded a state of its own.
        table.local_step.share_state()
    table.continue_from(loaded.step, loaded.samples_seen, BARRIER)
    table.exchange.load_compressor_state(loaded.compressor)
    return True


def _end_steps(table: TrainingTable, companions: Sequence[Companion]) -> None:
    """Waits until the shards have counted the steps of this worker, and begins no other."""
    table.local_step.part()
    table.settle()
    for companion in companions:
        companion.flush()


def _state_of(table: TrainingTable, flat: torch.Tensor, index: int, name: str) -> torch.Tensor:
    """Returns a copy of parameter `index`'s part of a state array, as torch keeps it."""
    view = table.flat.state_view(flat, index)
    if name in table.optimizer.scalar_names:
        view = view.reshape(-1)[0]
    return view.clone()


def fill(
    table: TrainingTable, optimizer: Optimizer, flat: FloatArray, value: Any, index: int, name: str
) -> None:
    """Copies one state tensor into its part of a flat array; an absent one stays zero.

    Args:
        optimizer: The shards' optimizer whose state it is.
        flat: `(layout.numel,)`.

    Raises:
        ConfigError: The tensor has another shape.
    """
    if value is None:
        return
    target = table.flat.state_view(flat, index)
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    if name in optimizer.scalar_names and tensor.numel() == 1:
        tensor = tensor.reshape(()).expand(target.shape)
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{name} of {table.layout.tensors[index].name!r} has shape "
            f"{list(tensor.shape)} in the state, {list(target.shape)} in the model"
        )
    target.copy_(tensor)


def _torch_order(table: TrainingTable, param_groups: Groups) -> dict[int, int]:
    """Returns, for each parameter of the layout, its number in torch's state dict."""
    number, numbers = 0, {}
    for group in param_groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = number
            number += 1
    return {i: numbers[id(parameter)] for i, parameter in enumerate(table.flat.parameters)}


def pull_state(
    table: TrainingTable, recovery: WorkerRecovery
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Pulls the optimizer's state; returns flat `(numel,)` tensors, and steps per parameter."""
    names = table.optimizer.state_names
    state = recovery.peek(len(names))
    counts = [0] * len(table.layout.tensors)
    for spec, steps in zip(table.layout.slices, state.counts, strict=True):
        for segment, count in zip(spec.segments, steps, strict=True):
            counts[segment.tensor] = int(count)
    return dict(zip(names, state.state, strict=True)), counts
