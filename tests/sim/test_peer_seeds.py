"""Workers that exchange models, under drops, repeats, reordering, kills and cuts, on any graph.

`make simulate` runs 10,000 of these seeds.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from pscore.graphs import GRAPHS
from pscore.rules import parse_mode
from pssim.peers import DIRECTORY, HEARTBEAT_S, LEASE_S, TIMEOUT_S, PeerWorld, Trouble
from psworker.gossip.pairs import Pairs
from tests.sim import peer_cases

SEEDS, PARTS = 160, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_of_exchanges_breaks(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        assert not peer_cases.find_failure(seed)


def test_seeds_draw_all_modes_graphs_and_faults() -> None:
    cases = [peer_cases.draw(seed) for seed in range(SEEDS)]
    found = {case.rule.exchange_name for case in cases}
    assert found == {"ring", "collective", "mixing", "pairs", "atomic", "push_sum"}
    graphs = {str(case.rule.arguments().get("graph")) for case in cases}
    assert graphs > set(GRAPHS)
    assert any("-" in graph for graph in graphs)
    assert {case.num for case in cases} == set(range(1, peer_cases.NUM_MAX + 1))
    for told in (
        [bool(case.trouble.kills) for case in cases],
        [bool(case.trouble.lost) for case in cases],
        [bool(case.trouble.twice) for case in cases],
        [bool(case.trouble.cuts) for case in cases],
        [case.min_workers > 0 for case in cases],
        [case.is_still for case in cases],
    ):
        assert set(told) == {False, True}


def still(gossip: str) -> peer_cases.PeerCase:
    """Returns a case without gradients and without kills, over a bad network."""
    found = (peer_cases.draw(seed) for seed in range(1000))
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
        peer_cases.check(still("pairs"))


def test_a_case_notices_a_graph_that_does_not_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(still("mixing"), mode="dpsgd(graph=complete)")
    peer_cases.check(case)
    monkeypatch.setattr(peer_cases, "_spread", lambda models: float(np.abs(models).max()) + 1.0)
    with pytest.raises(AssertionError, match="apart, at most"):
        peer_cases.check(case)


def test_a_worker_that_parts_stays_until_the_others_have_its_last_result() -> None:
    """Rank 3 dies in the only round; others end it, and rank 0 dies while they pass it on."""
    trouble = Trouble(lost=0.3, kills={0: 2.286260695230574, 3: 1.9851325088759406})
    case = peer_cases.PeerCase(
        seed=3226,
        mode="allreduce(order=ranks)",
        num=6,
        steps=1,
        is_still=False,
        trouble=trouble,
        compute_s=(0.02, 0.13, 0.02, 0.13, 0.1, 0.02),
        latency_s=0.4,
    )
    peer_cases.check(case)


def test_a_worker_parts_while_all_others_die() -> None:
    """Seed 5769: it had left at a meeting, and nobody was there for the next one."""
    case = peer_cases.PeerCase(
        seed=5769,
        mode="dpsgd(graph='exp_static', order=awc)",
        num=3,
        steps=3,
        is_still=False,
        trouble=Trouble(kills={2: 2.589320044157584, 0: 1.6555244252057109}),
        compute_s=(0.5, 0.02, 0.5),
        latency_s=0.05,
    )
    peer_cases.check(case)


def longest_wait(mode: str, seed: int, gap_s: float) -> float:
    """Returns the longest step of the others while 4 of 8 workers die, one after the other."""
    world = PeerWorld(
        parse_mode(mode),  # type: ignore[arg-type]
        lambda rank, step, weights: np.ones_like(weights),
        np.zeros(5, np.float32),
        num_workers=8,
        steps=80,
        lr=0.01,
        seed=seed,
        trouble=Trouble(kills={rank: 2.0 + gap_s * rank for rank in range(4)}),
    ).run()
    living = [worker for worker in world.workers if not worker.is_dead]
    return max(float(np.diff(worker.finished_s).max()) for worker in living)


@pytest.mark.parametrize("mode", ["allreduce", "dpsgd(graph=ring)", "sgp", "adpsgd"])
def test_nobody_waits_longer_than_a_lease_from_the_last_of_a_chain_of_deaths(mode: str) -> None:
    gap_s = 0.9 * LEASE_S  # Each dies before the one before it is known to be lost.
    found = [longest_wait(mode, seed, gap_s) for seed in range(3)]
    if mode == "adpsgd":
        assert max(found) < LEASE_S / 2
    else:
        assert 3 * gap_s < min(found)
        assert max(found) < 3 * gap_s + LEASE_S + 4 * HEARTBEAT_S


MODES = ["allreduce", "dpsgd(graph=ring)", "sgp", "adpsgd", "adpsgd(exchange=atomic)"]
STEPS, CUT_S = 60, 2.0


def world_of(mode: str, num: int, trouble: Trouble, min_workers: int = 0) -> PeerWorld:
    """Returns a run of workers whose models come together, and do nothing else."""
    rng = np.random.default_rng(1)
    starts = [rng.normal(size=3).astype(np.float32) for _ in range(num)]
    starts = starts[:1] * num if mode == "allreduce" else starts
    return PeerWorld(
        parse_mode(mode),  # type: ignore[arg-type]
        lambda rank, step, weights: np.zeros_like(weights),
        starts[0],
        num_workers=num,
        steps=STEPS,
        lr=0.1,
        trouble=trouble,
        starts=starts,
        min_workers=min_workers,
    ).run()


def apart(away: list[int], there: list[int]) -> dict[tuple[int, int], float]:
    """Returns the cuts of a partition, with the directory beside `there`."""
    pairs = [*itertools.product(away, there), *itertools.product(there, away)]
    return dict.fromkeys([*pairs, *((one, DIRECTORY) for one in away)], CUT_S)


@pytest.mark.parametrize("mode", MODES)
def test_a_part_with_too_few_workers_stops_and_the_other_one_continues(mode: str) -> None:
    found = world_of(mode, 5, Trouble(cuts=apart([1, 4], [0, 2, 3])), min_workers=3).workers
    assert [worker.has_ended for worker in found] == [True, False, True, True, False]
    for away in (found[1], found[4]):
        assert 0 < away.gossip.number < STEPS
        assert away.finished_s[-1] < CUT_S + 2.5 * LEASE_S  # An answer is awaited for a lease.


def test_where_the_larger_part_does_not_reach_the_directory_the_smaller_one_stops() -> None:
    found = world_of("adpsgd", 5, Trouble(cuts=apart([0, 2, 3], [1, 4])), min_workers=3).workers
    assert [worker.gossip.number == STEPS for worker in found] == [True, False, True, True, False]
    assert all(worker.finished_s[-1] < CUT_S + 2.5 * LEASE_S for worker in (found[1], found[4]))


@pytest.mark.parametrize("mode", MODES)
def test_workers_stop_while_the_job_has_fewer_than_its_least(mode: str) -> None:
    found = world_of(mode, 4, Trouble(kills={1: CUT_S, 3: CUT_S}), min_workers=3).workers
    for worker in (found[0], found[2]):
        assert worker.is_stopped
        assert worker.finished_s[-1] < CUT_S + 2.5 * LEASE_S


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [(0, 2), (2, 0)])
def test_of_a_link_of_one_way_at_most_the_worker_that_cannot_send_ends(
    mode: str, cut: tuple[int, int]
) -> None:
    """Worker 1 reaches both, and is reached by both."""
    found = world_of(mode, 3, Trouble(cuts={cut: CUT_S}))
    ended = [worker.rank for worker in found.workers if not worker.has_ended]
    depends = not mode.startswith("adpsgd")
    assert ended in ([], [cut[0]] if depends else [])
    others = [worker for worker in found.workers if worker.has_ended]
    slowest = max(float(np.diff(worker.finished_s).max()) for worker in others)
    assert slowest < (2 * (TIMEOUT_S + 2 * LEASE_S) + LEASE_S + 1.0 if depends else 2 * LEASE_S)
    if mode == "adpsgd":
        assert len({worker.rank for worker in others}) == 3
        final = np.stack([found.model(worker) for worker in others])
        assert np.ptp(final, axis=0).max() < 1e-2, "they have not come together over worker 1"
