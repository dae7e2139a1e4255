"""Workers whose model is on a GPU, with real shards: they agree, and nothing waits for the GPU."""

import contextlib
import importlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import psworker
from tests.gpu import stand_in
from tests.integration.cluster import Shards, Station
from tests.integration.models import batch, make_model, relative_error, same, sgd
from tests.integration.test_device import (
    CASES,
    STAND_IN,
    change_grad,
    expect_refusal,
    share_buffers,
    step_on_workers,
    train,
)

STEPS = 8
WARMUP = 4  # Steps before memory is allocated and kernels are compiled.


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    with Shards(2) as started:
        yield started


@contextlib.contextmanager
def forbidden_waits() -> Iterator[None]:
    """Context manager: every call of torch that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_without_waits(me: Station, mode: str, compression: str, where: str, overlap: bool) -> int:
    """Trains with BatchNorm, whose statistics are shared; returns the number of contexts on GPUs.

    Where GPUs are several, a context on another one than the model's would be a mistake.
    """
    with stand_in.place(where) as device:
        train_on(device, me.rank, mode, compression, overlap)
    if device.type == "cpu":
        return 0
    # Torch's own tests look for contexts so, too; there is no public name.
    has_context = vars(importlib.import_module("torch._C"))["_cuda_hasPrimaryContext"]
    return sum(map(has_context, range(torch.cuda.device_count())))


def train_on(device: torch.device, rank: int, mode: str, compression: str, overlap: bool) -> None:
    """Trains; a wait for the GPU in a later step raises."""
    model = torch.nn.Sequential(make_model(), torch.nn.BatchNorm1d(10)).to(device)
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        mode=mode,
        compression=compression,
        overlap=overlap,
        compress_min_nbytes=1024,
        model=model,
    )
    for step in range(STEPS):
        inputs, classes = (part.to(device) for part in batch(rank, step))
        torch.cuda.synchronize(device)
        with forbidden_waits() if step >= WARMUP else contextlib.nullcontext():
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
            optimizer.step()
    optimizer.close()
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


@pytest.mark.parametrize(("mode", "compression"), CASES)
def test_workers_on_a_gpu_agree_with_each_other_and_about_with_the_cpu(
    shards: Shards, gpu: str, mode: str, compression: str
) -> None:
    first, second = shards.run(train, mode, compression, gpu)
    assert same(first, second)
    if compression == "none":  # Else a sum in another order is sent as another code.
        host, _ = shards.run(train, mode, compression, "cpu")
        for name, weight in host.items():
            assert relative_error(first[name], weight) < 1e-3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("mode", "compression"), CASES)
def test_no_step_waits_for_the_gpu(
    shards: Shards, gpu: str, mode: str, compression: str, overlap: bool
) -> None:
    found = shards.run(train_without_waits, mode, compression, gpu, overlap)
    assert found == [int(gpu != STAND_IN)] * 2


@pytest.mark.parametrize("compression", ["none", "2bit", "topk(ratio=0.1)"])
def test_a_nan_on_a_gpu_is_refused_by_name_and_stays_out_of_the_residual(
    shards: Shards, gpu: str, compression: str
) -> None:
    expect_refusal(shards, compression, gpu)


def test_a_gradient_on_a_gpu_that_is_changed_after_it_has_left_is_an_error(
    shards: Shards, gpu: str
) -> None:
    shards.run(change_grad, gpu, num_workers=1)


def test_means_on_a_gpu_move_the_weights_about_as_those_on_the_host(
    shards: Shards, gpu: str
) -> None:
    first, second = shards.run(step_on_workers, gpu)
    host, _ = shards.run(step_on_workers, "cpu")
    assert same(first, second)
    for name, weight in host.items():
        assert relative_error(first[name], weight) < 1e-3


def test_buffers_on_a_gpu_are_shared_about_as_those_on_the_host(shards: Shards, gpu: str) -> None:
    found, _ = shards.run(share_buffers, gpu)
    host, _ = shards.run(share_buffers, "cpu")
    np.testing.assert_allclose(found, host, rtol=1e-3, atol=1e-5)
