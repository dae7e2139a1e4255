"""Training through the shards equals torch in one process, and the equations in numpy."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, weights_of

STEPS = 50
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[0] |= {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-3}
    groups[1] |= {"lr": 0.03, "momentum": 0.5, "dampening": 0.1}
    return torch.optim.SGD(groups, lr=0.1)


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[0] |= {"lr": 1e-2, "weight_decay": 1e-2}
    groups[1] |= {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6}
    return torch.optim.Adam(groups)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[0] |= {"lr": 1e-2, "weight_decay": 0.1}
    groups[1] |= {"lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0}
    return torch.optim.AdamW(groups)


def amsgrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[0] |= {"lr": 1e-2, "weight_decay": 1e-2}
    groups[1] |= {"lr": 3e-3, "betas": (0.8, 0.9)}
    return torch.optim.AdamW(groups, amsgrad=True)


def adagrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[1] |= {"lr": 0.02, "lr_decay": 0.1}
    return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)


def rmsprop(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[1] |= {"lr": 3e-4, "momentum": 0.9, "weight_decay": 1e-2}
    return torch.optim.RMSprop(groups, lr=1e-3, eps=1e-3, centered=True)


def nadam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[1] |= {"lr": 3e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}
    return torch.optim.NAdam(groups, lr=1e-2)


def radam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[1] |= {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1}
    return torch.optim.RAdam(groups, lr=1e-2)


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1)


Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns weights and biases as two groups, across all layers."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    biases = [weight for weight in model.parameters() if weight.ndim == 1]
    return [{"params": matrices}, {"params": biases}]


def train(me: Station, make: Make, schedule: Schedule) -> dict[str, np.ndarray]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        make(two_groups(model)), named_parameters=model.named_parameters(), mode="ssgd"
    )
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        scheduler.step()
    return weights_of(model)


def train_alone(make: Make, schedule: Schedule, num_workers: int) -> dict[str, np.ndarray]:
    """Returns the weights of one torch process on the joined batches."""
    model = make_model()
    optimizer = make(two_groups(model))
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in range(num_workers)]
        inputs, classes = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        backward(model, inputs, classes)
        optimizer.step()
        scheduler.step()
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (sgd, step_lr),
        (sgd, one_cycle),
        (adam, cosine),
        (adamw, step_lr),
        (amsgrad, cosine),
        (adagrad, step_lr),
        (rmsprop, cosine),
        (nadam, one_cycle),
        (radam, cosine),
    ],
)
def test_ssgd_equals_one_torch_process_on_the_joined_batch(
    shards: Shards, make: Make, schedule: Schedule
) -> None:
    """To 1e-5, where float32 in another order of summation gives about 3e-7."""
    alone = train_alone(make, schedule, num_workers=2)
    start = weights_of(make_model())
    first, second = shards.run(train, make, schedule)
    for name, weight in alone.items():
        assert relative_error(first[name], weight) <= 1e-5, name
        assert np.array_equal(first[name], second[name]), name
        assert relative_error(start[name], weight) > 1e-3, f"{name} was not trained"


ROWS_OF = (24, 8)


def train_uneven(me: Station) -> dict[str, np.ndarray]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(two_groups(model)), named_parameters=model.named_parameters()
    )
    for step in range(10):
        rows = ROWS_OF[me.rank] + step % 3
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step, rows))
        optimizer.samples = rows
        optimizer.step()
    return weights_of(model)


def test_batches_of_different_sizes_weigh_by_their_samples(shards: Shards) -> None:
    model = make_model()
    optimizer = sgd(two_groups(model))
    for step in range(10):
        parts = [batch(rank, step, ROWS_OF[rank] + step % 3) for rank in range(2)]
        inputs, classes = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        backward(model, inputs, classes)
        optimizer.step()
    first, _ = shards.run(train_uneven)
    for name, weight in weights_of(model).items():
        assert relative_error(first[name], weight) <= 1e-5, name


def train_with_gaps(me: Station) -> dict[str, np.ndarray]:
    """Worker 1 has no data at each third step: its gradient is of no account there."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(two_groups(model)), named_parameters=model.named_parameters()
    )
    for step in range(9):
        optimizer.samples = 0.0 if me.rank == 1 and step % 3 == 2 else 16.0
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    return weights_of(model)


