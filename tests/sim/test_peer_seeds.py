"""Workers that exchange models, under drops, repeats, reordering and kills, on any graph.

`make simulate` runs 10,000 of these seeds.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pscore.graphs import GRAPHS
from pssim import peer_case
from psworker.gossip.pairs import Pairs

SEEDS, PARTS = 160, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_of_exchanges_breaks(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        assert not peer_case.find_failure(seed)


def test_seeds_draw_all_modes_graphs_and_faults() -> None:
    cases = [peer_case.draw(seed) for seed in range(SEEDS)]
    found = {case.rule.exchange_name for case in cases}
    assert found == {"ring", "mixing", "pairs", "atomic"}
    graphs = {str(case.rule.arguments().get("graph")) for case in cases}
    assert graphs > set(GRAPHS)
    assert any("-" in graph for graph in graphs)
    assert {case.num for case in cases} == set(range(1, peer_case.NUM_MAX + 1))
    for told in (
        [bool(case.trouble.kills) for case in cases],
        [bool(case.trouble.lost) for case in cases],
        [bool(case.trouble.twice) for case in cases],
        [case.is_still for case in cases],
    ):
        assert set(told) == {False, True}


def still(gossip: str) -> peer_case.PeerCase:
    """Returns a case without gradients and without kills, over a bad network."""
    found = (peer_case.draw(seed) for seed in range(1000))
    return next(
        dataclasses.replace(case, is_still=True)
        for case in found
        if case.rule.exchange_name == gossip
        and not case.trouble.kills
        and case.num > 3
        and case.steps > 9
    )


def test_a_case_notices_a_sum_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_answer = Pairs.on_answer

    def forgets(self: Pairs, number: int, part: int, values: object) -> None:
        on_answer(self, number, part, None)

    monkeypatch.setattr(Pairs, "on_answer", forgets)
    with pytest.raises(AssertionError, match="the sum of the models has changed"):
        peer_case.check(still("pairs"))


def test_a_case_notices_a_graph_that_does_not_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(still("mixing"), mode="dpsgd(graph=complete)")
    peer_case.check(case)
    monkeypatch.setattr(peer_case, "_spread", lambda models: float(np.abs(models).max()) + 1.0)
    with pytest.raises(AssertionError, match="apart, at most"):
        peer_case.check(case)
