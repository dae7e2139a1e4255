"""Cases of the simulator, drawn from a seed.

The modes come from the registry, and their arguments from the names of their fields, so that a new
rule is covered as soon as it is registered.
"""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pscore.compressors import COMPRESSORS
from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from pscore.local import LOCAL_UPDATES
from pscore.overlaps import OVERLAPS
from pscore.rules import RULES
from pscore.rules.base import Rule
from pssim.case import HALF, RAW, Case
from pssim.network import Cut, MessageFaults

WORKERS_MAX = 4
SAMPLES = (1.0, 2.0)
SELDOM, SOMETIMES, MOSTLY, USUALLY = 0.12, 0.3, 0.7, 0.8  # Probabilities.

# Values tried for a field of this name in every rule; other fields keep their defaults.
CHOICES: dict[str, Sequence[Any]] = {
    "activation": (0.0, 0.25),
    "adaptive": (False, True),
    "backup": (0, 1, 2),
    "bound": (-1, 0, 1, 2, 3),
    "control": (0.0, 1.0),
    "correction": ("raw", "flush"),
    "every": (0, 1, 2),
    "fragments": (1, 2, 3),
    "delay": (-1, 0, 1, 2, 5),
    "local": (*sorted(LOCAL_UPDATES), "none"),
    "mirror": ("exact", "kept"),
    "outer_lr": (1.0, 0.5),
    "outer_momentum": (0.0, 0.9),
    "slow_momentum": (0.0, 0.5),
    "overlap": ("none", *sorted(OVERLAPS)),
    "quorum": (0, 0, 1, 2),
    "splits": (1, 2, 3),
    "pattern": ("sequential", "strided"),
    "spread": (0, 1, 2, 5),
    "steps": (1, 2, 3, 5),
    "steps_min": (0, 0, 1, 2),
    "warmup": (0, 1, 3),
    "window": (-1.0, -1.0, 0.0, 0.3),
}


def draw(name: str, seed: int) -> Case:
    """Returns the case of rule `name` and this seed."""
    rng = random.Random(f"{name} {seed}")
    num_workers = rng.randint(1, WORKERS_MAX)
    longest = rng.randint(3, 6)
    rule = draw_rule(name, num_workers, rng)
    slowest = rng.choice((1.0, 1.0, 5.0, 20.0))
    num_shards = rng.randint(1, 3)
    return Case(
        seed=seed,
        rule=rule,
        compressor=draw_compressor(rule, rng),
        num_shards=num_shards,
        steps=tuple(
            longest if rng.random() < MOSTLY else rng.randint(1, longest)
            for _ in range(num_workers)
        ),
        compute_s=tuple(
            rng.uniform(0.02, 0.2) * (slowest if rank == num_workers - 1 else 1.0)
            for rank in range(num_workers)
        ),
        dies_s=tuple(
            rng.uniform(0.0, 1.5) if rng.random() < SELDOM else None for _ in range(num_workers)
        ),
        back_s=tuple(
            rng.uniform(0.1, 6.0) if rng.random() < HALF else None for _ in range(num_workers)
        ),
        samples=tuple(rng.choice(SAMPLES) for _ in range(num_workers)),
        faults=MessageFaults(
            drop=rng.choice((0.0, 0.05, 0.2)),
            drop_first=random.Random(f"first {name} {seed}").choice((0.0, 0.1, 0.3)),
            duplicate=rng.choice((0.0, 0.1, 0.3)),
            delay_s_max=rng.choice((0.01, 0.1, 0.4)),
            until_s=rng.uniform(1.0, 8.0),
        ),
        cuts=tuple(draw_cut(num_workers, num_shards, rng) for _ in range(rng.choice((0, 0, 1)))),
        crashes=tuple(
            (rng.randrange(num_shards), rng.uniform(0.0, 3.0))
            for _ in range(rng.choice((0, 0, 1, 4)))
        ),
        shares=draw_shares(num_workers, rng),
    )


def draw_elastic(name: str, seed: int) -> Case:
    """Returns a case like `draw`'s whose workers come and go, and which needs some at a time.

    Rank 0 stays until all have come: a job without workers is over. As many as the job
    needs come back whenever they die, and so does who is lost.
    """
    rng, case = random.Random(f"elastic {name} {seed}"), draw(name, seed)
    num_workers = rng.randint(2, WORKERS_MAX)
    steps = tuple(rng.randint(2, 6) for _ in range(num_workers))
    dies_s = tuple(
        rng.uniform(0.0, 1.5) if rank and rng.random() < SOMETIMES else None
        for rank in range(num_workers)
    )
    back_s = tuple(
        rng.uniform(0.1, 6.0) if rng.random() < MOSTLY else None for _ in range(num_workers)
    )
    ends = sum(die is None or back is not None for die, back in zip(dies_s, back_s, strict=True))
    least = rng.randint(1, ends)
    rule = draw_rule(name, least, rng)
    return replace(
        case,
        rule=rule,
        compressor=draw_compressor(rule, rng),
        min_workers=least,
        steps=steps,
        compute_s=tuple(rng.uniform(0.02, 0.3) for _ in steps),
        comes_s=(0.0, *(rng.choice((0.0, rng.uniform(0.0, 3.0))) for _ in steps[1:])),
        dies_s=dies_s,
        back_s=back_s,
        samples=tuple(rng.choice(SAMPLES) for _ in steps),
        shares=draw_shares(num_workers, rng),
        cuts=tuple(
            replace(cut, worker=rng.randrange(1, num_workers), shard=None) for cut in case.cuts
        ),
    )


def draw_shares(num_workers: int, rng: random.Random) -> tuple[bool, ...]:
    """Returns which workers are on the shards' host: none, all, or some."""
    share = rng.choice((0.0, 0.5, 1.0))
    return tuple(rng.random() < share for _ in range(num_workers))


def draw_cut(num_workers: int, num_shards: int, rng: random.Random) -> Cut:
    """Returns a cut between one worker and one shard, or all; it may outlast a lease."""
    from_s = rng.uniform(0.0, 3.0)
    return Cut(
        worker=rng.randrange(num_workers),
        shard=rng.choice((None, *range(num_shards))),
        from_s=from_s,
        until_s=from_s + rng.uniform(0.5, 6.0),
    )


def draw_rule(name: str, num_workers: int, rng: random.Random) -> Rule:
    """Returns the rule with random arguments that it accepts."""
    while True:
        arguments = {
            item.name: rng.choice(CHOICES[item.name])
            for item in fields(RULES[name])
            if item.name in CHOICES
        }
        try:
            rule = RULES[name](**arguments)
            rule.require_workers(num_workers)
        except ConfigError:
            continue
        return rule


def draw_compressor(rule: Rule, rng: random.Random) -> Compressor:
    """Returns none mostly; any for a rule that does not look into gradients."""
    if rng.random() < USUALLY or rule.compensates:
        return RAW
    return COMPRESSORS[rng.choice(sorted(COMPRESSORS))]()
