"""Normal scripts that are no recipe train as they do with plain torch, on two workers too."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F  # noqa: N812 - the name that scripts have for it.
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint

import psworker
from tests.integration.cluster import Shards, Station
from tests.integration.models import relative_error, sgd
from tests.integration.recipes import State

STEPS = 6
TOLERANCE = 2e-6  # Relative to the largest element of a tensor.
Batch = tuple[torch.Tensor, torch.Tensor]


class Desk:
    """The place of a script: its batches, and the wrapper, or nothing instead.

    A worker gets its rows of each batch, and a plain script gets all.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def wrap(self, optimizer: torch.optim.Optimizer, named: Iterable[Any], **options: Any) -> Any:
        if not self.size:
            return optimizer
        return psworker.DistributedOptimizer(optimizer, named, **options)

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 20, generator=generator)
        labels = torch.randint(10, (32,), generator=generator)
        rows = slice(self.rank, None, self.size or 1)
        return inputs[rows], labels[rows]

    def train(
        self, model: nn.Module, optimizer: Any, after: Callable[[int], object] = lambda _: None
    ) -> None:
        for step in range(STEPS):
            inputs, labels = self.batch(step)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            after(step)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))


SCRIPTS: dict[str, Callable[[Desk], nn.Module]] = {}


def script(function: Callable[[Desk], nn.Module]) -> Callable[[Desk], nn.Module]:
    SCRIPTS[function.__name__] = function
    return function


@script
def parameters_that_no_step_or_every_second_one_uses(desk: Desk) -> nn.Module:
    model = nn.ModuleDict({"always": mlp(), "some": nn.Linear(20, 10), "never": nn.Linear(3, 3)})
    optimizer = desk.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        optimizer.zero_grad()
        scores = model["always"](inputs) + (model["some"](inputs) if step % 2 else 0)
        torch.autograd.backward(F.cross_entropy(scores, labels))
        optimizer.step()
    return model


@script
def a_frozen_model_with_adapters(desk: Desk) -> nn.Module:
    model = nn.ModuleDict({"base": mlp().requires_grad_(False)})
    down, up = nn.Linear(20, 4, bias=False), nn.Linear(4, 10, bias=False)
    nn.init.zeros_(up.weight)
    model["lora"] = nn.Sequential(down, up)
    adapters = [one for one in model.parameters() if one.requires_grad]
    optimizer = desk.wrap(torch.optim.AdamW(adapters, lr=0.01), model.named_parameters())
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        optimizer.zero_grad()
        torch.autograd.backward(
            F.cross_entropy(model["base"](inputs) + model["lora"](inputs), labels)
        )
        optimizer.step()
    return model


@script
def groups_edited_in_training_through_either_optimizer(desk: Desk) -> nn.Module:
    model = mlp()
    groups: list[Any] = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters()},
    ]
    plain = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    optimizer = desk.wrap(plain, model.named_parameters())

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        plain.param_groups[1]["weight_decay"] = 0.01 * step
        if step == 3:
            for weight in model[0].parameters():
                weight.requires_grad_(False)

    desk.train(model, optimizer, after)
    return model


@script
def parametrized_weights(desk: Desk) -> nn.Module:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2])
    desk.train(model, desk.wrap(sgd(model.parameters()), model.named_parameters()))
    return model


@script
def checkpointed_activations(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters(), overlap=True)
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], inputs, use_reentrant=False)
        torch.autograd.backward(F.cross_entropy(model[2](hidden), labels))
        optimizer.step()
    return model


@script
def a_training_step_that_is_compiled_with_its_optimizer(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters(), overlap=True)

    @torch.compile(backend="eager")  # Needs no compiler; Dynamo follows the step all the same.
    def train(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of torch in itself.
        for step in range(STEPS):
            train(*desk.batch(step))
    return model


@script
def channels_last(desk: Desk) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 8, 2), nn.Tanh(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 10))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    desk.train(model, desk.wrap(sgd(model.parameters()), model.named_parameters()))
    assert model.get_parameter("1.weight").is_contiguous(memory_format=torch.channels_last)
    return model


@script
def a_closure(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters())

    def closure(step: int) -> torch.Tensor:
        inputs, labels = desk.batch(step)
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        return loss

    for step in range(STEPS):
        assert optimizer.step(functools.partial(closure, step)) > 0
    return model


@script
def gradients_of_torch_func(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters())
    named = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        inputs, labels = desk.batch(step)
        return F.cross_entropy(functional_call(model, weights, (inputs,)), labels)

    for step in range(STEPS):
        found = grad(loss)({name: weight.detach() for name, weight in named.items()}, step)
        for name, weight in named.items():
            weight.grad = found[name]
        optimizer.step()
    return model


