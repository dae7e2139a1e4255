"""Server optimizers by name, and the counterparts of torch optimizers, without importing torch.

A new one is one file here and one line in `OPTIMIZERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.optimizers.adagrad import Adagrad
from pscore.optimizers.adam import Adam
from pscore.optimizers.adamw import AdamW
from pscore.optimizers.amsgrad import AMSGrad, AMSGradW
from pscore.optimizers.assign import Assign
from pscore.optimizers.assign_sum import AssignSum
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.optimizers.delayed_nesterov import DelayedNesterov
from pscore.optimizers.mean import Mean
from pscore.optimizers.nadam import NAdam
from pscore.optimizers.radam import RAdam
from pscore.optimizers.rmsprop import CenteredRMSprop, RMSprop
from pscore.optimizers.sgd import SGD
from pscore.optimizers.slowmo import SlowMo
from pscore.types import HyperArray, SegmentTable

OPTIMIZERS: dict[str, type[Optimizer]] = {
    optimizer.name: optimizer
    for optimizer in (
        SGD,
        Adam,
        AdamW,
        AMSGrad,
        AMSGradW,
        Adagrad,
        RMSprop,
        CenteredRMSprop,
        NAdam,
        RAdam,
        Assign,
        AssignSum,
        Mean,
        SlowMo,
        DelayedNesterov,
    )
}

__all__ = ["OPTIMIZERS", "Optimizer", "from_torch", "hyper_rows", "warm_up"]

# Arguments that only affect torch's implementation, or that `hyper_from_torch` checks.
_KNOWN = {
    "alpha",
    "amsgrad",
    "betas",
    "capturable",
    "centered",
    "dampening",
    "decoupled_weight_decay",
    "differentiable",
    "eps",
    "foreach",
    "fused",
    "initial_accumulator_value",
    "lr",
    "lr_decay",
    "maximize",
    "momentum",
    "momentum_decay",
    "nesterov",
    "weight_decay",
}


def from_torch(optimizer: Any) -> tuple[Optimizer, HyperArray]:
    """Returns the shards' counterpart of a torch optimizer, and its present hyper-parameters.

    Args:
        optimizer: A `torch.optim` optimizer of exactly a supported class; the changes of a subclass
            could not be seen.

    Raises:
        UnsupportedOptimizerError: The class, or one of the arguments, has no counterpart.
    """
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    counterpart = _counterpart(type(optimizer), groups)
    _refuse_unknown_arguments(optimizer, groups)
    return counterpart, hyper_rows(counterpart, groups)


def hyper_rows(
    optimizer: Optimizer | str,
    param_groups: Sequence[Mapping[str, Any]],
    num_groups: int | None = None,
) -> HyperArray:
    """Returns the hyper-parameters of this step, `(num_groups, num_hyper) float64`.

    Args:
        optimizer: The optimizer, or its name in `OPTIMIZERS`.
        param_groups: torch's parameter groups; a learning rate may be a tensor of one element.
        num_groups: The number with which training began; None: any.

    Raises:
        UnsupportedOptimizerError: An argument is set that the shards do not implement.
        ConfigError: A hyper-parameter is NaN or Inf, or a group was removed or put in.
    """
    if num_groups not in (None, len(param_groups)):
        raise ConfigError(
            f"the optimizer has {len(param_groups)} parameter groups, and training began with "
            f"{num_groups}; to train a group no more, set its lr to 0 or freeze its parameters; "
            "to train more, call add_param_group() of the DistributedOptimizer"
        )
    plugin = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    rows = np.array([plugin.hyper_from_torch(group) for group in param_groups], dtype=np.float64)
    if not np.isfinite(rows).all():
        group, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        name, value = plugin.hyper_names[column], rows[group, column]
        raise ConfigError(f"{name} of parameter group {group} is {value}, must be a number")
    return rows


def warm_up(optimizer: Optimizer) -> None:
    """Makes one step of one element, so that a daemon compiles before it reports to be ready."""
    values = np.zeros(1, np.float32)
    state = [np.zeros(1, np.float32) for _ in optimizer.state_names]
    segments = SegmentTable(bounds=np.array([[0, 1]], np.int64), groups=np.zeros(1, np.int64))
    ones = np.ones(1, np.int64)
    hyper = np.zeros((1, len(optimizer.hyper_names)))
    optimizer.step(SliceStep(values, values, values, 1.0, state, segments, ones, ones, hyper))


def _counterpart(found: type[Any], groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Returns the optimizer that implements a torch class with the flags that all groups set."""
    plugins = [plugin for plugin in OPTIMIZERS.values() if found.__name__ in plugin.torch_classes]
    if not found.__module__.startswith("torch.optim.") or not plugins:
        names = {name for plugin in OPTIMIZERS.values() for name in plugin.torch_classes}
        supported = ", ".join(f"torch.optim.{name}" for name in sorted(names))
        raise UnsupportedOptimizerError(
            f"optimizer is {found.__module__}.{found.__qualname__}, must be one of {supported}"
        )
    by_flags = {plugin.torch_classes[found.__name__]: plugin for plugin in plugins}
    known = frozenset[str]().union(*by_flags)
    flags = frozenset(flag for flag in known if all(group.get(flag) for group in groups))
    return by_flags[flags]()


def _refuse_unknown_arguments(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    # Only what torch itself reads: schedulers and users keep keys of their own in the groups.
    parameters = inspect.signature(type(optimizer).__init__).parameters
    for argument in optimizer.defaults.keys() - _KNOWN:
        default = parameters[argument].default if argument in parameters else None
        for group in groups:
            if group.get(argument, default) != default:
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} has {argument}={group[argument]!r}, which the "
                    f"shards do not support; they support {', '.join(sorted(_KNOWN))}"
                )
