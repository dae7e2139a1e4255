"""Bounds are kept, and reached: a fast worker really runs ahead of a slow one, and no further."""

import pytest

from pscore.rules import CD, OD, SSD, SSGD, SSP
from pscore.rules.base import Rule
from pssim.case import Case
from pssim.faulty import Outcome, simulate
from pssim.network import MessageFaults


def with_slow_worker(rule: Rule, steps: int = 8) -> Outcome:
    """Two workers, of which one is thirty times slower."""
    return simulate(
        Case(
            seed=1,
            rule=rule,
            num_shards=2,
            steps=(steps, steps),
            compute_s=(0.03, 0.9),
            dies_s=(None, None),
            back_s=(None, None),
            samples=(1.0, 1.0),
            faults=MessageFaults(delay_s_max=0.005),
        )
    )


@pytest.mark.parametrize(
    ("rule", "lead"),
    [
        (SSGD(), 0),
        (OD(warmup=0, local="sgd"), 0),
        (CD(warmup=0, local="sgd"), 0),
        (SSD(steps=1, warmup=0, local="sgd"), 0),
        (SSD(steps=2, warmup=0, local="sgd"), 1),
        (SSD(steps=3, warmup=0, local="sgd"), 2),
        (SSD(steps=5, warmup=0, local="mirror", spread=1), 4),
        (SSD(steps=5, warmup=0, local="mirror"), 3),
    ],
    ids=str,
)
def test_a_fast_worker_is_as_many_steps_ahead_as_its_mode_allows(rule: Rule, lead: int) -> None:
    outcome = with_slow_worker(rule)
    assert outcome.lead_max == lead
    assert lead <= rule.steps_open() - 1


@pytest.mark.parametrize("bound", [1, 2, 3, 5])
def test_ssp_lets_a_worker_be_the_bound_ahead(bound: int) -> None:
    """It reads at clock c as soon as the slowest has c - bound, and then pushes one more."""
    assert with_slow_worker(SSP(bound=bound)).ahead_max == bound + 1


def test_without_a_bound_nobody_waits() -> None:
    assert with_slow_worker(SSP(bound=-1)).ahead_max == 8