@script
def averaged_weights(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters())
    average, scheduler = AveragedModel(model), SWALR(optimizer, 0.05, anneal_epochs=3)

    def after(step: int) -> None:
        scheduler.step()
        average.update_parameters(model)

    desk.train(model, optimizer, after)
    return nn.ModuleList([model, average, copy.deepcopy(model)])


@script
def empty_scalar_and_transposed_parameters(desk: Desk) -> nn.Module:
    model = nn.ModuleDict({"net": mlp()})
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("table", nn.Parameter(torch.randn(10, 20).t()))
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        optimizer.zero_grad()
        scores = model["net"](inputs) * model.get_parameter("scale")
        torch.autograd.backward(
            F.cross_entropy(scores + inputs @ model.get_parameter("table"), labels)
        )
        optimizer.step()
    return model


@script
def a_thousand_tiny_parameters(desk: Desk) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(20) for _ in range(1000)])
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        weights = torch.stack(list(model)).tanh()
        torch.autograd.backward((desk.batch(step)[0] @ weights.T).mean())
        optimizer.step()
    return model


@script
def one_optimizer_of_two_models(desk: Desk) -> nn.Module:
    models = nn.ModuleDict({"encoder": mlp(), "head": nn.Linear(10, 10)})
    named = [
        (f"{key}.{name}", weight)
        for key, model in models.items()
        for name, weight in model.named_parameters()
    ]
    optimizer = desk.wrap(sgd([weight for _, weight in named]), named)
    desk.train(nn.Sequential(*models.values()), optimizer)
    return models


@script
def named_groups_and_a_learning_rate_in_a_tensor(desk: Desk) -> nn.Module:
    model = mlp()
    plain = torch.optim.Adam(model.named_parameters(), lr=torch.tensor(0.01))
    desk.train(model, desk.wrap(plain, model.named_parameters()))
    return model


@script
def weights_that_a_layer_changes_in_forward(desk: Desk) -> nn.Module:
    torch.manual_seed(0)
    table = nn.Embedding(50, 10, max_norm=1.0)
    optimizer = desk.wrap(sgd(table.parameters()), table.named_parameters(), optimizer_on="worker")
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = desk.batch(step)[1]
        table(torch.arange(50))  # Every worker's layer norms the same rows.
        torch.autograd.backward(F.cross_entropy(table(whole), whole))
        optimizer.step()
    return table


@script
def double_backward(desk: Desk) -> nn.Module:
    model = mlp()
    optimizer = desk.wrap(sgd(model.parameters()), model.named_parameters(), overlap=True)
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        inputs.requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        (slope,) = torch.autograd.grad(loss * len(inputs), inputs, create_graph=True)
        torch.autograd.backward(loss + slope.square().sum(1).mean())
        optimizer.step()
    return model


@script
def step_hooks_of_the_wrapped_optimizer(desk: Desk) -> nn.Module:
    model = mlp()
    model.register_buffer("made", torch.zeros(1))
    plain = sgd(model.parameters())

    def change(*_: object) -> None:
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad.mul_(0.5).add_(0.01)

    def count(*_: object) -> None:
        model.get_buffer("made").add_(1.0)

    plain.register_step_pre_hook(change)
    plain.register_step_post_hook(count)
    optimizer = desk.wrap(plain, model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        inputs, labels = desk.batch(step)
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(F.cross_entropy(model(inputs), labels)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of torch, about its scaler.
            scaler.step(optimizer)
        scaler.update()
    return model


def weights(model: nn.Module) -> State:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def run_all(me: Station) -> dict[str, State]:
    """Runs every script as a table of its own; returns the weights."""
    warnings.simplefilter("error")
    psworker.init()
    return {name: weights(run(Desk(me.rank, psworker.size()))) for name, run in SCRIPTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_normal_script_trains_as_without_paceline(shards: Shards, num_workers: int) -> None:
    wrong = {}
    for found in shards.run(run_all, num_workers=num_workers):
        for name, run in SCRIPTS.items():
            theirs = weights(run(Desk(0, 0)))
            assert found[name].keys() == theirs.keys()
            errors = [relative_error(found[name][key], value) for key, value in theirs.items()
                      if value.size and value.any()]  # fmt: skip
            if max(errors) > TOLERANCE:
                wrong[name] = max(errors)
    assert not wrong


# ----- scripts that are refused in words


def removes_a_group(me: Station) -> str:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.1), model.named_parameters()
    )
    group = optimizer.param_groups.pop()
    with pytest.raises(psworker.ConfigError) as refusal:
        optimizer.step()
    optimizer.param_groups.append(group)
    Desk(0, 1).train(model, optimizer)  # Nothing has been lost by it.
    return str(refusal.value)


def test_a_group_that_is_removed_is_refused_and_training_continues(shards: Shards) -> None:
    (said,) = shards.run(removes_a_group, num_workers=1)
    assert "has 1 parameter groups, and training began with 2" in said
