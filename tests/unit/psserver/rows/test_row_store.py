"""Row slices through the engine: steps, refusals and pulls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from pscore.errors import ConfigError, DecodeError, JobMismatchError, LimitError, TableFullError
from pscore.rows.hashing import FIRST, SECOND, mask_of
from pscore.rows.init import initial_rows
from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.rows.partition import slices_of
from pscore.rows.spec import INDEX_NBYTES, RowTable
from pscore.rules import ASGD, DCASGD, SSGD, SSP
from psserver.decisions.limits import Limits
from psserver.rows import kernels
from psserver.rows.copying import SlabCopy
from psserver.rows.mapped import Mapped
from psserver.rows.slab import NO_PLACES, Slab
from tests.row_driver import RowShards, row_spec

LR = np.array([[1.0, 0.0, 0.0]])  # sgd: lr, weight_decay, maximize.
WIDE = 1 << 63
A = ("a", 0, 2, RowTable(seed=1, init="uniform(1)"))
B = ("b", 50, 3, RowTable(seed=2, init="normal(1)"))


def begun(spec: object = None, num_workers: int = 1, **more: object) -> RowShards:
    shards = RowShards(spec or row_spec(A, B), num_workers, **more)  # type: ignore[arg-type]
    shards.begin()
    return shards


def ones(*counts: int) -> list[np.ndarray]:
    return [np.ones((count, dim)) for count, dim in zip(counts, (2, 3), strict=True)]


# ----- reading


def test_a_row_that_was_never_updated_is_made_of_seed_and_id() -> None:
    shards = begun()
    ids = [[0, WIDE + 5, 7], [49]]
    first, second = shards.pull(ids)
    np.testing.assert_array_equal(
        first, initial_rows("uniform(1)", 1, np.array(ids[0], np.uint64), 2)
    )
    np.testing.assert_array_equal(
        second, initial_rows("normal(1)", 2, np.array(ids[1], np.uint64), 3)
    )
    assert [slab.count for slab in shards.stores()[0].slabs] == [0, 0]


def test_a_pull_since_a_version_brings_the_rows_that_have_changed() -> None:
    shards = begun()
    ids = [[1, 2, 3], [4]]
    before = shards.pull(ids)
    shards.push(0, 0, [[2], []], ones(1, 0), LR)
    shards.push(0, 1, [[3], []], ones(1, 0), LR)
    blank = [np.zeros_like(rows) for rows in before]
    found = shards.pull(ids, since=1, held=blank)
    np.testing.assert_array_equal(found[0][:2], 0.0)
    np.testing.assert_array_equal(found[0][2], shards.pull(ids)[0][2])
    np.testing.assert_array_equal(found[1], 0.0)
    whole = shards.pull(ids, since=0, held=before)
    np.testing.assert_array_equal(whole[0], shards.pull(ids)[0])


def test_ids_that_no_float_holds_are_rows_of_their_own() -> None:
    shards = begun()
    near = [(1 << 53), (1 << 53) + 1]
    before = shards.pull([near, []])[0]
    shards.push(0, 0, [near[:1], []], ones(1, 0), LR)
    after = shards.pull([near, []])[0]
    np.testing.assert_array_equal(after[0], before[0] - np.float32(1.0))
    np.testing.assert_array_equal(after[1], before[1])


# ----- steps


def test_a_step_is_the_mean_over_all_pushes_and_absent_rows_are_zero() -> None:
    """As DDP's: a worker without the row has a gradient of zeros for it."""
    shards = begun(num_workers=3)
    before = shards.pull([[1, 2], [3]])
    shards.push(0, 0, [[1, 2], []], ones(2, 0), LR, samples=2.0)
    shards.push(1, 0, [[1], [3]], ones(1, 1), LR)
    assert shards.version == 0
    shards.push(2, 0, [[], []], ones(0, 0), LR)
    assert shards.version == 1
    first, second = shards.pull([[1, 2], [3]])
    np.testing.assert_allclose(first, before[0] - np.array([[3 / 4], [2 / 4]]), rtol=1e-6)
    np.testing.assert_allclose(second, before[1] - 1 / 4, rtol=1e-6)


