"""Tasks of images for the benchmark of rounds: LeNet on Fashion-MNIST, ResNet-20 on CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import tasks

ROWS = 8  # Images of one worker in one step.
HELD_OUT = 2_000  # Test images.


@dataclass(frozen=True)
class Images:
    """Images whose class is predicted.

    Attributes:
        name: `lenet` or `resnet`.
        path: Where the images are; None: those of the repository, of `lenet` only.
        num_parts: Workers with classes of their own (unlike data); 1: all draw from all images.
        seed: Seed of the model and of the images drawn.
    """

    name: str
    path: Path | None = None
    num_parts: int = 1
    seed: int = 0

    @cached_property
    def _task(self) -> tasks.Task:
        return replace(_loaded(self.name, self.path), seed=self.seed)

    @cached_property
    def _by_class(self) -> torch.Tensor:
        return torch.argsort(self._task.train.labels, stable=True)

    def make_model(self) -> nn.Module:
        """Returns the model, with the same weights at each call."""
        return self._task.make_model()

    def draw(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the images and labels of one worker in one step."""
        rng = np.random.default_rng([self.seed, rank, step])
        room = len(self._by_class) // self.num_parts
        first = room * (rank % self.num_parts)
        picked = self._by_class[torch.from_numpy(first + rng.integers(room, size=ROWS))]
        images, labels = self._task.train.images[picked], self._task.train.labels[picked]
        return tasks.moved(images, rng) if self._task.augments else images, labels

    def gradient(self, model: nn.Module, rank: int, step: int) -> float:
        """Computes one worker's gradients of one step into `.grad`; returns the loss."""
        images, labels = self.draw(rank, step)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def held_out_loss(self, model: nn.Module) -> float:
        """Returns the mean loss on test images, in nats an image."""
        return self._task.evaluate(model, HELD_OUT)[1]


@cache
def _loaded(name: str, path: Path | None) -> tasks.Task:
    """Returns the task with its images, read once in a process."""
    if name == "lenet":
        return tasks.fashion(path, 0)
    if path is None:
        raise SystemExit("CIFAR-10 is not in the repository: give its npz with --data")
    return tasks.cifar(path, 0, num_test=HELD_OUT)
