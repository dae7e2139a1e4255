"""A model with row tables of every kind, its counterpart in torch, and the oracle in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import psworker

NUM_ROWS, DIM, LENGTH, BATCH = 40, 6, 4, 8
TABLES = ("users", "words", "tags", "peaks")
PADDING = 0  # Of `tags`.
Table = npt.NDArray[np.float64]
Hyper = dict[str, Any]


class Batch(NamedTuple):
    """The samples of one worker at one step."""

    users: torch.Tensor  # (BATCH,)
    words: torch.Tensor  # (BATCH * LENGTH,)
    factors: torch.Tensor  # (BATCH * LENGTH,)
    offsets: torch.Tensor  # (BATCH,)
    tags: torch.Tensor  # (BATCH, LENGTH)
    labels: torch.Tensor  # (BATCH,)


def batch(rank: int, step: int) -> Batch:
    """Returns samples with ids that repeat, within a worker and among workers."""
    generator = torch.Generator().manual_seed(1000 * rank + step)

    def ids(*shape: int) -> torch.Tensor:
        drawn = torch.rand(*shape, generator=generator)
        return (NUM_ROWS * drawn**2).long()  # Small ones are frequent.

    bounds = torch.randint(0, BATCH * LENGTH + 1, (BATCH - 1,), generator=generator)
    tags = ids(BATCH, LENGTH)
    if step % 5 == rank % 5:
        tags.fill_(PADDING)  # A batch of padding only has a gradient without rows.
    return Batch(
        users=ids(BATCH),
        words=ids(BATCH * LENGTH),
        factors=torch.randn(BATCH * LENGTH, generator=generator),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), bounds.sort().values]),
        tags=tags,
        labels=torch.randn(BATCH, generator=generator),
    )


def joined(step: int, num_workers: int) -> Batch:
    """Returns the samples of all workers at a step as one batch."""
    parts = [batch(rank, step) for rank in range(num_workers)]
    shifted = [part.offsets + i * BATCH * LENGTH for i, part in enumerate(parts)]
    whole = Batch(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
    return whole._replace(offsets=torch.cat(shifted))


class Net(torch.nn.Module):
    """Tables of every kind and a dense layer; the users are looked up twice."""

    def __init__(self, tables: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tables = torch.nn.ModuleDict(tables)
        self.head = torch.nn.Linear(4 * DIM, 1)

    def forward(self, given: Batch) -> torch.Tensor:
        users, words, tags, peaks = (self.tables[name] for name in TABLES)
        factors = given.factors.to(self.head.weight.dtype)
        parts = [
            users(given.users) + 0.5 * users(given.tags[:, 0]),
            words(given.words, given.offsets, per_sample_weights=factors),
            tags(given.tags),
            peaks(given.tags + 1),
        ]
        scores: torch.Tensor = self.head(torch.cat(parts, dim=1)).squeeze(1)
        return (scores - given.labels).square().mean()


def make_tables(**options: Any) -> dict[str, torch.nn.Module]:
    """Returns the tables with their rows on the shards."""
    bag = psworker.EmbeddingBag
    return {
        "users": psworker.Embedding(NUM_ROWS, DIM, name="users", **options),
        "words": bag(None, DIM, mode="sum", name="words", init="uniform(0.5)", **options),
        "tags": bag(NUM_ROWS, DIM, mode="mean", padding_idx=PADDING, name="tags", **options),
        "peaks": bag(None, DIM, mode="max", name="peaks", **options),
    }


def torch_tables(sparse: bool) -> dict[str, torch.nn.Module]:
    """Returns modules of torch with the same first rows."""
    first = first_rows(make_tables())
    made: dict[str, torch.nn.Module] = {}
    embedding: Any = torch.nn.Embedding
    for name, values in first.items():
        options: dict[str, Any] = {"sparse": sparse, "freeze": False}
        if name == "users":
            made[name] = embedding.from_pretrained(values, **options)
            continue
        mode = {"words": "sum", "tags": "mean", "peaks": "max"}[name]
        if name == "tags":
            options["padding_idx"] = PADDING
        options["sparse"] = sparse and mode != "max"  # torch has no sparse gradient of a maximum.
        made[name] = torch.nn.EmbeddingBag.from_pretrained(values, mode=mode, **options)
    return made


def first_rows(tables: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns all rows of tables, `(NUM_ROWS + 1, DIM)` each: ids of `peaks` begin with 1."""
    found = {}
    with torch.no_grad():
        for name in TABLES:
            ids = torch.arange(NUM_ROWS + (name in ("words", "peaks")))
            table = tables[name]
            rows = table(ids) if isinstance(table, psworker.Embedding) else table(ids[:, None])
            found[name] = rows.clone()
    found["tags"][PADDING] = 0.0
    return found


def touched(given: Batch) -> dict[str, set[int]]:
    """Returns the ids of each table whose rows a batch names."""
    tags = set(given.tags.flatten().tolist())
    return {
        "users": {*given.users.tolist(), *given.tags[:, 0].tolist()},
        "words": set(given.words.tolist()),
        "tags": tags - {PADDING},
        "peaks": {tag + 1 for tag in tags},
    }


class Oracle:
    """The equations of the optimizers of rows, in float64, of one table."""

    def __init__(self, name: str, hyper: Hyper, weights: Table) -> None:
        self.name, self.hyper, self.t = name, hyper, 0
        start = hyper.get("initial_accumulator_value", 0.0)
        self.first, self.second = np.full_like(weights, start), np.zeros_like(weights)

    def step(self, weights: Table, grad: Table, ids: set[int]) -> None:
        """Makes one step in which the table had a gradient, perhaps without a row."""
        self.t += 1
        for id_ in ids:
            getattr(self, f"_{self.name}")(weights[id_], grad[id_], id_)

    def _sgd(self, w: Table, g: Table, _: int) -> None:
        w -= self.hyper["lr"] * g

    def _adagrad(self, w: Table, g: Table, row: int) -> None:
        lr = self.hyper["lr"] / (1 + (self.t - 1) * self.hyper.get("lr_decay", 0.0))
        self.first[row] += g**2
        w -= lr * g / (np.sqrt(self.first[row]) + self.hyper.get("eps", 1e-10))

    def _rowwise(self, w: Table, g: Table, row: int) -> None:
        self.first[row] += np.mean(g**2)
        w -= self.hyper["lr"] * g / (np.sqrt(self.first[row]) + 1e-8)

    def _sparse_adam(self, w: Table, g: Table, row: int) -> None:
        b1, b2 = self.hyper.get("betas", (0.9, 0.999))
        m, v = self.first[row], self.second[row]
        m += (1 - b1) * (g - m)
        v += (1 - b2) * (g**2 - v)
        rate = self.hyper["lr"] * math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        w -= rate * m / (np.sqrt(v) + self.hyper.get("eps", 1e-8))

    def _ftrl(self, w: Table, g: Table, row: int) -> None:
        lr, l1, l2 = (self.hyper[key] for key in ("lr", "l1", "l2"))
        z, n = self.first[row], self.second[row]
        after = n + g**2
        z += g - (np.sqrt(after) - np.sqrt(n)) / lr * w
        n[:] = after
        shrunk = -(z - np.sign(z) * l1) / ((1.0 + np.sqrt(after)) / lr + l2)
        w[:] = np.where(np.abs(z) <= l1, 0.0, shrunk)
