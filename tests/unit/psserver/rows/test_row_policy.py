"""Rows that are made late and that go again, against a model in float64 of the same rules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscore.errors import ConfigError, TableFullError
from pscore.rows.init import initial_rows
from pscore.rows.partition import buckets_of
from pscore.rows.spec import LRU_MIN, WAITING_MIN, RowTable
from pscore.rules import SSGD
from pscore.types import Origin
from psserver.rows.slab import Slab
from tests.row_driver import RowShards, crowded, row_spec

LR, EPS = 0.25, 1e-3
HYPER = np.array([[LR, 0.0, EPS, 0.0, 0.0]])  # adagrad
ONE = np.array([[1.0, 0.0, 0.0]])  # sgd
DIM, NUM_IDS, WORKERS, STEPS = 3, 300, 3, 40
SEED, ROOM = 3, 4
IDS = crowded(SEED, NUM_IDS).astype(np.int64)  # Of 16 buckets, of which each has `ROOM` rows.
INIT = "uniform(0.5)"


def drawn(step: int, worker: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids of which small ones are frequent, and gradients."""
    rng = np.random.default_rng((step, worker))
    ids = IDS[np.unique((NUM_IDS * rng.random(14) ** 3).astype(np.int64))]
    return ids, rng.standard_normal((len(ids), DIM))


@functools.cache
def bucket(id_: int) -> int:
    return int(buckets_of(np.array([id_], np.uint64), SEED)[0])


class Model:
    """One table: rows with Adagrad's sums, ids that wait, and counts."""

    def __init__(self, table: RowTable) -> None:
        self.table, self.room = table, ROOM if table.lru else 10**9
        self.rows: dict[int, list[Any]] = {}  # Weights, sums and version.
        self.waiting: dict[int, tuple[int, int]] = {}  # Pushes, and version.
        self.removed = self.dropped = 0

    def step(self, version: int, pushes: list[tuple[np.ndarray, np.ndarray]]) -> None:
        named: dict[int, list[np.ndarray]] = {}
        for ids, of_push in pushes:
            for id_, grad in zip(ids.tolist(), of_push, strict=True):
                named.setdefault(id_, []).append(grad.astype(np.float32).astype(np.float64))
        absent = {id_: len(grads) for id_, grads in named.items() if id_ not in self.rows}
        late = self._wait(version, absent)
        kept = {id_: grads for id_, grads in named.items() if id_ not in late}
        self._remove(version, set(kept))
        for id_, grads in kept.items():
            first = initial_rows(INIT, self.table.seed, np.array([id_], np.uint64), DIM)[0]
            row = self.rows.setdefault(id_, [first.astype(np.float64), np.zeros(DIM), 0])
            mean = np.sum(grads, axis=0) / len(pushes)
            row[1] += mean**2
            row[0] -= LR * mean / (np.sqrt(row[1]) + EPS)
            row[2] = version

    def _wait(self, version: int, absent: dict[int, int]) -> set[int]:
        """Counts pushes; returns the ids whose rows are not made."""
        counts = {id_: self.waiting.get(id_, (0, 0))[0] + n for id_, n in absent.items()}
        late = {id_ for id_, count in counts.items() if count < self.table.min_count}
        others = {id_: at for id_, at in self.waiting.items() if id_ not in absent}
        for id_ in self._oldest(version, {i: v for i, (_, v) in others.items()}, late, self.room):
            del others[id_]
        kept = sorted(late & self.waiting.keys())
        for id_ in sorted(late - self.waiting.keys()):
            if sum(bucket(each) == bucket(id_) for each in [*others, *kept]) < self.room:
                kept.append(id_)
        self.dropped += sum(absent[id_] for id_ in late)
        self.waiting = others | {id_: (counts[id_], version) for id_ in kept}
        return late

    def _remove(self, version: int, kept: set[int]) -> None:
        others = {id_: row[2] for id_, row in self.rows.items() if id_ not in kept}
        for id_ in self._oldest(version, others, kept, self.room):
            del self.rows[id_]
            self.removed += 1

    def _oldest(
        self, version: int, others: dict[int, int], kept: set[int], room: int
    ) -> Iterator[int]:
        """Yields those of `others`, by version, that go: too old, or too many in their bucket."""
        held = Counter(map(bucket, [*others, *kept]))
        for last, id_ in sorted((last, id_) for id_, last in others.items()):
            if (self.table.ttl and last <= version - self.table.ttl) or held[bucket(id_)] > room:
                held[bucket(id_)] -= 1
                yield id_


def trained(table: RowTable, num_shards: int, steps: int = STEPS) -> tuple[RowShards, Model]:
    spec = row_spec(("a", 0, DIM, table), optimizer="adagrad", num_shards=num_shards)
    shards, model = RowShards(spec, WORKERS), Model(table)
    shards.begin()
    for step in range(steps):
        pushes = [drawn(step, worker) for worker in range(WORKERS)]
        for worker in np.random.default_rng(step).permutation(WORKERS).tolist():
            ids, grads = pushes[worker]
            shards.push(worker, step, [ids], [grads], HYPER)
        model.step(step + 1, pushes)
        if step % 7 == 0 or step == steps - 1:
            require_equal(shards, model)
    return shards, model


