"""The ends of a stage: an activation that comes in, and the result that goes out."""

from __future__ import annotations

from typing import Any

import torch

from pscore.errors import ConfigError


class _Enter(torch.autograd.Function):
    """Returns the second argument itself; its gradient is that of the first one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def make_entry(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a leaf that gets the gradient of an activation, and the activation for the layers.

    The first layer may change its input in place, as `ReLU(inplace=True)` does, which autograd
    forbids for a leaf. So the leaf has the shape alone, and no memory.

    Args:
        values: An activation of the stage before; the layers may change it.
    """
    leaf = values.new_zeros(()).expand(values.shape).requires_grad_()
    # As a tensor of its own: where it is a view, autograd would send the gradient to its base.
    entry: torch.Tensor = _Enter.apply(leaf, values.data)  # type: ignore[no-untyped-call]
    return leaf, entry


def require_tensor(result: object, what: str) -> None:
    """Refuses a result that cannot be passed on to the layers of another stage.

    Args:
        what: The stage or block that has returned the result, for people.

    Raises:
        ConfigError: It is not one tensor.
    """
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"{what} returns a {type(result).__name__}, must return one tensor: join it with the "
            "block behind it in a module, or cut the model elsewhere"
        )
