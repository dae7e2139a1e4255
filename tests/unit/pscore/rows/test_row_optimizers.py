"""Optimizers of rows against their equations in float64, and against torch's sparse ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pscore.rows.init import initial_rows
from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.rows.spec import RowTable
from tests.row_driver import RowShards, row_spec

ROWS, DIM, STEPS = 30, 5, 12
INIT = "uniform(0.5)"
Hyper = dict[str, float]
Step = Callable[[np.ndarray, dict[str, np.ndarray], np.ndarray, int, Hyper], Any]


def sgd(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int, h: Hyper) -> Any:
    return w - h["lr"] * (g + h["weight_decay"] * w)


def adagrad(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int, h: Hyper) -> Any:
    s["sum"] += g**2
    rate = h["lr"] / (1 + (t - 1) * h["lr_decay"])
    return w - rate * g / (np.sqrt(s["sum"]) + h["eps"])


def rowwise(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int, h: Hyper) -> Any:
    s["sum"] += (g**2).mean()
    return w - h["lr"] * g / (np.sqrt(s["sum"]) + h["eps"])


def adam(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int, h: Hyper) -> Any:
    s["m"] += (1 - h["beta1"]) * (g - s["m"])
    s["v"] += (1 - h["beta2"]) * (g**2 - s["v"])
    rate = h["lr"] * math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    return w - rate * s["m"] / (np.sqrt(s["v"]) + h["eps"])


def ftrl(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int, h: Hyper) -> Any:
    after = s["n"] + g**2
    s["z"] += g - (np.sqrt(after) - np.sqrt(s["n"])) / h["lr"] * w
    s["n"] = after
    z = s["z"]
    found = -(z - np.sign(z) * h["l1"]) / ((h["beta"] + np.sqrt(after)) / h["lr"] + h["l2"])
    return np.where(np.abs(z) <= h["l1"], 0.0, found)


CASES: dict[str, tuple[Step, dict[str, float]]] = {
    "sgd": (sgd, {"lr": 0.1, "weight_decay": 0.01, "maximize": 0.0}),
    "adagrad": (
        adagrad,
        {"lr": 0.1, "lr_decay": 0.02, "eps": 1e-10, "initial_accumulator_value": 0.3,
         "maximize": 0.0},
    ),
    "rowwise_adagrad": (
        rowwise, {"lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.1, "maximize": 0.0}
    ),
    "sparse_adam": (
        adam, {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "maximize": 0.0}
    ),
    "ftrl": (ftrl, {"lr": 0.3, "beta": 1.0, "l1": 0.4, "l2": 0.1, "maximize": 0.0}),
}  # fmt: skip


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ids and gradients of each step; one step has no rows."""
    drawn = np.random.default_rng(5)
    found = []
    for step in range(STEPS):
        count = 0 if step == 4 else 12
        ids = drawn.choice(ROWS, count, replace=False)
        found.append((ids, drawn.standard_normal((count, DIM)).astype(np.float32)))
    return found


def trained(name: str, hyper: dict[str, float], init: str = INIT) -> np.ndarray:
    """Returns all rows after the steps, `(ROWS, DIM)`."""
    shards = RowShards(row_spec(("a", 0, DIM, RowTable(seed=3, init=init)), optimizer=name))
    shards.begin()
    row = np.array([[hyper[key] for key in ROW_OPTIMIZERS[name].hyper_names]])
    for step, (ids, grads) in enumerate(batches()):
        shards.push(0, step, [ids], [grads], row)
    (store,) = shards.stores()
    store.check_invariants()
    return shards.pull([np.arange(ROWS)])[0]


def first(init: str = INIT) -> np.ndarray:
    return initial_rows(init, 3, np.arange(ROWS, dtype=np.uint64), DIM)


@pytest.mark.parametrize("maximize", [0.0, 1.0])
@pytest.mark.parametrize("name", sorted(CASES))
def test_each_step_is_its_equation(name: str, maximize: float) -> None:
    step, hyper = CASES[name]
    hyper = hyper | {"maximize": maximize}
    start = hyper.get("initial_accumulator_value", 0.0)
    state = {
        id_: {key: np.full(1 if name == "rowwise_adagrad" else DIM, start)
              for key in ("sum", "m", "v", "z", "n")}
        for id_ in range(ROWS)
    }  # fmt: skip
    rows = first().astype(np.float64)
    for t, (ids, grads) in enumerate(batches(), 1):
        for id_, grad in zip(ids, grads, strict=True):
            signed = grad.astype(np.float64) * (-1.0 if maximize else 1.0)
            rows[id_] = step(rows[id_], state[id_], signed, t, hyper)
    np.testing.assert_allclose(trained(name, hyper), rows, rtol=2e-5, atol=2e-6)


TORCH: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.02, initial_accumulator_value=0.3
    ),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.9, 0.99)),
}


def by_torch(make: Callable[[list[torch.nn.Parameter]], Any]) -> np.ndarray:
    """Returns all rows after the steps of an optimizer of torch."""
    weight = torch.nn.Parameter(torch.from_numpy(first().copy()))
    optimizer = make([weight])
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        for ids, grads in batches():
            where, values = torch.from_numpy(ids)[None], torch.from_numpy(grads)
            weight.grad = torch.sparse_coo_tensor(where, values, (ROWS, DIM))
            optimizer.step()
    found: np.ndarray = weight.detach().numpy()
    return found


@pytest.mark.parametrize("name", sorted(TORCH))
def test_each_step_is_torchs_for_sparse_gradients(name: str) -> None:
    """Also of t: the step without rows counts, as an empty sparse gradient does in torch."""
    weight = by_torch(TORCH[name])
    hyper = CASES[name][1] | ({"weight_decay": 0.0} if name == "sgd" else {})
    found = trained(name, hyper)
    np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)


def test_sparse_adams_eps_stands_outside_the_bias_correction() -> None:
    hyper = CASES["sparse_adam"][1] | {"eps": 0.1}
    weight = by_torch(lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.9, 0.99), eps=0.1))
    found = trained("sparse_adam", hyper)
    np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)


def test_a_bound_on_the_norm_holds_after_each_step() -> None:
    spec = row_spec(("a", 0, DIM, RowTable(init="normal(1)", max_norm=1.0)))
    shards = RowShards(spec)
    shards.begin()
    ids = np.arange(ROWS)
    before = shards.pull([ids])[0]
    assert np.linalg.norm(before, axis=1).max() <= 1.0 + 1e-6
    shards.push(0, 0, [ids], [np.full((ROWS, DIM), -3.0)], np.array([[0.5, 0.0, 0.0]]))
    wanted = before.astype(np.float64) + 1.5
    norms = np.linalg.norm(wanted, axis=1, keepdims=True)
    wanted = np.where(norms > 1.0, wanted / (norms + 1e-7), wanted)
    np.testing.assert_allclose(shards.pull([ids])[0], wanted, rtol=1e-6)