def require_equal(shards: RowShards, model: Model) -> None:
    """Compares all rows, ids that wait and counts of shards with the model's."""
    stores = shards.stores()
    slabs = [policy.slab for store in stores for policy in store.policies]
    ids = sorted(int(id_) for slab in slabs for id_ in slab.rows()[0])
    assert ids == sorted(model.rows)
    if ids:
        wanted = np.array([np.concatenate(model.rows[id_][:2]) for id_ in ids])
        rows = shards.pull([ids], with_state=True)[0]
        np.testing.assert_allclose(rows, wanted, rtol=2e-5, atol=1e-6)
    found: dict[int, tuple[int, int]] = {}
    for waiting in (policy.waiting for store in stores for policy in store.policies):
        if waiting is not None:
            own, places = waiting.rows()
            counts = np.empty(len(own), np.float32)
            waiting.read(own, places, 1, counts)
            versions = waiting.versions(places)
            found |= dict(zip(own.tolist(), zip(counts, versions, strict=True), strict=True))
    assert found == model.waiting
    held = [store.count_held() for store in stores]
    names = ("rows", "ids_waiting", "rows_removed", "gradients_dropped")
    sums = [sum(each[name] for each in held) for name in names]
    assert sums == [len(model.rows), len(model.waiting), model.removed, model.dropped]
    for store in stores:
        store.check_invariants()


RULES = {
    "late": RowTable(seed=3, init=INIT, min_count=4),
    "ttl": RowTable(seed=3, init=INIT, ttl=7),
    "long": RowTable(seed=3, init=INIT, ttl=25),
    "both": RowTable(seed=3, init=INIT, min_count=3, ttl=9),
    "many": RowTable(seed=3, init=INIT, lru=LRU_MIN),
    "many and old": RowTable(seed=3, init=INIT, lru=LRU_MIN, ttl=6),
    "many and late": RowTable(seed=3, init=INIT, lru=LRU_MIN, min_count=2),
    "all": RowTable(seed=3, init=INIT, lru=LRU_MIN, min_count=3, ttl=11),
}


@pytest.mark.parametrize("name", RULES)
def test_rows_are_those_of_the_model_on_any_number_of_shards(name: str) -> None:
    shards, model = trained(RULES[name], 1)
    assert model.removed or name == "late"
    assert model.dropped or RULES[name].min_count == 0
    wanted = shards.pull([IDS], with_state=True)[0]
    for num_shards in (2, 3, 4):
        shards, _ = trained(RULES[name], num_shards)
        found = shards.pull([IDS], with_state=True)[0]
        np.testing.assert_array_equal(found, wanted)


def test_a_step_with_more_rows_than_the_bound_is_refused_and_counts_nothing() -> None:
    """A step may bring a bucket more rows than its share: they go with the next."""
    table = RowTable(seed=SEED, lru=LRU_MIN)
    shards = RowShards(row_spec(("a", 0, DIM, table)))
    (store,) = shards.stores()
    room = store.slabs[0].rows_max
    assert room > LRU_MIN
    shards.begin()
    shards.push(0, 0, [IDS], [np.ones((NUM_IDS, DIM))], ONE)
    assert store.count_held()["rows"] == NUM_IDS
    many = np.arange(10**6, 10**6 + room + 1)
    with pytest.raises(TableFullError, match=f"in a slice that has room for {room}; .* or lru"):
        shards.push(0, 1, [many], [np.ones((len(many), DIM))], ONE)
    shards.push(0, 1, [IDS[:1]], [np.ones((1, DIM))], ONE)
    assert shards.version == 2
    assert store.count_held()["rows_removed"] == NUM_IDS - 16 * ROOM


def test_a_table_full_of_rows_keeps_its_bound_with_many_new_ones() -> None:
    shards = RowShards(row_spec(("a", 0, DIM, RowTable(seed=SEED, lru=LRU_MIN)), num_shards=3))
    shards.begin()
    for step in range(6):
        ids = np.arange(9000) + 7000 * step
        shards.push(0, step, [ids], [np.ones((len(ids), DIM))], ONE)
        for store in shards.stores():
            store.check_invariants()
    held = sum(store.count_held()["rows"] for store in shards.stores())
    assert 0.98 * LRU_MIN < held < 1.06 * LRU_MIN
    newest = shards.pull([np.arange(9000) + 35_000])[0]
    assert (newest != shards.pull([np.arange(9000) + 10**6])[0]).any(1).all()


