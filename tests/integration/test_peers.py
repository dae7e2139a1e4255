"""Decentralised modes with real workers and shards: limits, bits, kills and newcomers."""

from __future__ import annotations

import itertools
import time
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


MODES = ("allreduce(average_every=10)", "dpsgd(average_every=10)", "adpsgd(average_every=10)")
LEASE_S = 1.5
DIES_AT, MORE = 10, 15


def train_until_told(me: Station, mode: str, dies: bool, is_new: bool) -> dict[str, Any]:
    """Trains until the test says so; a new worker tells when it has trained with the others."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    peers = optimizer._table.local_step._peers  # type: ignore[attr-defined]
    losses, models = [], {}
    for step in itertools.count():
        if dies and step == DIES_AT:
            me.tell()
            me.hear()
        optimizer.zero_grad()
        losses.append(backward(model, *batch(0, 0)))
        optimizer.step()
        models[peers.gossip.number] = weights_of(model)
        time.sleep(0.01)  # For exchanges that no step waits for.
        if is_new and step >= MORE and peers.report().num_exchanges:
            me.tell()
            is_new = False
        if me.is_told():
            break
    psworker.shutdown()
    return {"losses": losses, "models": models, "mean": weights_of(model)}


@pytest.mark.parametrize("mode", MODES)
def test_others_go_on_when_a_worker_is_killed_and_another_comes(mode: str) -> None:
    with Shards(1, lease_s=LEASE_S) as shards:
        options: dict[str, Any] = {"num_workers": 3, "job": new_job()}
        work = train_until_told
        with shards.workers(work, mode, False, False, ranks=[0, 2], **options) as workers:
            with shards.workers(work, mode, True, False, ranks=[1], **options) as killed:
                killed[0].hear()
                killed[0].kill()
            with shards.workers(work, mode, False, True, ranks=[1], **options) as others:
                others[0].hear()
                for worker in (*workers, *others):
                    worker.tell()
                first, last, new = (worker.result() for worker in (*workers, *others))
    for found in (first, last, new):
        assert np.isfinite(found["losses"]).all()
        assert found["losses"][-1] < 0.5 * first["losses"][0]
    for other in (last, new):  # The new worker trains on the others' progress.
        number = max(first["models"].keys() & other["models"].keys(), default=-1)
        if mode.startswith("allreduce"):
            for name, weight in first["models"][number].items():
                assert np.array_equal(weight, other["models"][number][name]), name
        for name, weight in first["mean"].items():
            assert relative_error(other["mean"][name], weight) < 0.2, name
