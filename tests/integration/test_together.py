"""Workers that train together: unlike gradients, evaluation, types of numbers, jobs, buffers."""

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station
from tests.integration.models import (
    Branches,
    backward,
    batch,
    make_model,
    relative_error,
    same,
    sgd,
    weights_of,
)

Weights = dict[str, np.ndarray]
STEPS = 8


# ----- workers that differ


def one_has_a_gradient(me: Station) -> Weights:
    model = Branches()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, classes = batch(me.rank, step)
        loss = torch.nn.functional.cross_entropy(model(inputs, me.rank), classes)
        torch.autograd.backward(loss)
        optimizer.step()
    return weights_of(model)


def test_a_worker_without_a_gradient_counts_as_a_zero_in_the_mean(shards: Shards) -> None:
    """Worker 0 uses layer 0 and worker 1 layer 1; nobody uses layer 2, so nothing decays it."""
    model = Branches()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            inputs, classes = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(inputs, rank), classes) / 2
            torch.autograd.backward(loss)
        optimizer.step()
    for ours in shards.run(one_has_a_gradient):
        for name, weight in weights_of(model).items():
            assert relative_error(ours[name], weight) <= 2e-6, name
        assert np.array_equal(ours["layers.2.weight"], weights_of(Branches())["layers.2.weight"])


def train(
    me: Station, mode: str, overlap: bool, clip: float, evaluate: bool = False
) -> list[Weights]:
    """Returns the weights after each step."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, overlap=overlap
    )
    path = []
    for step in range(12):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        path.append(weights_of(model))
        if evaluate and step % 2 == me.rank:
            with optimizer.global_weights(), torch.no_grad():
                model(batch(9, step)[0])
    return path


def test_each_worker_clips_its_own_gradient(shards: Shards) -> None:
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(12):
        total = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
        for rank in range(2):
            optimizer.zero_grad()
            backward(model, *batch(rank, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                total[name] += weight.grad / 2
        for name, weight in model.named_parameters():
            weight.grad = total[name]
        optimizer.step()
    for path in shards.run(train, "ssgd", False, 0.3):
        for name, expected in weights_of(model).items():
            assert relative_error(path[-1][name], expected) <= 2e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=2)"])
def test_pushing_during_backward_changes_no_bit(shards: Shards, mode: str) -> None:
    runs = [shards.run(train, mode, overlap, 0.0) for overlap in (True, False)]
    for rank in range(2):
        for early, late in zip(*(run[rank] for run in runs), strict=True):
            assert same(early, late)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["ssgd", "ssd(steps=3, warmup=1, local=glu)", "ssd(steps=2, warmup=1, mirror=kept)"]
)
def test_evaluation_does_not_change_training_by_a_bit(shards: Shards, mode: str) -> None:
    """The workers evaluate at different steps."""
    with_it, without = (shards.run(train, mode, False, 0.0, evaluate) for evaluate in (True, False))
    for rank in range(2):
        assert all(same(*pair) for pair in zip(with_it[rank], without[rank], strict=True))


def compare_global(me: Station) -> list[tuple[Weights, Weights, Weights]]:
    """Returns local, global and again local weights at each step of a delayed mode."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode="ssd(steps=3, warmup=1)"
    )
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        before = weights_of(model)
        with optimizer.global_weights():
            during = weights_of(model)
        seen.append((before, during, weights_of(model)))
    return seen


def test_global_weights_are_the_same_on_all_workers_and_go_again(shards: Shards) -> None:
    first, second = shards.run(compare_global)
    for step, ((a, during_a, after_a), (b, during_b, after_b)) in enumerate(
        zip(first, second, strict=True)
    ):
        assert same(during_a, during_b), step
        assert same(a, after_a)
        assert same(b, after_b)
        assert same(a, b) == (step < 1)


def end(me: Station, whole: bool) -> tuple[Weights, Weights, str]:
    """Returns the weights at the end, those of an evaluation after it, and a step's error."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode="ssd(steps=3, warmup=1)"
    )
    for step in range(6):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    if whole:
        psworker.shutdown()
    else:
        optimizer.close()
    weights = weights_of(model)
    with optimizer.global_weights():
        seen = weights_of(model)
    try:
        optimizer.step()
    except psworker.ConfigError as problem:
        return weights, seen, str(problem)
    return weights, seen, ""


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_training_has_an_end_with_the_global_weights_in_the_model(
    shards: Shards, whole: bool
) -> None:
    first, second = shards.run(end, whole)
    for weights, seen, said in (first, second):
        assert same(weights, first[0])
        assert same(weights, seen)
        assert said == "training has ended: step() called after close() or psworker.shutdown()"


def load_late(me: Station, mode: str, whole: bool) -> float:
    """Loads zeros into the model of a wrapper; returns the largest weight after a step."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters(), mode=mode
    )
    for step in range(3):
        with optimizer.global_weights():
            optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    me.tell()
    me.hear()
    model.load_state_dict({name: torch.zeros(w.shape) for name, w in model.state_dict().items()})
    if whole:
        optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return max(weight.abs().max().item() for weight in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=0)"])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_are_changed_in_place_are_warned_of(
    shards: Shards, mode: str, whole: bool
) -> None:
    """They are not the shards', unless the wrapper's state is loaded with them."""
    with shards.workers(load_late, mode, whole) as workers:
        for worker in workers:
            worker.hear()
            assert worker.written() == ""
        for worker in workers:
            worker.tell()
        for worker in workers:
            largest = worker.result()
            warned = worker.written().count("weights of '0.weight' were changed in place")
            assert (largest < 1e-3, warned) == ((True, 0) if whole else (False, 1))


