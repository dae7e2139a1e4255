"""Barriers under lost, doubled and late messages, dying workers and a shard that is killed."""

from pathlib import Path
from typing import Any

import pytest

from psserver.decisions.barriers import Barrier, Barriers
from psserver.decisions.shard import Job, Shard
from tests.sim.barrier_world import BarrierCluster, draw

SEEDS = 40


def first_failure(folder: Path) -> str:
    """Returns the message of the first seed that fails; empty if none does."""
    for seed in range(SEEDS):
        (folder / str(seed)).mkdir()
        try:
            BarrierCluster(draw(seed), folder / str(seed)).run()
        except AssertionError as problem:
            return f"seed {seed}: {problem}"
    return ""


def test_no_worker_passes_early_and_all_get_the_same_number(tmp_path: Path) -> None:
    assert not first_failure(tmp_path)
    cases = [draw(seed) for seed in range(SEEDS)]
    assert any(case.crashes_s for case in cases)
    assert any(dies_s is not None for case in cases for dies_s in case.dies_s)
    assert any(comes_s is not None for case in cases for comes_s in case.comes_s)


def test_a_round_that_opens_for_the_first_worker_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def opens(self: Barrier, expected: Any, *, is_short: bool = False) -> list[int]:
        self.is_open = True
        return []

    monkeypatch.setattr(Barrier, "missing", opens)
    assert "before workers" in first_failure(tmp_path)


def test_a_repeated_request_that_counts_for_the_next_round_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = Barriers.arrive

    def at_newest(
        self: Barriers, name: str, number: int, rank: int, value: float = 0.0, **options: bool
    ) -> Barrier | None:
        barrier = self.by_name.get(name)
        newest = number if barrier is None else max(number, barrier.number)
        return original(self, name, newest, rank, value, **options)

    monkeypatch.setattr(Barriers, "arrive", at_newest)
    assert first_failure(tmp_path)


def test_a_worker_that_comes_in_the_middle_of_a_change_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forgetting(self: Shard, job: Job, name: str, barrier: Barrier) -> str:
        barrier.holds = False
        return original(self, job, name, barrier)

    original = Shard.at_barrier
    monkeypatch.setattr(Shard, "at_barrier", forgetting)
    assert "came in a change" in first_failure(tmp_path)


def test_a_number_that_is_forgotten_after_the_round_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker whose answer was lost asks again when others are one round further."""
    original = Barriers.agreed

    def newest_only(self: Barriers, name: str, number: int) -> float:
        barrier = self.by_name[name]
        return original(self, name, number) if number == barrier.number else 0.0

    monkeypatch.setattr(Barriers, "agreed", newest_only)
    assert "round" in first_failure(tmp_path)
