"""Optimizers of row tables: their hyper-parameters, and refusals with a remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.rules import SSGD
from psworker.rows.hyper import counterpart, hyper_of
from psworker.rows.join import find_rows
from psworker.rows.modules import Embedding
from psworker.rows.optimizers import FTRL, RowwiseAdagrad
from psworker.rows.row_tables import ShardRows

Make = Callable[[list[Any]], torch.optim.Optimizer]


def rows_of(make: Make) -> tuple[str, np.ndarray]:
    optimizer = make([Embedding(None, 4).weight])
    name = counterpart(optimizer)
    return name, hyper_of(name, optimizer.param_groups)


@pytest.mark.parametrize(
    ("make", "name", "row"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5), "sgd", [0.5, 0, 0]),
        (
            lambda p: torch.optim.SGD([{"params": p, "weight_decay": 0.1, "decay": "touched"}]),
            "sgd",
            [1e-3, 0.1, 0],
        ),
        (
            lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2, initial_accumulator_value=3.0),
            "adagrad",
            [0.1, 0.2, 1e-10, 3.0, 0],
        ),
        (
            lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.9), maximize=True),
            "sparse_adam",
            [0.1, 0.8, 0.9, 1e-8, 1],
        ),
        (lambda p: RowwiseAdagrad(p, lr=0.1), "rowwise_adagrad", [0.1, 1e-8, 0, 0]),
        (lambda p: FTRL(p, lr=0.1, l1=0.5, l2=0.25), "ftrl", [0.1, 1.0, 0.5, 0.25, 0]),
    ],
)
def test_hyper_parameters_are_those_of_the_torch_object(
    make: Make, name: str, row: list[float]
) -> None:
    found, rows = rows_of(make)
    assert found == name
    assert rows.tolist() == [row]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adam, "Adam moves every row at every step; use torch.optim.SparseAdam"),
        (torch.optim.AdamW, "use torch.optim.SparseAdam"),
        (torch.optim.RMSprop, "the optimizer of rows is RMSprop: must be torch.optim.SGD"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "momentum moves rows"),
        (lambda p: torch.optim.SGD(p, weight_decay=0.1), "decay='touched'"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "weight_decay=0"),
        (
            lambda p: torch.optim.Adagrad([{"params": p, "weight_decay": 0.1, "decay": "touched"}]),
            "with SGD",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_equal_is_refused_with_the_remedy(
    make: Make, message: str
) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=message):
        rows_of(make)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr of group 0 of the optimizer of rows is nan"):
        rows_of(lambda p: torch.optim.SGD(p, lr=torch.tensor(float("nan"))))
    with pytest.raises(ConfigError, match="rows is a str, must be"):
        counterpart("adagrad")


def test_a_rate_by_which_a_step_divides_is_above_zero() -> None:
    optimizer = FTRL([Embedding(None, 4).weight], lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # A warm-up from 0.
    with pytest.raises(ConfigError, match="lr of the optimizer of rows has to be above 0: ftrl"):
        hyper_of("ftrl", optimizer.param_groups)
    rows_of(lambda p: RowwiseAdagrad(p, lr=0.0))  # No step divides by it.


@pytest.mark.parametrize(
    "make", [lambda p: RowwiseAdagrad(p, lr=-1.0), lambda p: FTRL(p, l1=float("nan"))]
)
def test_a_negative_number_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"must be in 0\.0\.\.inf"):
        rows_of(make)


def test_a_scheduler_changes_the_rate_of_an_optimizer_that_only_the_shards_run() -> None:
    optimizer = RowwiseAdagrad([Embedding(None, 4).weight], lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # It sees no step here.
        scheduler.step()
    assert hyper_of("rowwise_adagrad", optimizer.param_groups)[0, 0] == 0.4
    with pytest.raises(ConfigError, match="the shards make the steps of RowwiseAdagrad"):
        optimizer.step()


def test_a_table_in_two_optimizers_is_refused() -> None:
    """Each would have trained rows of its own, of which lookups see those of the last."""
    table = Embedding(None, 2, name="users")
    optimizers = [torch.optim.SGD([table.weight], lr=0.1), torch.optim.Adagrad([table.weight])]
    nowhere: Any = None
    with pytest.raises(ConfigError, match="row table 'users' is in two optimizers of rows"):
        find_rows(optimizers, [("users.weight", table.weight)], SSGD(), nowhere, "model", nowhere)
    table.source = ShardRows(nowhere, 0)  # Of a DistributedOptimizer that was made before.
    named = [("users.weight", table.weight)]
    with pytest.raises(ConfigError, match="row table 'users' has rows on the shards, of another"):
        find_rows(optimizers[:1], named, SSGD(), nowhere, "model", nowhere)
