"""The time that `mode="auto"` loses on six traces of links and workers."""

import pytest

from benchmarks.regret import SHARDS, TRACES, regret


@pytest.mark.parametrize("risk", ["none", "low"])
@pytest.mark.parametrize("where", sorted(SHARDS))
@pytest.mark.parametrize("trace", sorted(TRACES))
def test_auto_loses_at_most_a_tenth_and_nothing_to_ssgd(trace: str, where: str, risk: str) -> None:
    found = regret(trace, where, risk)
    assert float(found["regret"]) <= 0.1
    assert float(found["behind_ssgd"]) <= 0.05
    assert int(found["switches"]) <= 1
