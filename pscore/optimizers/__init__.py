"""Server optimizers by name, and the counterparts of torch optimizers, without importing torch.

A new one is one file here and one line in `own.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.optimizers import own
from pscore.optimizers.base import Optimizer as Optimizer
from pscore.optimizers.base import SliceStep
from pscore.registry import Registry, classes_of
from pscore.types import HyperArray, SegmentTable

OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer", "paceline.optimizers", Optimizer, classes_of(own, Optimizer)
)

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
    _refuse_unknown_arguments(counterpart, optimizer, groups)
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
    """Returns the optimizer that implements a class with the flags that all groups set."""
    is_torch = found.__module__.startswith("torch.optim.")
    name = found.__name__ if is_torch else f"{found.__module__}.{found.__qualname__}"
    plugins = _implementing(name, OPTIMIZERS.own) or _implementing(name, OPTIMIZERS)
    if not plugins:
        names = {name for plugin in OPTIMIZERS.values() for name in plugin.torch_classes}
        dotted = sorted(name if "." in name else f"torch.optim.{name}" for name in names)
        raise UnsupportedOptimizerError(
            f"optimizer is {found.__module__}.{found.__qualname__}, must be one of "
            f"{', '.join(dotted)}"
        )
    by_flags = {plugin.torch_classes[name]: plugin for plugin in plugins}
    known = frozenset[str]().union(*by_flags)
    flags = frozenset(flag for flag in known if all(group.get(flag) for group in groups))
    return by_flags[flags]()


def _implementing(name: str, registered: Mapping[str, type[Optimizer]]) -> list[type[Optimizer]]:
    return [plugin for plugin in registered.values() if name in plugin.torch_classes]


def _refuse_unknown_arguments(
    counterpart: Optimizer, optimizer: Any, groups: Sequence[Mapping[str, Any]]
) -> None:
    # Only what torch itself reads: schedulers and users keep keys of their own in the groups.
    parameters = inspect.signature(type(optimizer).__init__).parameters
    supported = _KNOWN.union(counterpart.hyper_names)
    for argument in optimizer.defaults.keys() - supported:
        default = parameters[argument].default if argument in parameters else None
        for group in groups:
            if group.get(argument, default) != default:
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} has {argument}={group[argument]!r}, which the "
                    f"shards do not support; they support {', '.join(sorted(_KNOWN))}"
                )