def test_with_a_backup_worker_a_step_is_the_mean_of_the_first_that_came_to_each_slice() -> None:
    """Adagrad in float64; the push that is too late is answered, and in no row."""
    spec = row_spec(A, optimizer="adagrad", rule=SSGD(backup=1), num_shards=2)
    shards, hyper, ids = begun(spec, 3), np.array([[0.5, 0.0, 1e-3, 0.0, 0.0]]), np.arange(30)
    slice_of = slices_of(ids.astype(np.uint64), 1, 2)
    weights = shards.pull([ids])[0].astype(np.float64)
    sums, num_late = np.zeros_like(weights), 0
    for step in range(12):
        drawn = np.random.default_rng(step)
        own = [np.sort(drawn.choice(ids, 9, replace=False)) for _ in range(3)]
        grads = [drawn.standard_normal((9, 2)).astype(np.float32) for _ in range(3)]
        for part in range(2):
            order, mean = drawn.permutation(3), np.zeros_like(weights)
            for place, worker in enumerate(order.tolist()):
                given = [own[worker]], [grads[worker]], hyper
                verdicts = shards.push(worker, step, *given, only=[part])
                num_late += verdicts == ["VERDICT_TOO_LATE"]
                if place < 2:
                    chosen = slice_of[own[worker]] == part
                    mean[own[worker][chosen]] += grads[worker][chosen] / 2.0
            sums += mean**2
            weights -= 0.5 * mean / (np.sqrt(sums) + 1e-3)
    assert num_late == 24
    assert shards.version == 12
    np.testing.assert_allclose(shards.pull([ids])[0], weights, rtol=1e-5, atol=1e-6)


def test_duplicates_of_workers_are_summed_before_the_square() -> None:
    hyper = np.array([[1.0, 0.0, 0.0, 0.0, 0.0]])
    spec = row_spec(A, B, optimizer="adagrad")
    shards = begun(spec, 2)
    for worker in (0, 1):
        shards.push(worker, 0, [[9], []], ones(1, 0), hyper)
    (state,) = shards.pull([[9], []], with_state=True)[0]
    np.testing.assert_array_equal(state[2:], [1.0, 1.0])  # The square of the mean.


def test_steps_are_counted_for_each_table_that_had_a_gradient() -> None:
    shards = begun(num_workers=2)
    shards.push(0, 0, [[], []], ones(0, 0), LR, present=0b10)
    shards.push(1, 0, [[], []], ones(0, 0), LR, present=0b10)
    shards.push(0, 1, [[], []], ones(0, 0), LR)
    shards.push(1, 1, [[5], []], ones(1, 0), LR, present=0b01)
    assert shards.stores()[0].counts.tolist() == [1, 2]


def test_no_row_gets_the_gradient_of_another_when_one_is_new() -> None:
    """In a system that was read, one absent row shifts the gradients of all rows behind it."""
    shards = begun()
    ids = np.arange(200)
    before = shards.pull([ids, []])[0]
    ledger = np.zeros(200)
    drawn = np.random.default_rng(1)
    for step in range(30):
        chosen = drawn.choice(200, 20, replace=False)
        grads = np.repeat(chosen[:, None] + 1.0, 2, axis=1)
        shards.push(0, step, [chosen, []], [grads, np.ones((0, 3))], LR)
        ledger[chosen] += chosen + 1.0
    after = shards.pull([ids, []])[0].astype(np.float64)
    np.testing.assert_array_equal(np.rint(before - after)[:, 0], ledger)
    shards.stores()[0].check_invariants()


def run(num_shards: int, order: Sequence[int], parts: int = 1) -> list[np.ndarray]:
    hyper = np.array([[0.1, 0.9, 0.999, 1e-8, 0.0]])
    spec = row_spec(A, B, optimizer="sparse_adam", num_shards=num_shards, parts=parts)
    shards = begun(spec, len(order))
    for step in range(4):
        for worker in order:
            drawn = np.random.default_rng((step, worker))
            ids = [drawn.choice(90, 30, replace=False), drawn.choice(50, 10, replace=False)]
            grads = [drawn.standard_normal((30, 2)), drawn.standard_normal((10, 3))]
            shards.push(worker, step, ids, grads, hyper, samples=1.0 + worker)
    assert shards.version == 4
    return shards.pull([np.arange(90), np.arange(50)], with_state=True)


