"""Machines that hand a shard to each other keep all that was answered, if one is lost or cut."""

import pytest

from tests.sim.standby_world import MUTANTS, find_failure


def test_no_seed_loses_an_answer() -> None:
    assert [found for seed in range(1000) if (found := find_failure(seed))] == []


@pytest.mark.slow
def test_no_seed_of_ten_thousand_loses_an_answer() -> None:
    assert [found for seed in range(10_000) if (found := find_failure(seed))] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str) -> None:
    assert any(find_failure(seed, mutant) for seed in range(4000))
