"""Where the optimizer runs: chosen by itself, or refused with the modes that work."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.partition import make_layout
from pscore.rules import parse_mode
from psworker.model.flat import FlatModel, describe
from psworker.training.local_steps.worker_steps import MeanGradients, choose_optimizer


class Own(torch.optim.SGD):
    """An optimizer that the shards do not know."""


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


SGD = torch.optim.SGD(weights(), lr=0.1)
OWN = Own(weights(), lr=0.1)
LBFGS = torch.optim.LBFGS(weights())


def chosen(optimizer: Any, mode: str = "ssgd", on: str = "auto", *, is_raw: bool = True) -> str:
    return choose_optimizer(optimizer, parse_mode(mode), on, is_raw=is_raw).name


@pytest.mark.parametrize(
    ("optimizer", "mode", "on", "name"),
    [
        (SGD, "ssgd", "auto", "sgd"),
        (SGD, "ssgd", "worker", "mean"),
        (OWN, "ssgd", "auto", "mean"),
        (OWN, "local", "worker", "sgd"),
        (OWN, "slowmo", "auto", "slowmo"),
        (SGD, "ssd(steps=2)", "shards", "sgd"),
    ],
)
def test_the_shards_run_it_if_they_know_it(optimizer: Any, mode: str, on: str, name: str) -> None:
    assert chosen(optimizer, mode, on) == name


def test_one_line_says_that_the_workers_step(caplog: pytest.LogCaptureFixture) -> None:
    chosen(OWN)
    chosen(SGD)
    (line,) = caplog.messages
    assert line.startswith("optimizer_on='worker', the shards return the mean gradient: optimizer")


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (SGD, {"on": "gpu"}, "optimizer_on is 'gpu', must be one of auto, shards, worker"),
        (OWN, {"on": "shards"}, "Own, must be one of .*SGD; the modes adpsgd, .*slowmo, and"),
        (OWN, {"mode": "asgd"}, "Own, must be one of .*ssgd with optimizer_on='worker', run any"),
        (
            SGD,
            {"mode": "od", "on": "worker"},
            r"in mode od.* no worker gets .*; use ssgd \(without",
        ),
        (SGD, {"mode": "ssgd(backup=1)", "on": "worker"}, "no worker gets the mean of each step"),
        (SGD, {"mode": "local", "on": "shards"}, "in mode local.* the workers run the optimizer"),
        (SGD, {"on": "worker", "is_raw": False}, "pull_compression has estimates of weights"),
    ],
)
def test_wrong_combinations_are_refused(optimizer: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(optimizer, **options)


@pytest.mark.parametrize("mode", ["ssgd", "local"])
def test_an_optimizer_that_needs_more_than_dense_gradients_is_refused_by_name(mode: str) -> None:
    with pytest.raises(
        UnsupportedOptimizerError, match=r"LBFGS computes several gradients in each"
    ):
        chosen(LBFGS, mode)
    with pytest.raises(UnsupportedOptimizerError, match="SparseAdam takes sparse gradients"):
        chosen(torch.optim.SparseAdam(weights()), mode)


def flat_model(*dtypes: torch.dtype) -> FlatModel:
    model = [torch.nn.Parameter(torch.full((2, 3), 1.0, dtype=dtype)) for dtype in dtypes]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(model)]
    return FlatModel(model, make_layout(describe(named, [0] * len(named)), 2))


def test_means_become_gradients_in_the_parameters_types() -> None:
    flat = flat_model(torch.float32, torch.bfloat16, torch.float32)
    means = MeanGradients(flat, cast(Any, SimpleNamespace(min_workers=0)))
    for index in range(3):
        flat.state_view(means.values, index).fill_(0.5 + index)
    flat.state_view(means.values, 2).fill_(float("nan"))  # No worker has a gradient.
    first, second, third = flat.parameters
    first.grad, third.grad = (torch.full_like(first, 9.0) for _ in range(2))
    kept = first.grad
    means.show()
    assert first.grad is kept
    assert first.grad.flatten().tolist() == [0.5] * 6
    assert second.grad is not None
    assert second.grad.dtype is torch.bfloat16
    assert second.grad.flatten().tolist() == [1.5] * 6
    assert third.grad is None
    means.values.fill_(2.0)
    means.take_weights()
    assert first.flatten().tolist() == [2.0] * 6  # A view of the flat weights.


def test_an_elastic_job_is_refused() -> None:
    session = cast(Any, SimpleNamespace(min_workers=1))
    with pytest.raises(ConfigError, match=r"workers of this job come and go, and one that joins"):
        MeanGradients(flat_model(torch.float32), session)
