"""Machines that hand a shard to each other keep all that was answered, if one is lost or cut."""

import pytest

from tests.sim.standby_world import MUTANTS, PLACES_MUTANTS, find_failure

KINDS = pytest.mark.parametrize("has_places", [False, True], ids=["any machine", "two places"])


@KINDS
def test_no_seed_loses_an_answer(has_places: bool) -> None:
    failures = [find_failure(seed, has_places=has_places) for seed in range(500)]
    assert [found for found in failures if found] == []


@pytest.mark.slow
@KINDS
def test_no_seed_of_ten_thousand_loses_an_answer(has_places: bool) -> None:
    failures = [find_failure(seed, has_places=has_places) for seed in range(10_000)]
    assert [found for found in failures if found] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str) -> None:
    assert any(find_failure(seed, mutant) for seed in range(4000))


@pytest.mark.parametrize("mutant", PLACES_MUTANTS)
def test_a_mutant_of_two_places_is_noticed(mutant: str) -> None:
    assert any(find_failure(seed, mutant, has_places=True) for seed in range(4000))