def test_any_number_of_shards_and_any_order_of_arrival_give_the_same_bits() -> None:
    wanted = run(1, (0, 1, 2))
    for num_shards, order in zip((1, 2, 3, 4), itertools.permutations(range(3)), strict=False):
        for found, rows in zip(run(num_shards, order), wanted, strict=True):
            np.testing.assert_array_equal(found, rows)
    for found, rows in zip(run(2, (2, 0, 1), parts=3), wanted, strict=True):
        np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("rule", [ASGD(), SSP()], ids=str)
def test_in_an_asynchronous_mode_each_push_is_an_update(rule: ASGD | SSP) -> None:
    shards = begun(row_spec(A, B, rule=rule), 2)
    before = shards.pull([[1], []])[0]
    for worker in (0, 1, 0):
        step = {0: 0, 1: 0}[worker] if shards.version < 2 else 1
        shards.push(worker, step, [[1], []], ones(1, 0), LR)
    assert shards.version == 3
    np.testing.assert_allclose(shards.pull([[1], []])[0], before - 3.0, rtol=1e-6)


def test_a_push_counts_once() -> None:
    shards = begun(num_workers=2)
    before = shards.pull([[1], []])[0]
    for worker in (0, 0):
        shards.push(worker, 0, [[1], []], ones(1, 0), LR)
    assert shards.push(1, 0, [[1], []], ones(1, 0), LR) == ["VERDICT_ACCEPTED"]
    assert shards.push(1, 0, [[1], []], ones(1, 0), LR) == ["VERDICT_DUPLICATE"]
    np.testing.assert_allclose(shards.pull([[1], []])[0], before - 1.0, rtol=1e-6)


def test_loaded_rows_begin_with_the_optimizers_first_state() -> None:
    hyper = np.array([[1.0, 0.0, 0.0, 4.0, 0.0]])  # initial_accumulator_value 4.
    shards = RowShards(row_spec(A, B, optimizer="adagrad"))
    shards.load([[5, 6], [7]], [np.full((2, 2), 3.0), np.full((1, 3), 4.0)])
    np.testing.assert_array_equal(shards.pull([[5, 6], [7]])[0], 3.0)
    shards.push(0, 0, [[5], []], ones(1, 0), hyper)
    (row,) = shards.pull([[5], []], with_state=True)[0]
    np.testing.assert_allclose(row, [3 - 1 / 5**0.5] * 2 + [5.0, 5.0], rtol=1e-6)
    shards.load([[5], []], [row[None], np.ones((0, 5))])
    np.testing.assert_array_equal(shards.pull([[5], []], with_state=True)[0][0], row)


# ----- refusals


def test_a_push_that_is_refused_is_not_counted() -> None:
    shards = begun(num_workers=1)
    with pytest.raises(DecodeError, match="id 50 of row table 'b'"):
        shards.push(0, 0, [[1], [50]], ones(1, 1), LR)
    with pytest.raises(DecodeError, match="not finite"):
        shards.push(0, 0, [[1], []], [np.full((1, 2), np.nan), np.ones((0, 3))], LR)
    with pytest.raises(DecodeError, match="bytes with"):
        shards.push(0, 0, [[1], []], [np.ones((1, 3)), np.ones((0, 3))], LR)
    assert shards.version == 0
    shards.push(0, 0, [[1], []], ones(1, 0), LR)
    assert shards.version == 1
    with pytest.raises(DecodeError, match="id 60 of row table 'b'"):
        shards.pull([[], [60]])


def test_a_full_table_counts_nothing_and_takes_known_rows_on() -> None:
    small = ("a", 0, 2, RowTable(seed=1, init="zeros", max_rows=10))
    shards = begun(row_spec(small, B), 2)
    for worker in (0, 1):
        shards.push(worker, 0, [np.arange(8), []], ones(8, 0), LR)
    with pytest.raises(TableFullError, match=r"'a' would have 11 rows .* room for 10"):
        shards.push(0, 1, [np.arange(11), []], ones(11, 0), LR)
    for worker in (0, 1):
        shards.push(worker, 1, [np.arange(10), []], ones(10, 0), LR)
    assert shards.version == 2
    for worker in (0, 1):
        shards.push(worker, 2, [np.arange(10), []], ones(10, 0), LR)
    assert shards.version == 3
    np.testing.assert_array_equal(shards.pull([[9], []])[0], -2.0)