# ----- types of numbers


def mixed(me: Station, mode: str, lr: float, steps: int) -> tuple[list[str], list[list[float]]]:
    """Trains a weight of each type by the gradient 1 (worker 0) and 3 (worker 1)."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    model = torch.nn.ParameterList([torch.full((3,), 1.0, dtype=kind) for kind in types])
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), mode=mode
    )
    path = []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(
            torch.stack([w.float().sum() for w in model]).sum() * (1 + 2 * me.rank)
        )
        optimizer.step()
        path.append([weight[0].item() for weight in model])
    return [str(weight.dtype) for weight in model], path


def test_half_precision_weights_are_float32_on_the_shards(shards: Shards) -> None:
    """Steps of 2^-10 are too small for bfloat16 at 1, but they add up."""
    for types, path in shards.run(mixed, "ssgd", 2.0**-11, 16):
        assert types == ["torch.float32", "torch.bfloat16", "torch.float16"]
        for step, (single, brain, half) in enumerate(path, start=1):
            exact = 1 - step * 2.0**-10
            assert single == exact
            assert brain == torch.tensor(exact).bfloat16().item()
            assert half == torch.tensor(exact).half().item()


def test_half_precision_weights_are_float32_between_pulls(shards: Shards) -> None:
    """Local steps of 2^-11 (worker 0) add up below what bfloat16 can hold."""
    _, path = shards.run(mixed, "ssd(steps=12, warmup=0)", 2.0**-11, 12)[0]
    for step, (single, brain, half) in enumerate(path, start=1):
        exact = 1 - step * 2.0**-11
        assert single == exact
        assert brain == torch.tensor(exact).bfloat16().item()
        assert half == torch.tensor(exact).half().item()


# ----- jobs and buffers


@pytest.mark.slow
def test_jobs_on_the_same_shards_do_not_see_each_other(shards: Shards) -> None:
    alone = [shards.run(train, mode, False, 0.0) for mode in ("ssgd", "ssd(steps=2, warmup=1)")]
    with (
        shards.workers(train, "ssgd", False, 0.0) as first,
        shards.workers(train, "ssd(steps=2, warmup=1)", False, 0.0) as second,
    ):
        together = [[worker.result() for worker in job] for job in (first, second)]
    for one, other in zip(alone, together, strict=True):
        for rank in range(2):
            assert all(same(*pair) for pair in zip(one[rank], other[rank], strict=True))


def normalize(
    me: Station, policy: str, mode: str
) -> tuple[list[float], list[float], list[float], int]:
    """Returns the running mean of own training, of evaluation, and after it."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=0.5), torch.nn.Linear(2, 1))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        mode=mode,
        model=model,
        buffers=policy,
    )
    norm = model[0]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + me.rank) + step
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()
    own = norm.running_mean.tolist()
    with optimizer.global_weights():
        pass  # Posts the newest.
    psworker.barrier()
    with optimizer.global_weights():
        shared = norm.running_mean.tolist()
        count = int(norm.num_batches_tracked)
    return own, shared, norm.running_mean.tolist(), count


@pytest.mark.parametrize(
    ("policy", "mode"), [("rank0", "ssgd"), ("mean", "ssgd"), ("local", "ssgd"), ("mean", "adpsgd")]
)
def test_evaluation_sees_the_buffers_that_the_policy_says(
    shards: Shards, policy: str, mode: str
) -> None:
    first, second = shards.run(normalize, policy, mode)
    # Means of the batches: worker 0 (2, 3), (3, 4), (4, 5); worker 1 (4, 6), (5, 7), (6, 8).
    own = [[0.25 + 0.75 + 2, 0.375 + 1 + 2.5], [0.5 + 1.25 + 3, 0.75 + 1.75 + 4]]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    expected = {"rank0": [own[0], own[0]], "mean": [mean, mean], "local": own}[policy]
    for rank, (before, during, after, count) in enumerate((first, second)):
        assert before == after == own[rank]
        assert during == expected[rank]
        assert count == 3
