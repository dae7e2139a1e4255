"""Rounds with a quorum on a faulty network: late learners, kills and crashes of shards."""

from dataclasses import replace

import pytest

from pscore.rules import DiLoCo, LocalSGD
from pssim.case import SHAPES, Case
from pssim.faulty import simulate
from pssim.network import MessageFaults
from tests.sim.draws import draw_elastic

SEEDS = 6


def case(seed: int, window: float, **changes: object) -> Case:
    """Four learners: one at half the speed, one that dies and returns; two kills of shards."""
    rule = LocalSGD(steps=2, quorum=2, window=window)
    settings: dict[str, object] = {
        "seed": seed,
        "rule": rule,
        "num_shards": 2,
        "steps": (8, 8, 8, 4),
        "compute_s": (0.1, 0.1, 0.1, 0.2),
        "dies_s": (None, None, 0.5, None),
        "back_s": (None, None, 0.4, None),
        "samples": (1.0, 2.0, 1.0, 2.0),
        "faults": MessageFaults(drop=0.1, duplicate=0.1, delay_s_max=0.02, until_s=30.0),
        "crashes": ((0, 0.6), (1, 0.9)),
        "shapes": SHAPES,
    }
    return Case(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "fragments"), [(-1.0, 1), (0.0, 1), (0.1, 1), (-1.0, 2), (0.1, 2)]
)
def test_every_move_counts_once_whoever_is_late_or_dies(window: float, fragments: int) -> None:
    late = 0
    rule = LocalSGD(steps=2, quorum=2, window=window, fragments=fragments)
    for seed in range(SEEDS):
        outcome = simulate(case(seed, window, rule=rule))
        for book in outcome.ledger.books.values():
            late += sum(version > step + 1 for (_, step, _), version in book.entered.items())
    assert late > 0


def test_a_newcomer_does_not_wait_for_a_slice_that_is_a_round_behind() -> None:
    """Moves that come late close a round of their slices alone; then all leave but an idle one."""
    for seed in (383, *range(SEEDS)):
        outcome = simulate(replace(draw_elastic("local", 383), seed=seed))
        assert all(worker.is_over for worker in outcome.workers)


def test_a_learner_that_never_returns_stops_nobody() -> None:
    """Its lease is 3 s; the others make their rounds meanwhile."""
    dead = case(
        1,
        0.1,
        rule=DiLoCo(steps=2, quorum=2, window=0.1),
        back_s=(None,) * 4,
        crashes=(),
        faults=MessageFaults(delay_s_max=0.01),
    )
    outcome = simulate(dead)
    updates = [event for event in outcome.events if event.what.name == "UPDATED"]
    assert len([event for event in updates if 0.7 < event.time_s < 2.0]) > 0