def test_a_worker_without_samples_does_not_count(shards: Shards) -> None:
    model = make_model()
    optimizer = sgd(two_groups(model))
    for step in range(9):
        parts = [batch(rank, step) for rank in range(1 if step % 3 == 2 else 2)]
        optimizer.zero_grad()
        backward(model, *(torch.cat(part) for part in zip(*parts, strict=True)))
        optimizer.step()
    for together in shards.run(train_with_gaps):
        for name, weight in weights_of(model).items():
            assert relative_error(together[name], weight) <= 1e-5, name


LARGE = 3 * (1 << 20) + 12345  # Elements: a tensor over four long slices, two a shard.


def train_large(me: Station) -> tuple[int, dict[str, np.ndarray]]:
    model = torch.nn.ParameterDict({"large": torch.zeros(LARGE), "small": torch.zeros(3)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    for step in range(2):
        optimizer.zero_grad()
        large = torch.arange(LARGE).remainder(1009) + me.rank + step
        loss = (model["large"] * large).sum() + model["small"].sum() * me.rank
        torch.autograd.backward(loss)
        optimizer.step()
    return len(table_of(optimizer).flat.layout.slices), weights_of(model)


@pytest.mark.slow
def test_a_tensor_that_spans_slices_on_both_shards_is_put_together(shards: Shards) -> None:
    # Means of the two steps: i + 0.5 and i + 1.5, so -0.5 * (2 i + 2); small: -0.5 * 2 * 0.5.
    expected = -(np.arange(LARGE, dtype=np.float32) % 1009 + 1)
    for num_slices, weights in shards.run(train_large):
        assert num_slices == 4
        assert np.array_equal(weights["large"], expected)
        assert np.array_equal(weights["small"], np.full(3, -0.5, np.float32))


SYNCHRONOUS = [
    "ssgd",
    "ssd(steps=1, warmup=2, local=sgd)",
    "ssd(steps=3, warmup=2, local=glu)",
    "ssd(steps=3, warmup=2, local=mirror)",
    "ssd(steps=4, warmup=2, local=mirror, mirror=kept)",
]


def train_jittered(me: Station, job: str, run: int) -> list[list[dict[str, np.ndarray]]]:
    """Trains in every synchronous mode, with workers that are slow by turns that differ by run."""
    turns = random.Random(1000 * run + me.rank)
    results = []
    for number, mode in enumerate(SYNCHRONOUS):
        psworker.init(job=f"{job}-{run}-{number}")
        model = make_model()
        optimizer = psworker.DistributedOptimizer(
            sgd(two_groups(model)), named_parameters=model.named_parameters(), mode=mode
        )
        weights = []
        for step in range(12):
            optimizer.zero_grad()
            backward(model, *batch(me.rank, step))
            time.sleep(turns.choice([0.0, 0.0, 0.01]))
            optimizer.step()
            weights.append(weights_of(model))
        psworker.shutdown()
        results.append([*weights, weights_of(model)])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_same_seed_gives_the_same_bits_in_every_synchronous_mode(
    shards: Shards, num_workers: int
) -> None:
    job = new_job()
    first, second = (
        shards.run(train_jittered, job, run, num_workers=num_workers) for run in range(2)
    )
    for rank in range(num_workers):
        for mode, once, again in zip(SYNCHRONOUS, first[rank], second[rank], strict=True):
            for step, (one, other) in enumerate(zip(once, again, strict=True)):
                for name in one:
                    assert np.array_equal(one[name], other[name]), (mode, rank, step, name)
    for number, mode in enumerate(SYNCHRONOUS):
        final = [result[number][-1] for result in first]
        for name in final[0]:
            assert all(np.array_equal(final[0][name], other[name]) for other in final), mode
