"""Decentralised modes with real workers and shards: against torch in one process, and with kills."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, weights_of

STEPS = 50
SYNCHRONOUS = (
    "ssgd",
    "allreduce",
    "allreduce(order=ranks)",
    "dpsgd(graph=complete, order=atc)",
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def train(me: Station, mode: str, job: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the global weights after some steps."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode, job=job
    )
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


def train_in(me: Station, modes: tuple[str, ...], job: str) -> list[dict[str, np.ndarray]]:
    return [train(me, mode, f"{job}-{index}") for index, mode in enumerate(modes)]


def test_synchronous_modes_without_a_server_are_synchronous_sgd(shards: Shards) -> None:
    results = shards.run(train_in, SYNCHRONOUS, new_job(), num_workers=3)
    for ours, theirs in itertools.product(results, results):
        for index, mode in enumerate(SYNCHRONOUS):
            for name, weight in theirs[0].items():
                assert relative_error(ours[index][name], weight) <= 1e-6, (mode, name)


def test_one_worker_is_the_plain_optimizer_to_the_bit(shards: Shards) -> None:
    modes = ("allreduce", "dpsgd", "dpsgd(order=atc, graph=ring)", "adpsgd")
    (results,) = shards.run(train_in, modes, new_job(), num_workers=1)
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    for mode, found in zip(modes, results, strict=True):
        for name, weight in weights_of(model).items():
            assert np.array_equal(found[name], weight), (mode, name)
