"""Checkpoints: `state_dict` of the wrapper in torch's format, to and from the shards."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, same, weights_of

Weights = dict[str, np.ndarray]
Make = Callable[[Any], torch.optim.Optimizer]
HALF, WHOLE = 5, 10


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)


def plain(groups: Any) -> torch.optim.Optimizer:
    """An optimizer without any state."""
    return torch.optim.SGD(groups, lr=0.1)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=1e-2, weight_decay=1e-3)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def nadam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=1e-2)


MAKERS = [sgd, plain, adam, adamw]


def with_unused(seed: int = 0) -> torch.nn.Module:
    """Returns the model with a layer that never has a gradient, and so no state."""
    model = make_model()
    model.register_module("unused", torch.nn.Identity())
    model.get_submodule("unused").register_parameter(
        "weight", torch.nn.Parameter(torch.full((3,), 2.0))
    )
    if seed:
        torch.manual_seed(seed)
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
    return model


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns groups whose order is not the model's."""
    weights = list(model.parameters())
    return [{"params": weights[1::2], "lr": 0.05}, {"params": weights[::2]}]


Schedule = torch.optim.lr_scheduler.StepLR


def steps(
    rank: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Schedule,
    span: range,
) -> None:
    for step in span:
        optimizer.zero_grad()
        backward(model, *batch(rank, step))
        optimizer.step()
        scheduler.step()


def begin(make: Make, mode: str, seed: int = 0) -> tuple[Any, Any, Schedule]:
    """Returns a model, its wrapper and a scheduler that acts in both halves of training."""
    model = with_unused(seed)
    optimizer = psworker.DistributedOptimizer(
        make(two_groups(model)), model.named_parameters(), mode=mode
    )
    return model, optimizer, Schedule(optimizer, step_size=3, gamma=0.5)


def saved(model: Any, optimizer: Any, scheduler: Schedule) -> bytes:
    """Returns a checkpoint as a file would hold it."""
    file = io.BytesIO()
    with optimizer.global_weights():
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


def loaded(checkpoint: bytes) -> dict[str, Any]:
    """Reads a checkpoint without unpickling anything but tensors."""
    parts: dict[str, Any] = torch.load(io.BytesIO(checkpoint), weights_only=True)
    return parts


def train(me: Station, make: Make, mode: str, save: bool) -> tuple[Weights, bytes]:
    """Trains all steps; returns the weights, and the checkpoint half way if asked for."""
    model, optimizer, scheduler = begin(make, mode)
    steps(me.rank, model, optimizer, scheduler, range(HALF))
    checkpoint = saved(model, optimizer, scheduler) if save else b""
    steps(me.rank, model, optimizer, scheduler, range(HALF, WHOLE))
    psworker.shutdown()
    return weights_of(model), checkpoint


def resume(me: Station, make: Make, mode: str, checkpoint: bytes) -> Weights:
    """Continues from a checkpoint, with a model that had begun elsewhere."""
    model, optimizer, scheduler = begin(make, mode, seed=1)
    parts = loaded(checkpoint)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    scheduler.load_state_dict(parts["scheduler"])
    steps(me.rank, model, optimizer, scheduler, range(HALF, WHOLE))
    psworker.shutdown()
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "mode", "num_workers"),
    [
        *((make, "ssgd", 2) for make in MAKERS),
        (sgd, "asgd", 1),
        (adam, "ssp(bound=2)", 1),
        (nadam, "asgd", 1),
    ],
)
def test_a_resumed_job_continues_to_the_bit(
    shards: Shards, make: Make, mode: str, num_workers: int
) -> None:
    (whole, checkpoint), *_ = shards.run(train, make, mode, True, num_workers=num_workers)
    for weights in shards.run(resume, make, mode, checkpoint, num_workers=num_workers):
        assert same(weights, whole)


@pytest.mark.slow
def test_a_checkpoint_loads_on_another_number_of_shards(shards: Shards) -> None:
    (whole, checkpoint), _ = shards.run(train, adam, "ssgd", True)
    with Shards(1) as one:
        for weights in one.run(resume, adam, "ssgd", checkpoint):
            assert same(weights, whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=3, warmup=2)", "ssd(steps=1, warmup=0)"])
