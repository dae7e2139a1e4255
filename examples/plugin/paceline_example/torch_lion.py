"""Lion for torch: the optimizer that a training script makes and hands to DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps of one size, in the direction of a sign (arXiv:2302.06675)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one step on this process alone, as plain torch would."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (item for item in group["params"] if item.grad is not None):
                state = self.state[weight]
                mean = state.setdefault("exp_avg", torch.zeros_like(weight))
                direction = mean.lerp(weight.grad, 1 - beta1).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-group["lr"])
                mean.lerp_(weight.grad, 1 - beta2)
        return loss
