"""Jobs whose workers fail and are started again, in virtual time."""

from __future__ import annotations

import math

import pytest

from benchmarks import goodput


@pytest.mark.parametrize("name", [goodput.ROUNDS_MODE, goodput.PARALLEL_MODE])
def test_without_failures_almost_all_computing_counts(name: str) -> None:
    counted, failures = goodput.counted(name, 6, math.inf, 0.4)
    assert failures == 0
    assert counted == 6 * {goodput.ROUNDS_MODE: 4, goodput.PARALLEL_MODE: 22}[name]


@pytest.mark.slow
def test_failures_stop_a_mode_that_waits_for_all_and_not_rounds_with_a_quorum() -> None:
    kept = {}
    for name in (goodput.ROUNDS_MODE, goodput.PARALLEL_MODE):
        whole, _ = goodput.counted(name, 24, math.inf)
        found, failures = goodput.counted(name, 24, 1)
        assert failures > 5
        kept[name] = found / whole
    assert kept[goodput.ROUNDS_MODE] > 0.8
    assert kept[goodput.PARALLEL_MODE] < 0.7


def test_the_same_seed_has_the_same_failures() -> None:
    runs = [goodput.counted(goodput.ROUNDS_MODE, 12, 1, 0.5) for _ in range(2)]
    assert runs[0] == runs[1]
