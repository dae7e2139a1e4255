"""The model of rows that go says what shards do, and its account notices what they do wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rows import going
from benchmarks.rows.going import NUM_IDS, NUM_SHARDS, NUM_WORKERS
from pscore.rows.spec import RowTable
from tests.row_driver import RowShards, row_spec

SEED, STEPS = 5, 16
HYPER = np.array([[float(NUM_WORKERS), 0.0, 0.0]])
TABLES = (
    (
        "rows",
        0,
        going.DIM,
        RowTable(seed=SEED, init="zeros", min_count=going.MIN_COUNT, ttl=going.TTL, lru=going.LRU),
    ),
    ("marks", 0, 1, RowTable(seed=SEED + 1, init="zeros")),
)
Lives = list[list[np.ndarray]]


@pytest.fixture(scope="module")
def trained() -> tuple[np.ndarray, np.ndarray]:
    """Returns all rows and marks; of rank 1's last push but one only shard 1's half was counted."""
    shards = RowShards(row_spec(*TABLES, num_shards=NUM_SHARDS), NUM_WORKERS)
    shards.begin()
    for step in range(STEPS):
        for rank in range(NUM_WORKERS):
            ids, marks = going.drawn(rank, step), going.marks_of(rank, step, SEED + 1)
            values = np.repeat(going.number_of(ids)[:, None], going.DIM, axis=1)
            empty = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
            named, given = [ids, marks], [values, np.ones((len(marks), 1))]
            if (rank, step) != (1, STEPS - 2):
                shards.push(rank, step, named, given, HYPER)
                continue
            shards.push(rank, step, named, given, HYPER, only=[1])
            nothing = [np.zeros((0, going.DIM)), np.zeros((0, 1))]
            shards.push(rank, step, empty, nothing, HYPER, only=[0], samples=0.0)
    pushes = [(rank, step) for step in range(STEPS) for rank in range(NUM_WORKERS)]
    marked = np.concatenate([going.marks_of(*push, SEED + 1) for push in pushes])
    rows, marks = shards.pull([np.arange(NUM_IDS), []])[0], shards.pull([[], marked])[1]
    held = [store.count_held()["rows_removed"] for store in shards.stores()]
    assert min(held) > 100
    return rows, marks


def account(folder: Path, rows: np.ndarray, marks: np.ndarray) -> dict[str, float]:
    np.save(folder / "rows.npy", rows)
    np.save(folder / "marks.npy", marks)
    np.save(folder / f"0-{going.SEEDS}", np.array([SEED, SEED + 1], np.uint64))
    for rank in range(NUM_WORKERS):
        (folder / f"{rank}.late").touch()
    lives: Lives = [
        [np.arange(STEPS)],
        [np.arange(STEPS - 1), np.arange(STEPS - 1, STEPS)],  # Killed in its last step but one.
    ]
    return going.account(folder, lives)


def test_the_model_of_rows_that_go_equals_the_shards(
    tmp_path: Path, trained: tuple[np.ndarray, np.ndarray]
) -> None:
    found = account(tmp_path, *trained)
    assert found.pop("removed") > 1000
    assert found == {"lost": 0, "double": 0, "torn": 0, "shifted": 0, "pushes": 2 * STEPS}


@pytest.mark.parametrize("kind", ["lost", "double", "torn", "shifted", "gone", "stayed", "push"])
def test_the_account_of_rows_that_go_notices(
    tmp_path: Path, trained: tuple[np.ndarray, np.ndarray], kind: str
) -> None:
    rows, marks = (array.copy() for array in trained)
    there = np.flatnonzero(rows[:, 0])[7:8]
    number = going.number_of(there)
    if kind == "torn":
        rows[there, 1] -= number
    elif kind == "shifted":
        rows[there] -= 1.0 + (number == 1)[:, None]
    elif kind == "stayed":
        absent = np.flatnonzero(rows[:, 0] == 0)[7:8]
        rows[absent] = -going.number_of(absent)[:, None]
    elif kind == "push":
        marks[0] = 0.0
    else:
        moved = {"lost": number[:, None], "double": -number[:, None], "gone": -rows[there]}
        rows[there] += moved[kind]
    found = account(tmp_path, rows, marks)
    wanted = {"gone": "lost", "stayed": "double", "push": "lost"}.get(kind, kind)
    assert found[wanted] >= 1
