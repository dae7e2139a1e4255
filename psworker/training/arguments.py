"""Checks of arguments of `DistributedOptimizer` and its verbs, with a sentence for each mistake."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch

from pscore.errors import ConfigError
from pscore.rules.base import Rule
from pscore.timing.auto import parse_fixed_mode

Groups = Sequence[Mapping[str, Any]]
FORM = "DistributedOptimizer(optimizer, model.named_parameters())"


def require_optimizer(optimizer: object, named: object, wrapper: type) -> None:
    """Refuses a first argument that is no torch optimizer, or one that is wrapped already.

    Raises:
        ConfigError: The first argument cannot be wrapped; the message shows the right call.
    """
    if isinstance(optimizer, wrapper):
        raise ConfigError(
            "the optimizer is a DistributedOptimizer already: wrap the optimizer of torch.optim, "
            "once"
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "DistributedOptimizer is made inside torch.inference_mode(), whose tensors cannot be "
            "trained: make it outside"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(named, torch.optim.Optimizer):
        raise ConfigError(f"the arguments are swapped: the optimizer comes first, {FORM}")
    raise ConfigError(
        f"the first argument is a {type(optimizer).__name__}, must be an optimizer of torch.optim: "
        f"{FORM}"
    )


def list_named(named: object) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the pairs of name and parameter in the second argument.

    Raises:
        ConfigError: The second argument holds no such pairs; the message shows the right call.
    """
    if isinstance(named, torch.nn.Module):
        raise ConfigError(f"the second argument is a model; pass its named parameters: {FORM}")
    pairs: list[Any] = list(named) if isinstance(named, Iterable) else [named]
    for pair in pairs:
        if isinstance(pair, torch.Tensor):
            raise ConfigError(
                "the second argument has parameters without names; pass model.named_parameters(), "
                f"not model.parameters(): {FORM}"
            )
        if not (
            isinstance(pair, tuple) and [isinstance(item, str) for item in pair] == [True, False]
        ):
            raise ConfigError(
                f"the second argument has a {type(pair).__name__} in it, must be pairs of name and "
                f"parameter: {FORM}"
            )
    return pairs


def require_clip(optimizer: object, max_norm: object, wrapper: type) -> None:
    """Refuses arguments of `psworker.clip_grad_norm_` that torch's takes, and wrong norms.

    Raises:
        ConfigError: The first is no wrapper, or the second no number from 0; Inf clips nothing.
    """
    if not isinstance(optimizer, wrapper):
        raise ConfigError(
            f"the first argument is a {type(optimizer).__name__}, must be the "
            "DistributedOptimizer, not parameters: psworker.clip_grad_norm_(optimizer, max_norm)"
        )
    if not isinstance(max_norm, SupportsFloat) or not float(max_norm) >= 0:
        raise ConfigError(f"max_norm is {max_norm!r}, must be a number from 0")


def require_closure(closure: object) -> None:
    """Refuses an argument of `step` that is no closure, such as the loss.

    Raises:
        ConfigError: It cannot be called.
    """
    if not callable(closure):
        raise ConfigError(
            f"step() was given a {type(closure).__name__}; it takes no argument, or a closure that "
            "computes the loss and its gradients"
        )


def list_trained(groups: Groups) -> list[list[torch.Tensor]]:
    """Returns a copy of the list of parameters of each group."""
    return [list(group["params"]) for group in groups]


def require_groups(groups: Groups, began: Sequence[Sequence[torch.Tensor]], inner: Groups) -> None:
    """Refuses parameter groups that were changed in place, which would change nothing.

    Args:
        began: `list_trained` of them when the present table was declared.

    Raises:
        ConfigError: A parameter was added, moved or removed, or the wrapped optimizer has groups
            of its own.
    """
    for index, (group, then) in enumerate(zip(groups, began, strict=True)):
        now = group["params"]
        if len(now) != len(then) or not all(map(operator.is_, now, then)):
            raise ConfigError(
                f"parameter group {index} has {len(now)} parameters, and training began with "
                f"{len(then)}, or with others; to train more, call add_param_group() of the "
                "DistributedOptimizer, and to train one no more, freeze it"
            )
    if inner is not groups:
        raise ConfigError(
            "load_state_dict() of the wrapped optimizer gave it other parameter groups: call that "
            "of the DistributedOptimizer, or make the DistributedOptimizer afterwards"
        )


def require_model(model: object, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Refuses a `model=` that is not the one whose parameters are trained.

    Raises:
        ConfigError: It is no module, or has parameters, but none of those.
    """
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, must be the torch.nn.Module")
    own = {id(parameter) for parameter in model.parameters()}
    if own and own.isdisjoint(map(id, parameters)):
        raise ConfigError("model= has none of the parameters that are trained: pass their model")


def parse_rows_mode(rows: object, mode: str | Rule | None) -> Rule | None:
    """Returns the mode of row tables; None: it is that of the other parameters.

    Raises:
        ConfigError: It is no mode, or there are no row tables.
    """
    if mode is None:
        return None
    if rows is None:
        raise ConfigError("rows_mode= is the mode of row tables: it needs rows=, their optimizer")
    return parse_fixed_mode(mode)
