"""Compressed pulls under reordering, drops, duplicates and deaths: one estimate for all workers.

Each pull is compared with the first one of that version, and each answer's fingerprint with
the worker's own; weights that are asked for themselves are compared with the history as always.
"""

from dataclasses import replace

import pytest

from pscore.compressors import parse_compressor
from pscore.rules import RULES
from pssim.faulty import simulate
from tests.sim.draws import draw

# Modes whose workers exchange models are in tests/paper/test_decentralised.py.
SERVED = sorted(name for name, rule in RULES.items() if not rule.gossip)

NUM_SEEDS = 8
COMPRESSORS = ("2bit", "topk(ratio=0.25)")


@pytest.mark.parametrize("name", SERVED)
def test_all_workers_hold_one_estimate(name: str) -> None:
    for seed in range(NUM_SEEDS):
        compressor = COMPRESSORS[seed % 2]
        # A shard that is killed begins with another estimate, which is right.
        pulls = parse_compressor(compressor)
        case = replace(draw(name, seed), pull_compressor=pulls, crashes=())
        try:
            simulate(case)
        except BaseException as problem:
            problem.add_note(f"\n{name}, seed {seed}, pulls by {compressor}")
            raise
