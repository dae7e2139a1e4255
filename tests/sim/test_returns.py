"""Most workers die in the middle of a step and come back: nobody waits in vain for the rest of it.

The pushes of a worker's last step differ from slice to slice, and so do the versions that
it finds when it returns. Were its steps numbered slice by slice from there, two that have come back
could wait for each other, each for a slice of which the other is a step ahead.
"""

import random
from dataclasses import replace

import pytest

from pssim.faulty import simulate
from tests.sim.draws import draw

SEEDS = 12
# Seeds in which workers waited for each other when each slice had a step of its own.
WAITED = {"ssgd": (65, 95, 224), "ssd": (10, 95, 109, 164), "local": (67,)}


@pytest.mark.parametrize("name", sorted(WAITED))
def test_workers_that_came_back_do_not_wait_for_each_other(name: str) -> None:
    for seed in (*range(SEEDS), *WAITED[name]):
        rng, case = random.Random(seed), draw(name, seed)
        dies_s = tuple(rng.uniform(0.0, 1.2) if rng.random() < 0.6 else None for _ in case.steps)
        back_s = tuple(rng.uniform(0.1, 0.6) if rng.random() < 0.9 else None for _ in case.steps)
        faults = replace(case.faults, drop_first=0.0)  # As when the seeds were found.
        simulate(replace(case, dies_s=dies_s, back_s=back_s, faults=faults))
