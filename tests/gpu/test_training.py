"""Workers whose model is on a GPU, with real shards: they agree, and a NaN is refused by name."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station
from tests.integration.models import backward, batch, make_model, relative_error, same, sgd

pytestmark = pytest.mark.gpu

STEPS = 8
CASES = [
    ("ssgd", "none"),
    ("ssgd", "2bit"),
    ("ssgd", "dgc(ratio=0.1, clip=1.0)"),  # Encoded by the host.
    ("od(warmup=2)", "int8"),
    ("ssd(steps=2, warmup=2)", "topk(ratio=0.1)"),
    ("ssd(steps=2, warmup=2, local=mirror)", "none"),
    ("cd(warmup=2, steps=3)", "2bit"),
]


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    with Shards(2) as started:
        yield started


def train(me: Station, device: str, mode: str, compression: str) -> dict[str, np.ndarray]:
    """Trains, and returns the global weights."""
    model = make_model().to(device)
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        mode=mode,
        compression=compression,
        compress_min_nbytes=1024,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, classes = batch(me.rank, step)
        backward(model, inputs.to(device), classes.to(device))
        optimizer.step()
    optimizer.close()
    return {name: weight.detach().cpu().numpy() for name, weight in model.named_parameters()}


def spoil(me: Station, device: str, compression: str) -> tuple[str, bool]:
    """Trains until a gradient of rank 1 is NaN; returns what was raised, and what is owed."""
    model = make_model().to(device)
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        compression=compression,
        compress_min_nbytes=1024,
    )
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, classes = batch(me.rank, step)
            loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), classes.to(device))
            scale = float("nan") if (me.rank, step) == (1, 3) else 0.0
            torch.autograd.backward(loss + scale * model.get_parameter("2.weight").sum())
            optimizer.step()
        optimizer.close()
    except psworker.GradientError as problem:
        owed = optimizer.exchange.compressor_state()
        return str(problem), all(np.isfinite(array).all() for array in owed.values())
    return "", True


@pytest.mark.parametrize(("mode", "compression"), CASES)
def test_workers_on_a_gpu_agree_with_each_other_and_about_with_the_cpu(
    shards: Shards, mode: str, compression: str
) -> None:
    first, second = shards.run(train, "cuda", mode, compression)
    assert same(first, second)
    if compression == "none":  # Else a sum in another order is sent as another code.
        host, _ = shards.run(train, "cpu", mode, compression)
        for name, weight in host.items():
            assert relative_error(first[name], weight) < 1e-3


@pytest.mark.parametrize("compression", ["none", "2bit", "topk(ratio=0.1)"])
def test_a_nan_on_a_gpu_ends_training_by_name_and_is_not_owed(
    shards: Shards, compression: str
) -> None:
    (_, first), (message, second) = shards.run(spoil, "cuda", compression)
    assert "gradient of '2.weight' holds 8192 NaN or Inf of 8192 elements at step 3" in message
    assert first
    assert second
