"""Training scripts as people write them: the wrapper gives the results of plain torch.

A scenario is a training loop that is given `wrap`. Plain torch runs it with an identity, and two
workers with the same data run it with `DistributedOptimizer`: the mean of two equal gradients is
the gradient, so that the weights must be torch's.
"""

from collections.abc import Callable, Iterable
from typing import Any

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
    sgd,
    weights_of,
)

Named = Iterable[tuple[str, torch.nn.Parameter]]
Wrap = Callable[[torch.optim.Optimizer, Named], torch.optim.Optimizer]
Weights = dict[str, np.ndarray]
Scenario = Callable[[Wrap], Weights]

STEPS = 8


# ----- parameters


class Shapes(torch.nn.Module):
    """A scalar, a transposed matrix, a channels-last convolution, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scalar = torch.nn.Parameter(torch.tensor(0.7))
        self.transposed = torch.nn.Parameter(torch.randn(5, 3).t())
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        convolution = torch.nn.Conv2d(3, 4, 3)
        last = torch.channels_last
        self.convolution = convolution.to(memory_format=last)  # type: ignore[call-overload]
        self.strided = torch.nn.Parameter(torch.randn(20)[::2])
        self.cube = torch.nn.Parameter(torch.randn(2, 1, 3))

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        image = torch.randn(2, 3, 6, 6, generator=generator)
        features = self.convolution(image).square().mean() + self.empty.sum()
        matrix = (self.transposed @ torch.randn(5, 2, generator=generator)).square().mean()
        rest = self.strided.cos().sum() + self.cube.exp().mean()
        return torch.as_tensor(self.scalar * features + matrix + rest)


def any_shape(wrap: Wrap) -> Weights:
    model = Shapes()
    optimizer = wrap(sgd(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(step))
        optimizer.step()
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.transposed.is_contiguous()
    return weights_of(model)


class Tied(torch.nn.Module):
    """A language model's head and embedding share their weights; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(11, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.frozen(self.embedding(words)).tanh())
        return scores


def shared_and_frozen(wrap: Wrap) -> Weights:
    model = Tied()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        words = torch.arange(step, step + 7) % 11
        optimizer.zero_grad()
        backward(model, words, (words + 3) % 11)
        optimizer.step()
    assert model.head.weight is model.embedding.weight
    return weights_of(model)


def frozen_on_the_way(wrap: Wrap) -> Weights:
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        model.get_submodule("0").requires_grad_(step < 3)
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    return weights_of(model)


def branches(wrap: Wrap, make: Callable[[Any], torch.optim.Optimizer], none: bool) -> Weights:
    model = Branches()
    optimizer = wrap(make(model.parameters()), model.named_parameters())
    for step in range(9):
        optimizer.zero_grad(set_to_none=none)
        inputs, classes = batch(0, step)
        loss = torch.nn.functional.cross_entropy(model(inputs, [0, 1, 0, 2, 2][step % 5]), classes)
        torch.autograd.backward(loss)
        optimizer.step()
    return weights_of(model)


def without_gradient_sgd(wrap: Wrap) -> Weights:
    return branches(wrap, sgd, none=True)


def without_gradient_adam(wrap: Wrap) -> Weights:
    return branches(wrap, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), none=True)


def zero_gradients(wrap: Wrap) -> Weights:
    """With set_to_none=False torch steps all that ever had a gradient, by a zero."""
    return branches(wrap, sgd, none=False)


# ----- what stands between backward and step


def accumulated(wrap: Wrap) -> Weights:
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            inputs, classes = batch(part, step)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes) / 3
            torch.autograd.backward(loss)
        optimizer.step()
    return weights_of(model)


