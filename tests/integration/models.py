"""A small model that workers train, and its batches: a function of rank and step alone."""

from typing import Any

import numpy as np
import torch

ROWS = 16  # Of one worker's batch.


def make_model() -> torch.nn.Module:
    """Returns 11,594 parameters with smooth activations: a slice on each of two shards."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 128),
        torch.nn.Tanh(),
        torch.nn.Linear(128, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 10),
    )


class Branches(torch.nn.Module):
    """One of three layers is used at a step; the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(20, 10) for _ in range(3)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        scores: torch.Tensor = self.layers[which](inputs)
        return scores


def batch(rank: int, step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and classes of one worker at one step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(rows, 20, generator=generator)
    return inputs, torch.randint(0, 10, (rows,), generator=generator)


def backward(model: torch.nn.Module, inputs: torch.Tensor, classes: torch.Tensor) -> float:
    """Makes the gradients of the mean cross entropy, and returns that."""
    loss = torch.nn.functional.cross_entropy(model(inputs), classes)
    torch.autograd.backward(loss)
    return loss.item()


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference of an element over the largest element."""
    return float(np.max(np.abs(ours.astype(np.float64) - theirs)) / np.max(np.abs(theirs)))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Returns whether all weights have the same bits."""
    return all(np.array_equal(one[name], other[name]) for name in one)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-2)
