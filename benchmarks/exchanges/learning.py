"""Accuracy of the modes whose workers exchange models, at equal samples: see `decentralised.py`.

LeNet on Fashion-MNIST with simulated workers: gradients, gossips, directory, replicas and shards
are the real ones, time and network are simulated (`pssim/peers.py`, `pssim/training.py`). Each mode
has the same images in the same order for each worker and step, the same momentum, and a learning
rate that falls to 0 as a cosine. An asynchronous mode of the shards makes N updates in the time of
one synchronous step, so `asgd` has 1/N of the learning rate and less momentum, as in
`benchmarks.convergence`. Evaluated is the mean of all models; `consensus` is the distance of a
model to it, divided by its norm, at half of the run (at its end the learning rate is 0).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import tasks
from pscore.rules import parse_mode
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from pssim.network import NetworkLink
from pssim.peers import PeerWorld
from pssim.training import Compute, TrainingCluster, TrainingJob

NUM_WORKERS = 8
LR, MOMENTUM = 0.05, 0.9
MOMENTUM_ALONE = 0.6  # Of asgd.
COMPUTE_S, LATENCY_S = 0.1, 0.02
SPREAD = 0.1  # Workers differ in speed by so much at most.


@dataclass(slots=True, kw_only=True)
class Learned:
    """The result of one mode with one seed."""

    mode: str  # As `mode=` takes it.
    seed: int  # Seed of the weights, the order of the images and the simulation.
    steps: int  # Steps of each worker.
    accuracy: float  # Accuracy of the mean model, on all test images.
    consensus: float  # Relative distance of a model to the mean at half of the run; 0 with shards.
    cpu_s: float  # CPU seconds of the run.

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            key: round(value, 5) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


def learn(mode: str, task: tasks.Task, steps: int) -> Learned:
    """Trains once in one mode.

    Args:
        mode: As `mode=` takes it.
        task: Model and images.
        steps: Steps of each worker.
    """
    rule, started_s = parse_mode(mode), time.process_time()
    if isinstance(rule, Decentralised):
        model, consensus = _among_workers(rule, task, steps)
    else:
        model, consensus = _through_shards(mode, task, steps), 0.0
    accuracy, _ = task.evaluate(model)
    cpu_s = time.process_time() - started_s
    return Learned(
        mode=mode, seed=task.seed, steps=steps, accuracy=accuracy, consensus=consensus, cpu_s=cpu_s
    )


def _cosine(lr: float, steps: int) -> Callable[[int], float]:
    return lambda step: lr * (1 + math.cos(math.pi * min(step, steps) / steps)) / 2


def _sgd(momentum: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=LR, momentum=momentum)


def _through_shards(mode: str, task: tasks.Task, steps: int) -> nn.Module:
    """Returns the model of the shards after the steps."""
    is_alone = mode.startswith("asgd")
    lr = LR / NUM_WORKERS if is_alone else LR
    make = _sgd(MOMENTUM_ALONE if is_alone else MOMENTUM)
    job = TrainingJob(
        rule=parse_mode(mode),
        make_model=task.make_model,
        gradient=task.gradient,
        group=make([nn.Parameter(torch.zeros(1))]).param_groups[0],
        lr=_cosine(lr, steps),
        num_workers=NUM_WORKERS,
        steps=steps,
        link=NetworkLink(latency_s=LATENCY_S / 2),
        compute=Compute(mean_s=COMPUTE_S, deviation=SPREAD / 2),
        seed=task.seed,
    )
    return TrainingCluster(job).run().show(task.make_model())


class FlatTask:
    """A task whose model is one flat vector."""

    def __init__(self, task: tasks.Task) -> None:
        """Makes one model, whose weights each gradient replaces."""
        self.task, self.model = task, task.make_model()
        self._parameters = list(self.model.parameters())

    def weights(self) -> FloatArray:
        """Returns the model's weights, `(numel,) float32`."""
        return np.concatenate([p.detach().numpy().ravel() for p in self._parameters])

    def show(self, weights: FloatArray) -> nn.Module:
        """Returns the model with these weights."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.from_numpy(weights), self._parameters)
        return self.model

    def gradient(self, rank: int, step: int, weights: FloatArray) -> FloatArray:
        """Returns the gradient of one worker's images of one step, `(numel,) float32`."""
        model = self.show(weights)
        model.zero_grad()
        self.task.gradient(model, rank, step)
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return np.concatenate([grad.numpy().ravel() for grad in grads])


def _among_workers(rule: Decentralised, task: tasks.Task, steps: int) -> tuple[nn.Module, float]:
    """Returns the mean model after the steps, and the distance to it at half of them."""
    flat, halfway = FlatTask(task), dict[int, FloatArray]()

    def gradient(rank: int, step: int, weights: FloatArray) -> FloatArray:
        if step == steps // 2:
            halfway[rank] = weights
        return flat.gradient(rank, step, weights)

    draw = np.random.default_rng(task.seed)
    world = PeerWorld(
        rule,
        gradient,
        flat.weights(),
        num_workers=NUM_WORKERS,
        steps=steps,
        lr=_cosine(LR, steps),
        make_optimizer=_sgd(MOMENTUM),
        seed=task.seed,
        compute_s=list(COMPUTE_S * draw.uniform(1 - SPREAD, 1 + SPREAD, NUM_WORKERS)),
        latency_s=LATENCY_S,
        keeps_paths=False,
    ).run()
    mean = np.mean([world.model(worker) for worker in world.workers], axis=0)
    return flat.show(mean.astype(np.float32)), _distance(np.stack(list(halfway.values())))


def _distance(models: FloatArray) -> float:
    """Returns the mean distance of models to their mean, divided by its norm."""
    mean = models.mean(axis=0, dtype=np.float64)
    apart = np.linalg.norm(models - mean, axis=1).mean()
    return float(apart / np.linalg.norm(mean))