def test_a_pull_since_a_version_brings_the_rows_that_have_gone() -> None:
    shards = RowShards(row_spec(("a", 0, DIM, RowTable(init=INIT, ttl=2))))
    shards.begin()
    before = shards.pull([[1, 2]])[0]
    shards.push(0, 0, [[1]], [np.ones((1, DIM))], ONE)
    held = shards.pull([[1, 2]])
    for step in (1, 2):
        shards.push(0, step, [[]], [np.ones((0, DIM))], ONE)
    np.testing.assert_array_equal(shards.pull([[1, 2]], since=1, held=held)[0], before)


def test_loaded_rows_are_made_at_once_and_replace_an_id_that_waits() -> None:
    shards = RowShards(row_spec(("a", 0, DIM, RowTable(init=INIT, min_count=9))))
    shards.begin()
    shards.push(0, 0, [[1, 2]], [np.ones((2, DIM))], ONE)
    shards.load([[1, 5]], [np.full((2, DIM), 7.0)])
    np.testing.assert_array_equal(shards.pull([[1, 5]])[0], 7.0)
    assert shards.stores()[0].count_held()["ids_waiting"] == 1
    shards.stores()[0].check_invariants()


def test_a_state_without_rows_sets_the_step_and_leaves_those_that_wait() -> None:
    shards = RowShards(row_spec(("a", 0, DIM, RowTable(init=INIT, min_count=2)), rule=SSGD()))
    shards.begin()
    shards.push(0, 0, [[1, 2]], [np.ones((2, DIM))], ONE)
    before = shards.stores()[0].count_held()
    shards.locate(100)
    assert shards.stores()[0].count_held() == before
    table = shards.engines[0].jobs["rows"].job.table(0)
    assert (table.spec.origin, table.spec.step_at(table.step)) == (Origin(1, 100), 100)
    shards.push(0, 1, [[1]], [np.ones((1, DIM))], ONE)
    assert shards.stores()[0].count_held()["rows"] == 1


def test_room_for_rows_counts_only_those_that_pushes_make() -> None:
    table = RowTable(seed=SEED, init="zeros", max_rows=4, min_count=2)
    shards = RowShards(row_spec(("a", 0, DIM, table)))
    shards.begin()
    for step in range(3):
        ids = IDS[:4] if step < 2 else IDS[10:14]
        shards.push(0, step, [ids], [np.ones((4, DIM))], ONE)
    with pytest.raises(TableFullError, match="would have 8 rows"):
        shards.push(0, 3, [IDS[10:14]], [np.ones((4, DIM))], ONE)
    shards.push(0, 3, [IDS[20:]], [np.ones((NUM_IDS - 20, DIM))], ONE)
    assert shards.stores()[0].count_held()["ids_waiting"] == 16 * WAITING_MIN


def test_room_for_the_pushes_of_an_open_step_is_claimed_again_after_a_kill(tmp_path: Path) -> None:
    """One push is in the open step, the other is held until the lower rank has come."""
    for number, first in enumerate((0, 1)):
        table = RowTable(init="zeros", max_rows=10)
        shards = RowShards(row_spec(("a", 0, DIM, table)), 2, tmp_path / str(number))
        shards.begin()
        shards.push(first, 0, [np.arange(8)], [np.ones((8, DIM))], ONE)
        shards.kill(0)
        with pytest.raises(TableFullError, match="would have 16 rows"):
            shards.push(1 - first, 0, [np.arange(50, 58)], [np.ones((8, DIM))], ONE)
        shards.push(1 - first, 0, [np.arange(6, 10)], [np.ones((4, DIM))], ONE)
        assert shards.version == 1
        assert shards.stores()[0].count_held()["rows"] == 10


def test_other_threads_look_at_the_index_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look while rows are made waits until the index is whole again."""
    table = RowTable(init="zeros", max_rows=4)
    shards = RowShards(row_spec(("a", 0, DIM, table)))
    shards.begin()
    store = shards.stores()[0]
    is_locked, find, begin = [], Slab.find, Slab.begin

    def look(slab: Slab, ids: np.ndarray) -> np.ndarray:
        is_locked.append(store.places_lock.locked())
        return find(slab, ids)

    def change(slab: Slab, plan: Any) -> None:
        assert store.places_lock.locked()
        begin(slab, plan)

    monkeypatch.setattr(Slab, "find", look)
    monkeypatch.setattr(Slab, "begin", change)
    shards.push(0, 0, [np.arange(4)], [np.ones((4, DIM))], ONE)
    is_locked.clear()
    shards.push(0, 1, [np.arange(4)], [np.ones((4, DIM))], ONE)
    assert is_locked[0], "the check is made on the thread of a connection"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (RowTable(min_count=-1), "has min_count -1"),
        (RowTable(ttl=-1), "ttl -1"),
        (RowTable(lru=LRU_MIN, max_rows=10), "give one of them"),
        (RowTable(lru=LRU_MIN - 1), "each of 4096 buckets keeps its newest"),
    ],
)
def test_rules_that_cannot_be_are_refused(table: RowTable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        row_spec(("a", 0, DIM, table)).layout()