def test_rows_of_two_pushes_on_their_way_do_not_pass_the_bound_together() -> None:
    small = ("a", 0, 2, RowTable(seed=1, init="zeros", max_rows=10))
    shards = begun(row_spec(small, B), 2)
    shards.push(0, 0, [np.arange(8), []], ones(8, 0), LR)
    with pytest.raises(TableFullError):
        shards.push(1, 0, [np.arange(100, 108), []], ones(8, 0), LR)


def test_a_table_whose_rows_have_no_memory_is_refused() -> None:
    large = ("a", 0, 2, RowTable(max_rows=1 << 20))
    with pytest.raises(LimitError, match=r"needs .* bytes of memory"):
        RowShards(row_spec(large, B), limits=Limits(memory_nbytes=1 << 24))


@pytest.mark.parametrize(
    ("tables", "optimizer", "rule", "message"),
    [
        ([("a", 0, 0, RowTable())], "sgd", ASGD(), "has shape"),
        ([("a", 0, 2, RowTable(init="ones"))], "sgd", ASGD(), "init is 'ones'"),
        ([("a", 0, 2, RowTable(max_norm=-1.0))], "sgd", ASGD(), "max_norm"),
        ([A, A], "sgd", ASGD(), "a printable name of its own"),
        ([A], "adam", ASGD(), "no optimizer 'adam' of rows"),
        ([A], "sgd", DCASGD(), "rows cannot be trained in dcasgd"),
    ],
)
def test_declarations_that_cannot_be_are_refused(
    tables: list[tuple[str, int, int, RowTable]], optimizer: str, rule: ASGD, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RowShards(row_spec(*tables, optimizer=optimizer, rule=rule))


def test_a_declaration_that_differs_is_named() -> None:
    shards = begun()
    wider = ("a", 0, 4, A[3])
    with pytest.raises(JobMismatchError, match=r"'a' \[0, 4\].* and 'a' \[0, 2\]"):
        shards.engines[0].define(shards.engines[0].jobs["rows"], row_spec(wider, B))
    other = ("a", 0, 2, RowTable(seed=9, init="uniform(1)"))
    with pytest.raises(JobMismatchError, match=r"row table .a. has seed 9 here and 1 in"):
        shards.engines[0].define(shards.engines[0].jobs["rows"], row_spec(other, B))


# ----- the index


def test_the_index_is_searched_once_for_a_pull_and_the_push_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a full table, and by several workers; a row that was new is looked for again."""
    small = ("a", 0, 2, RowTable(seed=1, init="zeros", max_rows=20))
    shards = begun(row_spec(small, B), 2)
    searched: list[int] = []
    find = Slab.find

    def look(slab: Slab, ids: np.ndarray) -> np.ndarray:
        searched.append(len(ids))
        return find(slab, ids)

    for step in range(3):
        if step == 2:
            monkeypatch.setattr(Slab, "find", look)
        for worker in (0, 1):
            shards.pull([np.arange(5 * worker, 5 * worker + 15), []], worker=worker,
                        clock=step, min_version=step, look=False)  # fmt: skip
        for worker in (0, 1):
            ids = np.arange(5 * worker, 5 * worker + 15)
            shards.push(worker, step, [ids, []], ones(15, 0), LR)
    assert sum(searched) == 30
    expected = -1.5 * (1.0 + np.isin(np.arange(20), np.arange(5, 15)))
    np.testing.assert_array_equal(shards.pull([np.arange(20), []])[0][:, 0], expected)


def test_a_place_is_looked_for_again_when_rows_have_gone() -> None:
    """Else the push would reach the row that has the place now."""
    going = ("a", 0, 2, RowTable(init="zeros", ttl=2))
    shards = begun(row_spec(going, B, rule=ASGD()), 2)
    shards.push(0, 0, [[1], []], ones(1, 0), LR)
    shards.pull([[1], []], look=False, clock=1)
    for step in range(3):
        shards.push(1, step, [[7 if step == 2 else 5], []], ones(1, 0), LR)
    shards.push(0, 1, [[1], []], ones(1, 0), LR)
    np.testing.assert_array_equal(shards.pull([[1, 7], []])[0], -1.0)
    shards.stores()[0].check_invariants()


def slab(rows_max: int) -> Slab:
    optimizer = ROW_OPTIMIZERS["sgd"]()
    return Slab(2, rows_max, optimizer, RowTable(init="zeros"), Mapped(24 * rows_max))


def unmixed(hashed: np.ndarray) -> np.ndarray:
    """Returns the ids of which `mix64` makes some hashes."""
    for shift in (31, 27, 30):
        found = hashed.copy()
        for _ in range(64 // shift):
            found = hashed ^ (found >> np.uint64(shift))
        inverse = {31: SECOND, 27: FIRST}.get(shift)
        hashed = found * np.uint64(pow(int(inverse), -1, 1 << 64)) if inverse else found
    return hashed


COUNT = 20_000
PATTERNS = {
    "sequential": np.arange(COUNT, dtype=np.uint64),
    "odd strides": np.arange(COUNT, dtype=np.uint64) * np.uint64(1_000_003),
    "strides of 2^12": np.arange(COUNT, dtype=np.uint64) << np.uint64(12),
    "strides of 2^49": np.arange(1 << 15, dtype=np.uint64) << np.uint64(49),
    "one position of a known hash": unmixed(np.arange(COUNT, dtype=np.uint64) << np.uint64(20)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_index_finds_each_row_in_few_probes(name: str) -> None:
    """Also of ids that somebody has chosen who knows the table's seed: an index has its own."""
    made = slab(1 << 15)
    ids = np.sort(PATTERNS[name] ^ (mask_of(0) if "hash" in name else np.uint64(0)))
    for part in np.array_split(ids, 7):
        made.begin(made.plan(part))
    made.check_invariants()
    assert made.probe_max <= 64


@pytest.mark.parametrize("count", [1025, 8193, 16_385, 32_768])
def test_rows_and_index_take_no_more_memory_than_is_declared(count: int) -> None:
    """Also just behind the growth of the index, which then has most room to spare."""
    made = slab(count)
    for part in np.array_split(np.arange(count, dtype=np.uint64), 50):
        made.begin(made.plan(part))
    assert made.nbytes <= (24 + INDEX_NBYTES) * count
    made.check_invariants()


def test_rows_that_are_given_up_leave_the_index_whole() -> None:
    made = slab(5000)
    ids = np.arange(4000, dtype=np.uint64)
    made.begin(made.plan(ids))
    drawn = np.random.default_rng(0)
    for turn in range(5):
        gone = np.sort(drawn.choice(made.rows()[1], 700, replace=False))
        fresh = np.arange(10_000 * (turn + 1), 10_000 * (turn + 1) + 600, dtype=np.uint64)
        made.begin(made.plan(fresh, gone))
        made.check_invariants()
    assert made.count == 4000 - 5 * 100


def test_rows_since_a_version_are_found_among_all_and_few_places_are_looked_at() -> None:
    """Also rows whose place was another's."""
    made, drawn = slab(5000), np.random.default_rng(0)
    versions: dict[int, int] = {}
    for version in range(1, 12):
        ids = np.sort(drawn.choice(9000, 20 if version > 1 else 4000, replace=False))
        known, places = made.rows()
        removed = places[~np.isin(known, ids)][:7] if version > 3 else NO_PLACES
        for gone in made.ids_at(removed).tolist():
            del versions[gone]
        plan = made.plan(ids.astype(np.uint64), removed)
        made.begin(plan)
        made.step(plan, np.ones(2 * len(ids), np.float32), 1.0, version, 1, LR[0])
        versions |= dict.fromkeys(ids.tolist(), version)
        for since in (version - 1, max(0, version - 3)):
            copy = SlabCopy(made, since)
            while not copy.is_whole:
                copy.advance()
            found, values, at = copy.arrays()
            wanted = {id_: changed for id_, changed in versions.items() if changed > since}
            assert dict(zip(found.tolist(), at.tolist(), strict=True)) == wanted
            rows = np.empty_like(values)
            made.read(found, made.find(found), made.width, rows)
            np.testing.assert_array_equal(values, rows)
            assert len(made.groups_since(since)) <= len(wanted)


def test_sums_of_pushes_are_made_in_their_order() -> None:
    ids = np.array([3, 4, 9, 4, 9, 11], np.uint64)
    union, at = np.empty(6, np.uint64), np.empty(6, np.int64)
    assert kernels.merge(ids, np.array([0, 3, 3, 6]), union, at) == 4
    assert union[:4].tolist() == [3, 4, 9, 11]
    assert at.tolist() == [0, 1, 2, 1, 2, 3]
    assert len(NO_PLACES) == 0
