"""The time that `mode="auto"` loses on traces of links and workers."""

import pytest

from benchmarks.regret import MOST, SHARDS, TRACES, regret


@pytest.mark.parametrize("risk", sorted(MOST))
@pytest.mark.parametrize("where", sorted(SHARDS))
@pytest.mark.parametrize("trace", sorted(TRACES))
def test_auto_loses_at_most_a_tenth_and_nothing_to_ssgd(trace: str, where: str, risk: str) -> None:
    found = regret(trace, where, risk)
    assert float(found["regret"]) <= 0.1
    assert float(found["behind_ssgd"]) <= 0.05
    assert int(found["switches"]) <= (1 if trace == "steady" else 4)
    assert found["replays"], "the log's changes, made again, are those modes at those steps"


@pytest.mark.slow
@pytest.mark.parametrize("where", sorted(SHARDS))
@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_where_rates_and_slow_workers_change_by_chance(seed: int, where: str) -> None:
    found = regret(str(seed), where, "any")
    assert float(found["regret"]) <= 0.1
    assert float(found["behind_ssgd"]) <= 0.05
