"""A job that is somewhere is not set back, and one that is nowhere is restored."""

from pathlib import Path

import pytest

from tests.sim.mending_world import MUTANTS, find_failure


def test_no_seed_sets_a_job_back_that_is_there(tmp_path: Path) -> None:
    failures = [find_failure(seed, tmp_path) for seed in range(300)]
    assert [found for found in failures if found] == []


@pytest.mark.slow
def test_no_seed_of_ten_thousand_sets_a_job_back_that_is_there(tmp_path: Path) -> None:
    failures = [find_failure(seed, tmp_path) for seed in range(10_000)]
    assert [found for found in failures if found] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, tmp_path: Path) -> None:
    assert any(find_failure(seed, tmp_path, mutant) for seed in range(4000))
