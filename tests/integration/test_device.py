"""The way of a gradient from a device to the shards, with the CPU's memory standing for a GPU's.

The tests cover the parts that a GPU shares with it: checks, torch's encoders, copies, the sending
thread.
"""

import contextlib
import re
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

import psworker
from tests.inside import table_of
from tests.integration.cluster import Shards, Station
from tests.integration.models import backward, batch, make_model, same, sgd

STAND_IN = "cpu as a device"
STEPS = 8


@contextlib.contextmanager
def place(where: str) -> Iterator[torch.device]:
    """Returns where a model has to be; the stand-in's gradients are taken for ones on a device."""
    if where != STAND_IN:
        yield torch.device(where)
        return
    with (
        mock.patch("psworker.connection.exchange.is_on_device", return_value=True),
        mock.patch("psworker.connection.shared_grads.is_on_device", return_value=True),
        mock.patch("psworker.model.flat.is_on_device", return_value=True),
        mock.patch("psworker.connection.payloads.is_on_device", return_value=True),
    ):
        yield torch.device("cpu")


def wrap(model: torch.nn.Module, mode: str, compression: str) -> psworker.DistributedOptimizer:
    return psworker.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        mode=mode,
        compression=compression,
        overlap=True,
        compress_min_nbytes=1024,
    )


def train(me: Station, mode: str, compression: str, where: str) -> dict[str, np.ndarray]:
    """Trains, and returns the global weights."""
    with place(where) as device:
        model = make_model().to(device)
        optimizer = wrap(model, mode, compression)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, classes = batch(me.rank, step)
            backward(model, inputs.to(device), classes.to(device))
            optimizer.step()
        optimizer.close()
        return {name: weight.detach().cpu().numpy() for name, weight in model.named_parameters()}


def spoil(me: Station, compression: str, where: str) -> dict[str, np.ndarray]:
    """Trains, and continues behind a gradient of NaN; returns the global weights.

    Tells the error and the residuals' sum.
    """
    with place(where) as device:
        model = make_model().to(device)
        optimizer = wrap(model, "ssgd", compression)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, classes = (part.to(device) for part in batch(0, step))
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            spoilt = float("nan") if step == 2 else 0.0
            torch.autograd.backward(loss + spoilt * model.get_parameter("2.weight").sum())
            try:
                optimizer.step()
            except psworker.GradientError as problem:
                residual = table_of(optimizer).exchange.compressor_state().values()
                me.tell((str(problem), sum(float(np.abs(array).sum()) for array in residual)))
                optimizer.state_dict()
        optimizer.close()
        assert optimizer.clock == STEPS  # The step counts without the slice that was refused.
        return {name: weight.detach().cpu().numpy() for name, weight in model.named_parameters()}


def expect_refusal(shards: Shards, compression: str, where: str) -> None:
    """Asserts that the step that waits for a push of NaN reports it; the residual has no NaN."""
    with shards.workers(spoil, compression, where, num_workers=1) as (worker,):
        message, residual = worker.hear()
        weights = worker.result()
    assert all(np.isfinite(weight).all() for weight in weights.values())
    # Of the tensor it names the part that is in this slice.
    assert re.match(r"gradient of '2.weight' holds (\d+) NaN or Inf of \1 elements", message)
    assert "at step 2; nothing of it was pushed" in message
    assert np.isfinite(residual)
    assert (residual > 0.0) == (compression != "none")


@pytest.mark.parametrize(
    ("mode", "compression"), [("cd(warmup=2, steps=3)", "2bit"), ("ssgd", "none")]
)
def test_gradients_on_a_device_move_the_weights_as_those_on_the_host(
    shards: Shards, mode: str, compression: str
) -> None:
    first, second = shards.run(train, mode, compression, STAND_IN)
    host, _ = shards.run(train, mode, compression, "cpu")
    assert same(first, second)
    assert same(first, host)


@pytest.mark.parametrize("compression", ["none", "2bit"])
def test_a_nan_on_a_device_is_told_by_the_step_that_waits_for_it(
    shards: Shards, compression: str
) -> None:
    expect_refusal(shards, compression, STAND_IN)
