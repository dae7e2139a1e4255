"""The state of a torch optimizer as one vector, for a worker that comes in new.

The vector has no names in it: the worker that takes it makes its own state first, by a step with
gradients of zero whose effect is overwritten, so both have the same arrays in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pscore.errors import ConfigError
from pscore.types import FloatArray


def pack(optimizer: torch.optim.Optimizer) -> FloatArray:
    """Returns the tensors of an optimizer's state, one after the other, `(k,) float32`."""
    parts = [part.detach().float().cpu().reshape(-1).numpy() for part in _tensors(optimizer)]
    return np.concatenate([np.empty(0, np.float32), *parts])


def unpack(
    optimizer: torch.optim.Optimizer, values: FloatArray, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Overwrites an optimizer's state with the result of `pack` for another one.

    Args:
        optimizer: Optimizer of the same class, with parameters of the same shapes.
        values: The vector; empty: the other optimizer has no state.

    Raises:
        ConfigError: The state has another length than this optimizer's.
    """
    if not len(values):
        return
    if not optimizer.state:
        complete(optimizer, parameters)
    tensors = list(_tensors(optimizer))
    wanted = sum(part.numel() for part in tensors)
    if wanted != len(values):
        raise ConfigError(
            f"another worker's optimizer has a state of {len(values)} numbers, this one's has "
            f"{wanted}: all workers must use the same optimizer"
        )
    start = 0
    with torch.no_grad():
        for part in tensors:
            piece = torch.from_numpy(values[start : start + part.numel()])
            part.copy_(piece.view(part.shape))
            start += part.numel()


def complete(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Makes the state of each parameter that has none yet, by a step with a gradient of zero.

    Args:
        parameters: The trained parameters; their values and gradients stay.
    """
    kept = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None if optimizer.state.get(parameter) else torch.zeros_like(parameter)
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)  # Without hooks: it is no step of training.
    with torch.no_grad():
        for parameter, grad, value in kept:
            parameter.grad = grad
            parameter.copy_(value)


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields the tensors of the state, by parameter and name."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in sorted(state):
                if isinstance(state[name], torch.Tensor):
                    yield state[name]