def clipped(wrap: Wrap) -> Weights:
    model = make_model()
    optimizer = wrap(sgd(model.parameters(), lr=0.5), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert norm > 0.2
        optimizer.step()
    return weights_of(model)


def scaled(wrap: Wrap) -> Weights:
    """torch.amp's loss scaling; at step 2 the gradients overflow, and that step is left out."""
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, classes = batch(0, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        if step == 2:
            loss = loss * float("inf")
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return weights_of(model)


def closures(wrap: Wrap) -> Weights:
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            return backward(model, *batch(0, step))

        losses.append(optimizer.step(closure))
    return {**weights_of(model), "losses": np.array(losses)}


class Large(torch.nn.Module):
    """Its first layer's gradient is large enough to lie in the vector that is pushed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(20, 4096)
        self.last = torch.nn.Linear(4096, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.first(inputs).tanh())
        return scores


def gradients_after_steps(wrap: Wrap) -> Weights:
    """They are kept, added to over steps, and set to zero by hand."""
    model = Large()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    kept: list[torch.Tensor | None] = []
    for step in range(12):
        if step % 4 < 2:
            optimizer.zero_grad(set_to_none=step % 4 == 0)
        elif step % 4 == 2:
            model.zero_grad(set_to_none=False)
        backward(model, *batch(0, step))
        optimizer.step()
        kept.append(model.first.weight.grad)
    sums = {f"grad {step}": _host(grad) for step, grad in enumerate(kept)}
    return {**weights_of(model), **sums}


def _host(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy().copy()


# ----- what stands around them


def one_cycle(wrap: Wrap) -> Weights:
    """This scheduler moves the momentum, too."""
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
        scheduler.step()
    return weights_of(model)


def by_hand(wrap: Wrap) -> Weights:
    model = make_model()
    optimizer = wrap(sgd(model.parameters()), model.named_parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
        plateau.step(1.0 + step)
    return weights_of(model)


def two_optimizers(wrap: Wrap) -> Weights:
    """As in a GAN: two models, two optimizers, one backward through both."""
    model = make_model()
    critic = torch.nn.Linear(10, 1)
    torch.nn.init.normal_(critic.weight, generator=torch.Generator().manual_seed(4))
    torch.nn.init.zeros_(critic.bias)
    first = wrap(sgd(model.parameters()), model.named_parameters())
    second = wrap(torch.optim.Adam(critic.parameters(), lr=0.01), critic.named_parameters())
    for step in range(STEPS):
        inputs, _ = batch(0, step)
        second.zero_grad()
        torch.autograd.backward(-critic(model(inputs).detach()).mean())
        second.step()
        first.zero_grad()
        torch.autograd.backward(critic(model(inputs)).mean())
        first.step()
    named = weights_of(critic)
    return {**weights_of(model), **{f"critic.{name}": named[name] for name in named}}


SCENARIOS: list[Scenario] = [
    any_shape,
    shared_and_frozen,
    frozen_on_the_way,
    without_gradient_sgd,
    without_gradient_adam,
    zero_gradients,
    accumulated,
    clipped,
    scaled,
    closures,
    gradients_after_steps,
    one_cycle,
    by_hand,
    two_optimizers,
]


def run_wrapped(me: Station, scenario: Scenario) -> Weights:
    return scenario(lambda optimizer, named: psworker.DistributedOptimizer(optimizer, named))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_wrapper_behaves_as_torch_does(shards: Shards, scenario: Scenario) -> None:
    """To 2e-6: a few units of float32's last place in each of some ten steps."""
    plain = scenario(lambda optimizer, named: optimizer)
    for ours in shards.run(run_wrapped, scenario):
        assert ours.keys() == plain.keys()
        for name, weight in plain.items():
            if weight.size:
                assert relative_error(ours[name], weight) <= 2e-6, name


def zeroed(me: Station, by_hand: bool) -> Weights:
    model = Large()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode="ssd(steps=2, warmup=1)"
    )
    for step in range(10):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        for parameter in model.parameters() if by_hand else ():
            assert parameter.grad is not None
            parameter.grad.zero_()
    return weights_of(model)


@pytest.mark.slow
def test_after_a_step_gradients_may_be_written_where_no_pull_was_waited_for(shards: Shards) -> None:
    left, written = (shards.run(zeroed, by_hand) for by_hand in (False, True))
    for ours, others in zip(left, written, strict=True):
        assert all(np.array_equal(ours[name], others[name]) for name in ours)


# ----- a notebook's cell that is run again


def cell(
    model: torch.nn.Module, first: int, mode: str, optimizers: list[Any], stops_at: int = -1
) -> None:
    """Trains four steps with a wrapper of its own, or stops in the middle of one."""
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, overlap=True
    )
    optimizers.append(optimizer)
    for step in range(first, first + 4):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        if step == stops_at:
            raise KeyboardInterrupt
        optimizer.step()


def run_again(me: Station, mode: str) -> tuple[Weights, str]:
    model = make_model()
    optimizers: list[Any] = []
    cell(model, 0, mode, optimizers)
    with pytest.raises(psworker.ConfigError):
        cell(model, 4, "ssgd(bakcup=1)", optimizers)
    with pytest.raises(KeyboardInterrupt):
        cell(model, 4, mode, optimizers, stops_at=6)
    cell(model, 8, mode, optimizers)
    with pytest.raises(psworker.ConfigError) as caught:
        optimizers[0].step()
    psworker.shutdown()
    return weights_of(model), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=2)"])
def test_a_cell_that_is_run_again_trains_with_the_new_wrapper_alone(
    shards: Shards, mode: str
) -> None:
    first, second = shards.run(run_again, mode)
    message = "step() called after another DistributedOptimizer was made with its parameters"
    assert message in first[1]
    assert all(np.array_equal(first[0][name], second[0][name]) for name in first[0])
    if mode == "ssgd":
        model = make_model()
        for steps in ((0, 1, 2, 3), (4, 5), (8, 9, 10, 11)):
            optimizer = sgd(model.parameters())
            for step in steps:
                optimizer.zero_grad()
                backward(model, *batch(0, step))
                optimizer.step()
        for name, weight in weights_of(model).items():
            assert relative_error(first[0][name], weight) <= 2e-6, name
