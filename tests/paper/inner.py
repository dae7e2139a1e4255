"""A torch optimizer on each worker's flat weights, as a user's own is in the modes with rounds."""

from collections.abc import Callable
from typing import Any

import torch

from tests.harness import Vector

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer of runs whose rounds are not worked out by hand."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(lr: float) -> Maker:
    """Returns a function that makes plain SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


class Inner:
    """One optimizer per worker, made when it is first used; its state stays from then on."""

    def __init__(self, make: Maker, lr: Callable[[int], float] | None = None) -> None:
        self.make = make
        self.lr = lr
        self.workers: dict[int, tuple[torch.nn.Parameter, Any]] = {}

    def __call__(self, worker: int, step: int, weights: torch.Tensor, grad: Vector) -> None:
        """Makes one step on `(numel,)` weights of any type, in place."""
        if worker not in self.workers:
            parameter = torch.nn.Parameter(weights)
            self.workers[worker] = (parameter, self.make([parameter]))
        parameter, optimizer = self.workers[worker]
        assert parameter.data_ptr() == weights.data_ptr()
        if self.lr is not None:
            optimizer.param_groups[0]["lr"] = self.lr(step)
        parameter.grad = torch.from_numpy(grad).to(weights.dtype)
        optimizer.step()
