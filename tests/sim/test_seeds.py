"""Every rule under reordering, duplicates, drops, cuts, slow, leaving, dying and returning workers.

A seed that fails is printed with the command that runs it again and shows every message.
"""

import pytest

from pscore.rules import RULES
from pssim.faulty import simulate
from tests.sim.draws import CHOICES, draw

# Modes whose workers exchange models are in tests/paper/test_decentralised.py.
SERVED = sorted(name for name, rule in RULES.items() if not rule.gossip)

SEEDS_PER_TEST = 16
TESTS_PER_RULE = 2  # With eleven rules, 352 seeds; `make simulate` runs 10,000 and more.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, TESTS_PER_RULE))]


def test_every_rule_is_simulated() -> None:
    """The parameters below come from the registry; at least 350 seeds in all."""
    assert len(SERVED) * SEEDS_PER_TEST * TESTS_PER_RULE >= 350


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", SERVED)
def test_no_invariant_breaks(name: str, part: int) -> None:
    for seed in range(part * SEEDS_PER_TEST, (part + 1) * SEEDS_PER_TEST):
        try:
            simulate(draw(name, seed))
        except BaseException as problem:
            problem.add_note(f"\nrun it again: python -m tests.sim run {name} {seed}")
            raise


@pytest.mark.parametrize("name", SERVED)
def test_arguments_are_varied(name: str) -> None:
    """Each argument that `CHOICES` knows takes all of its values in some seed, if it can."""
    rules = [draw(name, seed).rule for seed in range(SEEDS_PER_TEST * TESTS_PER_RULE)]
    for argument in rules[0].arguments():
        if argument in CHOICES:
            assert len({getattr(rule, argument) for rule in rules}) > 1, argument
