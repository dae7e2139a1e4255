"""Loss scaling with the stock `torch.amp.GradScaler`, and steps that a worker leaves out.

A scale that is a power of two changes no bit of a gradient that neither overflows nor vanishes. So
a run with a scaler is held to the same run without one, in which every worker leaves out the batch
that overflows; and that, in `ssgd`, to plain torch in one process.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import batch, make_model, relative_error, same, weights_of

STEPS = 8
SPOILT = 5  # The batch that overflows, on rank 1 alone.
SCALES = (4.0, 1024.0, 65536.0)
MODES = ("ssgd", "od(warmup=2)", "ssd(steps=2, warmup=2)", "local(steps=2)")
RECIPES = ("plain", "clipped", "accumulated")
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}
Weights = dict[str, np.ndarray]


def losses(model: torch.nn.Module, rank: int, step: int, recipe: str) -> Iterator[torch.Tensor]:
    """Yields the loss of each backward pass of a step; that of batch `SPOILT` of rank 1 is Inf."""
    num_parts = 2 if recipe == "accumulated" else 1
    for part in range(num_parts):
        inputs, classes = batch(rank + 10 * part, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes) / num_parts
        yield loss * float("inf") if (rank, step) == (1, SPOILT) else loss


def train_scaled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, recipe: str, scale: float
) -> float:
    """Trains as PyTorch's examples of mixed precision do; returns the scale at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, rank, step, recipe):
            torch.autograd.backward(scaler.scale(loss))
        if recipe == "clipped":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def train_unscaled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, recipe: str, mode: str
) -> None:
    """Trains without a scaler, on the batches that do not overflow."""
    for step in range(STEPS):
        if step == SPOILT and not mode.startswith("local"):
            continue
        optimizer.zero_grad()
        for loss in losses(model, rank, step, recipe):
            torch.autograd.backward(loss)
        if (rank, step) == (1, SPOILT):
            optimizer.skip_step()  # type: ignore[attr-defined]
            continue
        if recipe == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def wrap(make: str, mode: str, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = make_model()
    return model, psworker.DistributedOptimizer(
        OPTIMIZERS[make](model.parameters()), model.named_parameters(), mode=mode, **options
    )


def compare(me: Station, job: str, make: str) -> dict[str, Any]:
    """Returns weights, clock and scale of each mode and recipe, with a scaler and without one."""
    found: dict[str, Any] = {}
    scales = itertools.cycle(SCALES)
    for mode, recipe in itertools.product(MODES, RECIPES):
        scale = next(scales)
        for is_scaled in (True, False):
            me.tell(mode)  # It goes on: the first worker of all compiles kernels.
            psworker.shutdown()
            psworker.init(job=f"{job}-{mode}-{recipe}-{is_scaled}")
            model, optimizer = wrap(make, mode)
            final = 0.0
            if is_scaled:
                final = train_scaled(model, optimizer, me.rank, recipe, scale) / scale
            else:
                train_unscaled(model, optimizer, me.rank, recipe, mode)
            clock = optimizer.clock
            optimizer.close()
            found[f"{mode} {recipe} {is_scaled}"] = (weights_of(model), clock, final)
    return found


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scaler_changes_no_bit_and_an_overflow_is_left_out_by_all(
    shards: Shards, make: str
) -> None:
    first, second = shards.run(compare, new_job(), make)
    for mode, recipe in itertools.product(MODES, RECIPES):
        case = f"{mode} {recipe}"
        scaled = [ours[f"{case} True"] for ours in (first, second)]
        unscaled = [ours[f"{case} False"] for ours in (first, second)]
        for (weights, clock, final), (expected, expected_clock, _) in zip(
            scaled, unscaled, strict=True
        ):
            assert clock == expected_clock, case
            assert same(weights, expected), case
            if not mode.startswith("local"):  # Doubled at 3, halved at the overflow.
                assert final == 1.0, case
        assert same(scaled[0][0], scaled[1][0]), case


def together(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Weights:
    """Trains in one process on the mean gradient of both workers, with a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for loss in losses(model, rank, step, "plain"):
                torch.autograd.backward(scaler.scale(loss / 2))
        scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


def alone(me: Station, make: str) -> Weights:
    model, optimizer = wrap(make, "ssgd")
    train_scaled(model, optimizer, me.rank, "plain", 1024.0)
    return weights_of(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_two_workers_with_scalers_train_as_one_process_does(shards: Shards, make: str) -> None:
    model = make_model()
    plain = together(model, OPTIMIZERS[make](model.parameters()))
    first, second = shards.run(alone, make)
    assert same(first, second)
    for name, weight in plain.items():
        assert relative_error(first[name], weight) <= 1e-5, name
