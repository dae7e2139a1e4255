"""Every rule with workers that come and go, in jobs that need some of them at a time.

The checks of a fixed number hold here too, and no step closes while there are too few.
"""

import pytest

from pscore.rules import RULES
from pssim.faulty import simulate
from tests.sim.draws import draw_elastic

# Modes whose workers exchange models are in tests/paper/test_decentralised.py.
SERVED = sorted(name for name, rule in RULES.items() if not rule.gossip)

NUM_SEEDS = 10


@pytest.mark.parametrize("name", SERVED)
def test_no_invariant_breaks(name: str) -> None:
    for seed in range(NUM_SEEDS):
        try:
            simulate(draw_elastic(name, seed))
        except BaseException as problem:
            problem.add_note(f"\nrun it again: python -m tests.sim elastic {name} {seed}")
            raise


def test_jobs_are_varied() -> None:
    """Some need all of their workers, some one; in some they join later, die or are cut off."""
    cases = [draw_elastic("ssgd", seed) for seed in range(NUM_SEEDS)]
    assert {case.num_workers - case.min_workers for case in cases} == {0, 1, 2, 3}
    assert any(any(case.comes_s) for case in cases)
    assert any(case.cuts for case in cases)
    assert any(case.crashes for case in cases)