def test_a_checkpoint_changes_no_bit_of_training(shards: Shards, mode: str) -> None:
    with_it, without = (shards.run(train, sgd, mode, save) for save in (True, False))
    for rank in range(2):
        assert same(with_it[rank][0], without[rank][0])


@pytest.mark.slow
def test_a_delayed_job_resumes_from_the_global_weights(shards: Shards) -> None:
    """Delayed by a pull that had been under way, so not to the bit; but no warm-up starts over."""
    mode = "ssd(steps=3, warmup=2)"
    (whole, checkpoint), _ = shards.run(train, sgd, mode, True)
    first, second = shards.run(resume, sgd, mode, checkpoint)
    assert same(first, second)
    begun = weights_of(with_unused())
    for name, weight in first.items():
        drift = np.linalg.norm(weight - whole[name])
        assert drift <= 0.5 * np.linalg.norm(whole[name] - begun[name]), name


@pytest.mark.parametrize("make", MAKERS)
def test_the_state_loads_into_a_plain_torch_optimizer_which_continues_alike(
    shards: Shards, make: Make
) -> None:
    ((whole, checkpoint),) = shards.run(train, make, "ssgd", True, num_workers=1)
    parts = loaded(checkpoint)
    model = with_unused(seed=1)
    optimizer = make(two_groups(model))
    scheduler = Schedule(optimizer, step_size=3, gamma=0.5)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    scheduler.load_state_dict(parts["scheduler"])
    assert optimizer.state_dict()["state"].keys() == parts["optimizer"]["state"].keys()
    steps(0, model, optimizer, scheduler, range(HALF, WHOLE))
    for name, weight in weights_of(model).items():
        assert relative_error(whole[name], weight) <= 1e-6, name


@pytest.mark.parametrize("make", MAKERS)
def test_a_plain_torch_optimizers_state_loads_into_the_wrapper(shards: Shards, make: Make) -> None:
    model = with_unused()
    optimizer = make(two_groups(model))
    scheduler = Schedule(optimizer, step_size=3, gamma=0.5)
    steps(0, model, optimizer, scheduler, range(HALF))
    file = io.BytesIO()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    steps(0, model, optimizer, scheduler, range(HALF, WHOLE))
    (resumed,) = shards.run(resume, make, "ssgd", file.getvalue(), num_workers=1)
    for name, weight in weights_of(model).items():
        assert relative_error(resumed[name], weight) <= 1e-6, name


def load_wrong(me: Station, job: str) -> list[tuple[str, str]]:
    """Returns the errors of states of other models."""
    problems = []
    for number, make in enumerate((sgd, adam)):
        psworker.init(job=f"{job}-{number}")
        model, optimizer, scheduler = begin(make, "ssgd")
        steps(me.rank, model, optimizer, scheduler, range(1))
        state = optimizer.state_dict()
        name = {sgd: "momentum_buffer", adam: "exp_avg_sq"}[make]
        state["state"][0][name] = torch.zeros(3, 3)
        try:
            optimizer.load_state_dict(state)
        except psworker.ConfigError as problem:
            problems.append((type(problem).__name__, str(problem)))
        psworker.shutdown()
    return problems


def test_the_state_of_another_model_is_refused_by_tensor(shards: Shards) -> None:
    for problems in shards.run(load_wrong, new_job()):
        assert problems == [
            ("ConfigError", f"{name} of '0.bias' has shape [3, 3] in the state, [128] in the model")
            for name in ("momentum_buffer", "exp_avg_sq")
        ]


def load_in_other_defaults(me: Station) -> None:
    """Makes the same steps and loads the same state where torch makes other tensors by default."""
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        model, batches = make_model(), [batch(me.rank, step) for step in range(3)]
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            wrapper = psworker.DistributedOptimizer(
                adam(model.parameters()), model.named_parameters()
            )
            for inputs, classes in batches:
                wrapper.zero_grad()
                backward(model, inputs, classes)
                psworker.clip_grad_norm_(wrapper, 0.1)
                wrapper.step()
                wrapper.load_state_dict(wrapper.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device("cpu")
        found.append(weights_of(model))
        assert wrapper.state_dict()["state"][0]["step"].dtype == torch.float32
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_other_defaults_of_torch_change_no_bit(shards: Shards) -> None:
    """A script may set a GPU as the default device, where `torch.as_tensor` copies an array to."""
    shards.run(load_in_other_defaults, num_workers=1)
