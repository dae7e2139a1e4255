"""Row slices from seeds: no difference between a job with faults and a calm one; mutants differ."""

from __future__ import annotations

from typing import Any

import pytest

from psserver.rows.policy import Oldest
from psserver.rows.store import RowStore
from psserver.rows.undo import Undo
from tests.sim.row_seeds import POLICIES, draw, simulate

SEEDS = 40


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_faults_change_no_bit(part: int) -> None:
    kills = 0
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        try:
            kills += simulate(seed)
        except BaseException as problem:
            problem.add_note(f"\nrun it again: python -m tests.sim.row_seeds {seed} {seed + 1}")
            raise
    assert kills > SEEDS


def test_every_policy_and_optimizer_is_drawn() -> None:
    cases = [draw(seed) for seed in range(4 * SEEDS)]
    tables = [(case.table.min_count, case.table.ttl, case.table.lru) for case in cases]
    assert len(set(tables)) == len(POLICIES)
    assert len({(case.optimizer, case.rule.name) for case in cases}) == 15


def no_removal(store: RowStore, *given: Any) -> Any:
    for policy in store.policies:
        policy.removes = False
    return ANSWER(store, *given)


ANSWER = RowStore.answer
MUTANTS: dict[str, tuple[type, str, Any]] = {
    "no row is kept before its block": (Undo, "keep", lambda *_: None),
    "nothing is undone": (Undo, "roll_back", lambda *_: False),
    "rows of a bucket are not counted": (Oldest, "note", lambda _: None),
    "rows that go do not count as changed": (RowStore, "answer", no_removal),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        sum(map(simulate, range(4 * SEEDS)))
