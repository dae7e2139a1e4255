"""A model that grows in training: parameters are unfrozen, or parameter groups are added.

The layout of a table is fixed. So the workers meet, and continue with another table of all the
parameters that are to be trained now: `model+1` after `model`. Each worker has the global weights,
the optimizer's state and the step of the former table, and its residuals. The lowest rank uploads
what is the same for all, the next one if it dies meanwhile. No gradient is lost, and the weights
are those of a plain optimizer whose group was added at that step. The former table stays on the
shards until the job ends, and no worker pushes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pscore.errors import LOST, ConfigError, GradientError, JobMismatchError
from pscore.table_names import GROWN, LEFT_FOR_GOOD
from pscore.types import FloatArray, Role
from psworker.connection.membership import taking_part
from psworker.model.sharded import refuse_sharded
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.gradients.gradients import Gradients
from psworker.training.state.state_dict import pull_state
from psworker.training.table import TrainingTable, gone_on

BARRIER = "growth"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state that the next table takes over, in the layout of the former one."""

    weights: FloatArray  # (layout.numel,), as are all arrays here.
    state: dict[str, FloatArray]  # State arrays of the shards' optimizer.
    counts: list[int]  # Optimizer steps of each parameter.
    residuals: dict[str, FloatArray]
    step: int
    samples_seen: float


def is_thawed(frozen: Iterable[torch.nn.Parameter]) -> bool:
    """Returns whether a parameter that was frozen when the table was declared is trained now."""
    return any(parameter.requires_grad and parameter.numel() for parameter in frozen)


@contextlib.contextmanager
def explain_growth(name: str) -> Iterator[None]:
    """Context manager: says in the error of a declaration that the job has another table now."""
    try:
        yield
    except JobMismatchError as problem:
        if GROWN not in name:
            raise
        raise JobMismatchError(
            f"{problem}; the job has changed its mode or its model has grown since it began: make "
            "DistributedOptimizer with the mode and all parameters that the job has by now"
        ) from None


def require_possible(table: TrainingTable, gradients: Gradients) -> None:
    """Refuses growth where it cannot be.

    Raises:
        ConfigError: The workers exchange models, or the job is elastic: a worker that joins later
            would declare the table with which the job began.
        GradientError: Gradients of this step have left during backward.
    """
    if gradients.overlap.has_begun:
        raise GradientError(
            "parameters were unfrozen or added after gradients had been pushed during backward; "
            "do it before zero_grad(), or pass overlap=False to DistributedOptimizer"
        )
    refuse_sharded(
        table.flat,
        "adding or unfreezing parameters",
        "make DistributedOptimizer with all of them, and freeze them after that",
    )
    if table.rule.gossip:
        raise ConfigError(
            f"parameters cannot be added or unfrozen in mode {table.rule.name}: workers exchange "
            "whole models; make DistributedOptimizer with all of them, and freeze them after that"
        )
    if table.session.min_workers:
        raise ConfigError(
            "parameters cannot be added or unfrozen in a job whose workers come and go; make "
            "DistributedOptimizer with all of them, and freeze them after that"
        )


def leave(table: TrainingTable, recovery: WorkerRecovery) -> Kept:
    """Ends training with a table, at the same place on all workers; they must all call it."""
    session, replica = table.session, table.replica

    def end() -> int:
        table.local_step.part()
        table.end_round()
        table.settle()
        step = int(session.agree(BARRIER, float(replica.step), holds=True))
        taking_part.step_aside(session, table.exchange.table, LEFT_FOR_GOOD, replica.step)
        session.barrier(BARRIER, holds=True)
        table.fetch(None)
        return step

    step = recovery.run_between_steps(end)
    table.is_left = True
    table.flat.scatter_weights()
    state, counts = pull_state(table, recovery)
    return Kept(
        weights=table.flat.weights.cpu().numpy().copy(),
        state={name: array.numpy() for name, array in state.items()},
        counts=counts,
        residuals=_residuals(table),
        step=step,
        samples_seen=table.progress.seen,
    )


@contextlib.contextmanager
def following(table: TrainingTable) -> Iterator[None]:
    """Context manager around the start of the table that follows one which has been left.

    Raises:
        JobMismatchError: This worker was lost in it, and the others go on without it.
    """
    try:
        yield
    except LOST as problem:
        raise gone_on(table.session.job) from problem


def take_over(
    former: TrainingTable, table: TrainingTable, kept: Kept, groups: Sequence[dict[str, Any]]
) -> None:
    """Starts training with the next table where that with the former one ended.

    Args:
        table: The next one, which holds all parameters of the former.
        kept: The state that `leave` has returned.
    """
    places = {id(parameter): index for index, parameter in enumerate(former.flat.parameters)}
    pairs = [
        (places[id(parameter)], index)
        for index, parameter in enumerate(table.flat.parameters)
        if id(parameter) in places
    ]

    def moved(array: FloatArray, out: FloatArray) -> FloatArray:
        for theirs, ours in pairs:
            out[_span(table, ours)] = array[_span(former, theirs)]
        return out

    def zeros() -> FloatArray:
        return np.zeros(table.layout.numel, dtype=np.float32)

    def bring() -> None:
        state = [moved(array, zeros()) for array in kept.state.values()]
        counts = [0] * len(table.layout.tensors)
        for theirs, ours in pairs:
            counts[ours] = kept.counts[theirs]
        table.upload(Role.STATE, state, counts, kept.step, gathers=False)

    table.flat.gather_weights()
    weights = moved(kept.weights, table.flat.weights.cpu().numpy().copy())
    table.flat.weights.copy_(torch.from_numpy(weights))
    table.start(groups, bring=bring)
    table.continue_from(kept.step, kept.samples_seen, BARRIER)
    residuals = {name: moved(array, zeros()) for name, array in kept.residuals.items()}
    table.exchange.load_compressor_state(residuals)


def _residuals(table: TrainingTable) -> dict[str, FloatArray]:
    """Returns the residuals of all processes that are this worker."""
    residuals, numel = table.exchange.compressor_state(), table.layout.numel
    return {
        name: table.group.sum_on_host(
            torch.from_numpy(residuals[name])
            if name in residuals
            else torch.zeros(numel, dtype=torch.float32, device="cpu")
        ).numpy()
        for name in table.exchange.spec.compressor.state_names
    }


def _span(table: TrainingTable, index: int) -> slice:
    start = table.layout.offsets[index]
    return slice(start, start + table.layout.tensors[index].numel)
