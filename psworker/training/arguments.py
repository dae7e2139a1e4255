"""Checks of the first two arguments of `DistributedOptimizer`, with a sentence for each mistake."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pscore.errors import ConfigError

FORM = "DistributedOptimizer(optimizer, model.named_parameters())"


def require_optimizer(optimizer: object, named: object, wrapper: type) -> None:
    """Refuses a first argument that is no torch optimizer, or one that is wrapped already.

    Args:
        optimizer: The first argument.
        named: The second one.
        wrapper: The class of wrapped optimizers.

    Raises:
        ConfigError: The first argument cannot be wrapped; the message shows the right call.
    """
    if isinstance(optimizer, wrapper):
        raise ConfigError(
            "the optimizer is a DistributedOptimizer already: wrap the optimizer of torch.optim, "
            "once"
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
