"""The shards' counterparts of the optimizers of row tables, and their hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.types import HyperArray
from psworker.rows.optimizers import FTRL, RowwiseAdagrad

_NAMES: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SparseAdam: "sparse_adam",
    RowwiseAdagrad: "rowwise_adagrad",
    FTRL: "ftrl",
}
_FORM = (
    "torch.optim.SGD, Adagrad or SparseAdam, or psworker.RowwiseAdagrad or FTRL, of "
    "[table.weight, ...]"
)
# Arguments of torch that would move rows without a gradient, with the remedy.
_REFUSED = {
    "momentum": "momentum moves rows that a step does not touch; use torch.optim.SparseAdam, or "
    "momentum=0",
    "weight_decay": "weight decay moves rows that a step does not touch, and torch refuses it for "
    "sparse gradients too; use weight_decay=0, or with SGD add decay='touched' to the "
    "parameter group: then the rows of a step decay, and no others",
    "differentiable": "the shards make the steps",
}
_DEFAULTS = {"maximize": False, "initial_accumulator_value": 0.0, "weight_decay": 0.0}


def counterpart(optimizer: object) -> str:
    """Returns the name of the shards' optimizer of rows that makes the steps of `optimizer`.

    Raises:
        UnsupportedOptimizerError: No optimizer of the shards makes the same steps.
        ConfigError: It is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"rows is a {type(optimizer).__name__}, must be {_FORM}")
    name = _NAMES.get(type(optimizer))
    if name is None:
        kind = type(optimizer).__name__
        remedy = f"must be {_FORM}"
        if "Adam" in kind:
            remedy = f"{kind} moves every row at every step; use torch.optim.SparseAdam"
        raise UnsupportedOptimizerError(f"the optimizer of rows is {kind}: {remedy}")
    return name


def hyper_of(name: str, groups: list[dict[str, Any]]) -> HyperArray:
    """Returns the hyper-parameters of this step, `(len(groups), len(hyper_names)) float64`.

    Raises:
        UnsupportedOptimizerError: An argument is set that would move rows without a gradient.
        ConfigError: A hyper-parameter is NaN or Inf.
    """
    rows = np.array([_row(name, group) for group in groups], dtype=np.float64)
    if not np.isfinite(rows).all():
        index, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        what = ROW_OPTIMIZERS[name].hyper_names[column]
        raise ConfigError(
            f"{what} of group {index} of the optimizer of rows is {rows[index, column]}, must be a "
            "number"
        )
    kind = ROW_OPTIMIZERS[name]
    for divisor in kind.divisors:
        if not (rows[:, kind.hyper_names.index(divisor)] > 0).all():
            raise ConfigError(
                f"{divisor} of the optimizer of rows has to be above 0: {kind.name} divides by it; "
                "let a warm-up begin above 0"
            )
    return rows


def _row(name: str, group: Mapping[str, Any]) -> list[float]:
    """Returns one row of hyper-parameters."""
    for argument, why in _REFUSED.items():
        touched = argument == "weight_decay" and group.get("decay") == "touched"
        if group.get(argument) and not (touched and name == "sgd"):
            given = group[argument]
            raise UnsupportedOptimizerError(f"the optimizer of rows has {argument}={given}: {why}")
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    values = {**_DEFAULTS, **group, **betas}
    return [float(values[column]) for column in ROW_OPTIMIZERS[name].hyper_names]
