"""Copies of a row slice that are made while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from pscore.rows.spec import RowTable
from psserver.rows import copying
from tests.row_driver import RowShards, row_spec
from tests.unit.psserver.ordered import last_of

LR = np.array([[1.0, 0.0, 1e-10, 0.0, 0.0]])  # adagrad
TABLES = (
    ("plain", 0, 2, RowTable(seed=1, init="uniform(1)")),
    ("counted", 0, 3, RowTable(seed=2, min_count=2, ttl=3)),
    ("newest", 0, 1, RowTable(seed=3, lru=1 << 14)),
)


def by_id(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Returns the arrays of a copy with rows in the order of their ids."""
    found: dict[str, object] = {name: arrays[name].tolist() for name in ("counts", "mark")}
    for name, array in arrays.items():
        kind, _, number = name.rpartition(".")
        if kind in ("ids", "waiting_ids"):
            stem = "" if kind == "ids" else "waiting_"
            order = np.argsort(array)
            rows = arrays[f"{'rows' if not stem else 'waiting_times'}.{number}"]
            found[name] = array[order].tolist()
            found[f"{stem}rows.{number}"] = rows.reshape(len(array), -1)[order].tolist()
            found[f"{stem}versions.{number}"] = arrays[f"{stem}versions.{number}"][order].tolist()
        elif "gone" in kind:
            found[name] = sorted(array.tolist())
    return found


def trained(shards: RowShards, step: int, drawn: np.random.Generator) -> None:
    ids = [np.sort(drawn.choice(400, 60, replace=False)).astype(np.uint64) for _ in TABLES]
    grads = [drawn.standard_normal((60, dim)).astype(np.float32) for _, _, dim, _ in TABLES]
    shards.push(0, step, ids, grads, LR)


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_has_the_bits_of_its_first_moment_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rows change, go, and come, at places that were another's; two copies are made at once."""
    monkeypatch.setattr(copying, "PORTION_NBYTES", 400)
    shards = RowShards(row_spec(*TABLES, optimizer="adagrad"), 1)
    shards.begin()
    store, drawn = shards.stores()[0], np.random.default_rng(seed)
    for step in range(6):
        trained(shards, step, drawn)
    mark = tuple(last_of(store.export())["mark"].tolist())
    for step in range(6, 9):
        trained(shards, step, drawn)
    wanted = [by_id(last_of(store.export())), by_id(last_of(store.export(mark)))]
    copies = [store.export(), store.export(mark)]
    found: list[dict[str, object]] = [{}, {}]
    assert [next(copy) for copy in copies] == [None, None]
    step, num_portions = 9, 0
    while not all(found):
        if step < 20:
            trained(shards, step, drawn)
            step += 1
        for index, copy in enumerate(copies):
            if not found[index] and (arrays := next(copy)) is not None:
                found[index] = by_id(arrays)
        num_portions += 1
    assert num_portions > 10
    assert found == wanted
    assert by_id(last_of(store.export())) != wanted[0]


def test_a_copy_of_no_rows_is_whole_at_once() -> None:
    shards = RowShards(row_spec(*TABLES, optimizer="adagrad"), 1)
    shards.begin()
    (arrays,) = shards.stores()[0].export()
    assert arrays is not None
    assert len(arrays["ids.0"]) == 0


@pytest.mark.parametrize("version", [-(1 << 80), -2, 9, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_a_mark_with_a_version_that_never_was_gives_all_rows(version: int) -> None:
    shards = RowShards(row_spec(*TABLES, optimizer="adagrad"), 1)
    shards.begin()
    store, drawn = shards.stores()[0], np.random.default_rng(0)
    for step in range(6):
        trained(shards, step, drawn)
    whole = last_of(store.export())
    found = last_of(store.export((int(whole["mark"][0]), version)))
    assert by_id(found) == by_id(whole)
