"""A row slice killed at any record or write of a step comes back with whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from pscore.rows.spec import LRU_MIN, RowTable
from pscore.rules import ASGD, SSGD
from pscore.rules.base import Rule
from psserver.rows import slab
from psserver.rows.mapped import PAGE
from psserver.rows.slab import Slab
from psserver.rows.undo import Undo
from psserver.slices.arena import Arena
from psserver.slices.journal import SliceJournal
from tests.row_driver import JOB, RowShards, crowded, row_spec

HYPER = np.array([[0.1, 0.9, 0.999, 1e-8, 0.0]])
TABLES = (
    ("a", 0, 2, RowTable(seed=1, init="uniform(1)")),
    ("b", 1 << 20, 3, RowTable(seed=2, init="normal(1)", max_rows=40)),
)
GOING = (
    ("a", 0, 2, RowTable(seed=1, init="uniform(1)", min_count=2, ttl=1)),
    ("b", 1 << 20, 3, RowTable(seed=2, init="normal(1)", lru=LRU_MIN)),
)
COUNTED = ("rows", "ids_waiting", "rows_removed", "gradients_dropped")
WORKERS, STEPS = 2, 2
ALL = [np.arange(60), crowded(2, 40, every=1024)]  # Of four buckets, with four rows each.


class KilledError(Exception):
    """The process is gone."""


def pushes() -> list[tuple[int, int]]:
    return [(step, worker) for step in range(STEPS) for worker in reversed(range(WORKERS))]


def push(shards: RowShards, step: int, worker: int) -> None:
    drawn = np.random.default_rng((step, worker))
    ids = [drawn.choice(60, 15, replace=False), drawn.choice(ALL[1], 9, replace=False)]
    grads = [drawn.standard_normal((15, 2)), drawn.standard_normal((9, 3))]
    shards.push(worker, step, ids, grads, HYPER, samples=1.0 + worker)


def trained(rule: Rule, folder: Path | None, tables: Any = TABLES) -> RowShards:
    shards = RowShards(row_spec(*tables, optimizer="sparse_adam", rule=rule), WORKERS, folder)
    shards.begin()
    return shards


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in memory, where journals lie by default: hundreds are made and removed there."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Death:
    """Kills the process before or after the n-th call of a method that changes a slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None  # Places where it may die, until it does.
        monkeypatch.setattr(slab, "BLOCK", 4)  # A kill falls between two blocks of a step too.
        changes = (SliceJournal, "commit"), (Slab, "begin"), (Slab, "step"), (Undo, "keep")
        for owner, name in changes:
            monkeypatch.setattr(owner, name, self.dying(getattr(owner, name)))

    def dying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.come_by()
            result = method(*args)
            self.come_by()
            return result

        return call

    def come_by(self) -> None:
        if self.left is not None:
            self.left -= self.left > 0
            if not self.left:
                raise KilledError


@pytest.mark.parametrize(
    ("rule", "tables"), [(SSGD(), TABLES), (ASGD(), TABLES), (SSGD(), GOING), (ASGD(), GOING)]
)
def test_killed_at_any_change(
    rule: Rule, tables: Any, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = trained(rule, None, tables)
    for step, worker in pushes():
        push(calm, step, worker)
    wanted = calm.pull(ALL, with_state=True)
    death, kills = Death(monkeypatch), 0
    for at in range(200):
        death.left = None
        shards = trained(rule, shared_memory / str(at), tables)
        death.left = at + 1
        pending = pushes()
        while pending:
            try:
                push(shards, *pending[0])
                pending.pop(0)
            except KilledError:
                kills += 1
                death.left = None
                shards.kill(0)  # The push is sent again: it may have been counted.
        for found, rows in zip(shards.pull(ALL, with_state=True), wanted, strict=True):
            np.testing.assert_array_equal(found, rows)
        assert shards.version == calm.version
        assert shards.stores()[0].counts.tolist() == calm.stores()[0].counts.tolist()
        held = [each.stores()[0].count_held() for each in (calm, shards)]
        assert all(held[0][name] == held[1][name] for name in COUNTED)
        shards.stores()[0].check_invariants()
        if death.left is not None:
            break
    assert kills == at > 5


def test_rows_kept_for_an_undo_count_only_for_the_step_that_has_not_ended(tmp_path: Path) -> None:
    """The area holds whatever the last steps have left; it may be scribbled over."""
    shards = trained(SSGD(), tmp_path)
    for step, worker in pushes():
        push(shards, step, worker)
    wanted = shards.pull(ALL, with_state=True)
    (path,) = tmp_path.glob("*/*/*.undo")
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"\xab" * 4096)
    shards.kill(0)
    for found, rows in zip(shards.pull(ALL, with_state=True), wanted, strict=True):
        np.testing.assert_array_equal(found, rows)


