"""The way of a gradient from a device to the shards, with the CPU's memory standing for a GPU's.

The tests cover the parts that a GPU shares with it: checks, torch's encoders, copies, the sending
thread.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
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
ON_DEVICE = (
    "connection.exchange.payloads",
    "connection.exchange.shared_grads",
    "model.copies",
    "model.flat",
    "replica.local_weights",
    "replica.pull_buffers",
    "training.gradients.group",
)
# Modes and compressors; tests/gpu/test_training.py trains in them on a GPU.
CASES = [
    ("ssgd", "none"),
    ("ssgd", "2bit"),
    ("ssgd", "dgc(ratio=0.1, clip=1.0)"),  # Encoded by the host.
    ("od(warmup=2)", "int8"),
    ("ssd(steps=2, warmup=2)", "topk(ratio=0.1)"),
    ("ssd(steps=2, warmup=2, local=mirror)", "none"),
    ("ssd(steps=2, warmup=2, local=secant)", "none"),
    ("cd(warmup=2, steps=3)", "2bit"),
    ("diloco(steps=3)", "none"),
    ("diloco(steps=3, overlap=mirror)", "none"),
]


@contextlib.contextmanager
def place(where: str) -> Iterator[torch.device]:
    """Returns where a model has to be; the stand-in's gradients are taken for ones on a device."""
    if where != STAND_IN:
        yield torch.device(where)
        return
    with contextlib.ExitStack() as stack:
        for module in ON_DEVICE:
            stack.enter_context(mock.patch(f"psworker.{module}.is_on_device", return_value=True))
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


def change_grad(me: Station, where: str) -> None:
    """Changes a gradient that has left, and trains one step more."""
    with place(where) as device:
        model = make_model().to(device)
        optimizer = wrap(model, "ssgd", "none")
        inputs, classes = (part.to(device) for part in batch(0, 0))
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
            grad = model.get_parameter("0.weight").grad
            assert grad is not None
            if step == 1:
                grad.data.mul_(0.5)  # As loss scaling does, which torch does not count.
            if step != 1:
                optimizer.step()
                continue
            # A GPU compares meanwhile: the error comes at the end of this step or of the next one.
            later = [] if where in ("cpu", STAND_IN) else [optimizer.step]
            with pytest.raises(psworker.GradientError, match=r"'0\.weight' was changed after"):
                run_all(optimizer.step, *later)


def run_all(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def step_on_workers(me: Station, where: str) -> dict[str, np.ndarray]:
    """Trains with an optimizer of the workers; one layer has no gradient in every second step."""
    with place(where) as device:
        model = make_model().to(device)
        optimizer = psworker.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), optimizer_on="worker"
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, classes = (part.to(device) for part in batch(me.rank, step))
            model.get_parameter("0.weight").requires_grad_(step % 2 == 0)
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
            optimizer.step()
        return {name: weight.detach().cpu().numpy() for name, weight in model.named_parameters()}


def share_buffers(me: Station, where: str) -> np.ndarray:
    """Trains with BatchNorm, and returns the running mean that evaluation sees."""
    with place(where) as device:
        model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8)).to(device)
        options: dict[str, Any] = {"model": model, "buffers": "mean"}
        optimizer = psworker.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), **options
        )
        for step in range(3):
            optimizer.zero_grad()
            inputs, classes = (part.to(device) for part in batch(me.rank, step))
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes % 8))
            optimizer.step()
        with optimizer.global_weights():
            pass  # Posts this worker's own.
        psworker.barrier("posted")
        with optimizer.global_weights():
            running: np.ndarray = model.get_buffer("1.running_mean").cpu().numpy().copy()
        return running


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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "compression"), CASES)
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


def test_a_gradient_on_a_device_that_is_changed_after_it_has_left_is_an_error(
    shards: Shards,
) -> None:
    shards.run(change_grad, STAND_IN, num_workers=1)


@pytest.mark.slow
def test_means_on_a_device_move_the_weights_as_those_on_the_host(shards: Shards) -> None:
    first, second = shards.run(step_on_workers, STAND_IN)
    host, _ = shards.run(step_on_workers, "cpu")
    assert same(first, second)
    assert same(first, host)


def test_buffers_on_a_device_are_shared_as_those_on_the_host(shards: Shards) -> None:
    found, _ = shards.run(share_buffers, STAND_IN)
    host, _ = shards.run(share_buffers, "cpu")
    assert np.array_equal(found, host)
