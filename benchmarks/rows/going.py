"""Rows that come late and go while shards and workers are killed, and a model of them.

All workers make each step together, and draw the same ids at a step in any life. The rows of one
table begin with their second push, and go when no step has named them for six, or when their bucket
has too many. So the rows in the end follow from the pushes that were counted, by the rules of
docs/rows.md: `account` makes all steps again in float64, with a dictionary's semantics and none of
the shards' code. A push that the shards have refused, because its step had closed, is not lost: the
worker is told. Which pushes were counted says a second table, whose rows stay: each push names a
row of its own on each shard.
"""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

NUM_WORKERS, NUM_SHARDS, DIM = 2, 2, 4
NUM_IDS, TOUCHED = 1 << 16, 6_000
MIN_COUNT, TTL, LRU = 2, 6, 1 << 15
BUCKETS, SHARE = 1 << 12, LRU >> 12
OPEN = 2  # Steps of a killed worker that may be counted or not.
MARKS = 64  # Ids of one push, of which one on each shard is named.
STEP = struct.Struct("<q")
SEEDS = "seeds.npy"


def drawn(rank: int, step: int) -> np.ndarray:
    """Returns the ids of a step, `(TOUCHED,) int64`, all different, below `NUM_IDS`."""
    start, half = np.random.default_rng([rank, step]).integers(NUM_IDS // 2, size=2)
    return (start + np.arange(TOUCHED) * (2 * half + 1)) % NUM_IDS  # An odd stride of 2^16.


def number_of(ids: np.ndarray) -> np.ndarray:
    """Returns the gradient of each row, at most 4,093: its multiples are exact in float32."""
    return 1 + ids * 7919 % 4093


def marks_of(rank: int, step: int, seed: int) -> np.ndarray:
    """Returns the ids that a push marks, `(NUM_SHARDS,) int64`: one of each shard."""
    ids = np.arange(MARKS) + MARKS * (NUM_WORKERS * step + rank)
    owners = bucket_of(ids, seed) * NUM_SHARDS // BUCKETS
    return np.array([ids[owners == shard][0] for shard in range(NUM_SHARDS)])


def bucket_of(ids: np.ndarray, seed: int) -> np.ndarray:
    """Returns the bucket of each id, `(n,) int64`: the top bits of its hash."""
    from pscore.rows.partition import buckets_of

    return buckets_of(ids.astype(np.uint64), seed)


def wrap(tables: dict[str, Any], lr: float, mode: str) -> tuple[Any, Any]:
    """Returns a model of row tables and one dense layer, and its optimizer."""
    import torch

    import psworker

    model = torch.nn.ModuleDict({**tables, "top": torch.nn.Linear(DIM, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight for table in tables.values()], lr=lr),
        mode=mode,
    )
    return model, optimizer


def push(model: Any, optimizer: Any, ids: np.ndarray, more: Any = 0.0) -> None:
    """Makes a step in which the gradient of each row is its number, and adds a loss to it."""
    import torch

    rows = model["rows"](torch.from_numpy(ids))
    wanted = torch.from_numpy(number_of(ids)).float()[:, None]
    torch.autograd.backward((rows * wanted).sum() + more + 0.0 * model["top"](rows).sum())
    optimizer.step()
    optimizer.zero_grad()


def missed_of(table: Any) -> Any:
    """Returns the steps of this worker whose rows did not count, as it knows them."""
    return table.source.tables.exchange.missed


def end(line: Connection, folder: Path, model: Any, ids: dict[str, np.ndarray]) -> None:
    """Waits until all pushes are counted; then writes the rows of each table if it is asked."""
    import torch

    with torch.no_grad():
        model["rows"](torch.arange(MARKS))  # Some on each shard, which waits for its pushes.
        line.send("counted")
        if line.recv() == "look":
            for name, wanted in ids.items():
                np.save(folder / f"{name}.npy", model[name](torch.from_numpy(wanted)).numpy())
    line.send("done")


def judge(rows: np.ndarray, least: np.ndarray, most: np.ndarray) -> dict[str, int]:
    """Returns how many rows are wrong, by kind; each should be its number that many times."""
    numbers = number_of(np.arange(len(rows)))
    found = rows[:, 0] / numbers
    is_shifted = (rows % numbers[:, None] != 0).any(1)
    return {
        "lost": int((~is_shifted & (found < least)).sum()),
        "double": int((~is_shifted & (found > most)).sum()),
        "torn": int((rows != rows[:, :1]).any(1).sum()),
        "shifted": int(is_shifted.sum()),
    }


def work(line: Connection, rank: int, life: int, environment: dict[str, str], folder: Path) -> None:
    """Trains as one worker to the step that it is told; then it looks up all rows if it is asked.

    Args:
        line: To the measuring process.
        rank: Rank.
        life: How often it was killed before.
        environment: Variables of the job.
        folder: Gets the steps that were begun, and the rows.
    """
    os.environ.update(environment)
    import torch

    import psworker

    table = psworker.Embedding(
        None, DIM, name="rows", init="zeros", min_count=MIN_COUNT, ttl=TTL, lru=LRU
    )
    marks = psworker.Embedding(None, 1, name="marks", init="zeros")
    model, optimizer = wrap({"rows": table, "marks": marks}, float(NUM_WORKERS), "ssgd")
    np.save(folder / f"{rank}-{SEEDS}", np.array([table.seed_number, marks.seed_number], np.uint64))
    steps = (folder / f"{rank}-{life}.steps").open("ab", buffering=0)
    late = (folder / f"{rank}.late").open("ab", buffering=0)
    told: set[int] = set()
    last: int | None = None
    while last is None or optimizer.steps < last:
        step = optimizer.steps
        steps.write(STEP.pack(step))
        named = marks(torch.from_numpy(marks_of(rank, step, marks.seed_number)))
        push(model, optimizer, drawn(rank, step), named.sum())
        for step in set(missed_of(table).recent) - told:
            late.write(STEP.pack(step))
            told.add(step)
        if line.poll():
            last = line.recv()
    pushes = [(of, step) for step in range(last) for of in range(NUM_WORKERS)]
    marked = np.array([marks_of(*of, marks.seed_number) for of in pushes])
    end(line, folder, model, {"rows": np.arange(NUM_IDS), "marks": marked})


class Model:
    """The rows of one table by the rules: arrays by id.

    Attributes:
        values: `(NUM_IDS,) float64`, in units of the row's number; of a row that is there.
        removed: Rows that have gone.
    """

    def __init__(self, seed: int) -> None:
        """Starts without rows."""
        self._bucket = bucket_of(np.arange(NUM_IDS), seed)
        self._is_there = np.zeros(NUM_IDS, np.bool_)
        self._pushes = np.zeros(NUM_IDS, np.int64)  # Of ids that wait.
        self._changed, self._named = np.zeros((2, NUM_IDS), np.int64)  # Version of row, and of id.
        self.values, self.removed = np.zeros(NUM_IDS), 0

    @property
    def owners(self) -> np.ndarray:
        """The shard of each id, `(NUM_IDS,) int64`."""
        return self._bucket * NUM_SHARDS // BUCKETS

    def step(self, version: int, times: np.ndarray, added: np.ndarray) -> None:
        """Makes a step.

        Args:
            version: That after it.
            times: `(NUM_IDS,) int64`, pushes that name each id.
            added: `(NUM_IDS,) float64`, the sum of their gradients, in units of the id's number.
        """
        is_named = times > 0
        counts = np.where(is_named & ~self._is_there, self._pushes + times, 0)
        late = (counts > 0) & (counts < MIN_COUNT)
        self._pushes[counts >= MIN_COUNT] = 0
        waits = (self._pushes > 0) & ~is_named
        self._pushes[self._oldest(waits, self._named, late, version)] = 0
        known = late & (self._pushes > 0)
        held = np.bincount(self._bucket[(self._pushes > 0) | known], minlength=BUCKETS)
        fresh = np.flatnonzero(late & ~known)
        fresh = fresh[np.argsort(self._bucket[fresh], kind="stable")]
        bucket = self._bucket[fresh]
        rank = np.arange(len(fresh)) - np.searchsorted(bucket, bucket)
        kept = np.concatenate([np.flatnonzero(known), fresh[rank < SHARE - held[bucket]]])
        self._pushes[kept], self._named[kept] = counts[kept], version
        kept = is_named & ~late
        gone = self._oldest(self._is_there & ~kept, self._changed, kept, version)
        self.removed += len(gone)
        self._is_there[gone], self.values[gone] = False, 0.0
        self._is_there[kept], self._changed[kept] = True, version
        self.values[kept] += added[kept]

    def _oldest(
        self, others: np.ndarray, versions: np.ndarray, kept: np.ndarray, version: int
    ) -> np.ndarray:
        """Returns the ids of `others` that are too old, or too many beside those of `kept`."""
        ids = np.flatnonzero(others)
        ids = ids[np.argsort((self._bucket[ids] << 48) + (versions[ids] << 16) + ids)]
        held = np.bincount(self._bucket[others | kept], minlength=BUCKETS)
        bucket = self._bucket[ids]
        rank = np.arange(len(ids)) - np.searchsorted(bucket, bucket)
        return ids[(rank < held[bucket] - SHARE) | (versions[ids] <= version - TTL)]


def account(folder: Path, steps: list[list[np.ndarray]]) -> dict[str, float]:
    """Returns how many rows are wrong, by kind, and how many pushes and rows that went there were.

    Args:
        folder: That of the run.
        steps: By rank and life: the steps that it has begun.
    """
    seed = int(np.load(folder / f"0-{SEEDS}")[0])
    marks = -np.load(folder / "marks.npy").reshape(-1, NUM_WORKERS, NUM_SHARDS)
    must_count = {
        (rank, step)
        for rank, lives in enumerate(steps)
        for number, begun in enumerate(lives)
        for step in begun[: None if number == len(lives) - 1 else -OPEN].tolist()
    }
    for rank in range(NUM_WORKERS):  # A worker that was started again may come late to a step.
        late = np.fromfile(folder / f"{rank}.late", "<i8").tolist()
        must_count -= {(rank, step) for step in late}
    model, wrong = Model(seed), {"lost": 0, "double": 0}
    for step, of_step in enumerate(marks):
        times, added = np.zeros(NUM_IDS, np.int64), np.zeros(NUM_IDS)
        is_counted = of_step != 0
        for rank in range(NUM_WORKERS):
            wrong["lost"] += int((~is_counted[rank]).any() and (rank, step) in must_count)
            ids = drawn(rank, step)
            ids = ids[is_counted[rank][model.owners[ids]]]
            share = NUM_WORKERS / np.maximum(is_counted.sum(0), 1)  # Of a push in the mean.
            wrong["double"] += int(
                (of_step[rank][is_counted[rank]] > share[is_counted[rank]]).any()
            )
            times[ids] += 1
            added[ids] += share[model.owners[ids]]
        model.step(step + 1, times, added)
    found = judge(-np.load(folder / "rows.npy"), model.values, model.values)
    return {
        **{kind: number + wrong.get(kind, 0) for kind, number in found.items()},
        "pushes": sum(len(begun) for lives in steps for begun in lives),
        "removed": model.removed,
    }