def test_pushes_of_an_open_step_outlive_the_process(tmp_path: Path) -> None:
    calm, shards = trained(SSGD(), None), trained(SSGD(), tmp_path)
    for each in (calm, shards):
        push(each, 0, 1)  # Held: rank 0 comes later.
    shards.kill(0)
    for each in (calm, shards):
        push(each, 0, 0)
    assert shards.version == 1
    for found, rows in zip(shards.pull(ALL), calm.pull(ALL), strict=True):
        np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("ending", ["rows", "waiting", "undo"])
def test_a_job_whose_rows_are_missing_is_lost_and_does_not_begin_again_without_them(
    tmp_path: Path, ending: str
) -> None:
    shards = trained(SSGD(), tmp_path, GOING)
    for step, worker in pushes():
        push(shards, step, worker)
    next(tmp_path.glob(f"*/*/*.{ending}")).unlink()
    with pytest.raises(AssertionError):
        shards.kill(0)
    ((name, reason),) = shards.engines[0].shard.lifetimes.lost.values()
    assert name == JOB
    assert ending in reason


@pytest.mark.parametrize("length", [0, PAGE, 2 * PAGE])
def test_a_shard_killed_while_it_makes_the_files_of_a_table_makes_them_again(
    tmp_path: Path, length: int
) -> None:
    """Such a file has no header yet, and may be of any length."""
    spec = row_spec(*TABLES, optimizer="sparse_adam", rule=SSGD())
    calm, shards = trained(SSGD(), None), RowShards(spec, WORKERS, tmp_path)
    for path in tmp_path.glob("*/*/*.rows"):
        path.write_bytes(bytes(length))
    shards.kill(0)
    shards.begin()
    for step, worker in pushes():
        for each in (calm, shards):
            push(each, step, worker)
    for found, rows in zip(shards.pull(ALL), calm.pull(ALL), strict=True):
        np.testing.assert_array_equal(found, rows)


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("part", "rule"), [("held", SSGD()), ("open", SSGD()), ("undo", SSGD()), ("undo", ASGD())]
)
def test_a_slice_is_journalled_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, part: str
) -> None:
    """The disk is full from the first push on, and free again some pushes later."""
    sent = pushes() if part == "held" else sorted(pushes())  # Rank 0 is never held.
    calm = trained(rule, None)
    for step, worker in sent:
        push(calm, step, worker)
    wanted, returns = calm.pull(ALL, with_state=True), []
    for free_from in range(1, len(sent)):
        shards = trained(rule, tmp_path / str(free_from))
        table = shards.engines[0].jobs[JOB].tables[0]
        with monkeypatch.context() as patch:
            if part != "undo":
                patch.setattr(Arena, "allocate", full)
                patch.setattr(Arena, "reserve", full)
            else:
                patch.setattr(Undo, "reserve", full)
            for step, worker in sent[:free_from]:
                push(shards, step, worker)
                table.journal_again()
            was_off = table.num_exposed == 1
        table.journal_again()
        if was_off and table.num_exposed:
            journal = shards.stores()[0].journal
            assert journal is not None
            assert journal.record.held, "only a payload that is held may stay on the heap"
            continue
        returns.append(was_off)
        for each in sent[free_from:-1]:
            push(shards, *each)
        shards.kill(0)
        push(shards, *sent[-1])
        for found, rows in zip(shards.pull(ALL, with_state=True), wanted, strict=True):
            np.testing.assert_array_equal(found, rows)
    assert any(returns)
