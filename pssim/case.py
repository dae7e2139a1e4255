"""A simulated job, its faults and its mode, all drawn from one seed.

The modes come from the registry, and their arguments from the names of their fields, so that a new
rule is covered as soon as it is registered.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pscore.compressors import COMPRESSORS
from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.local import LOCAL_UPDATES
from pscore.overlaps import OVERLAPS, Overlap
from pscore.rules import RULES
from pscore.rules.base import Rule
from pssim.network import NO_FAULTS, Cut, MessageFaults

STEPS_MAX = 8
WORKERS_MAX = 4
RAW = NoCompression()
NUMEL = 64  # Elements of a slice: one element for each worker and step, and more.
ONE_SLICE = ((NUMEL,),)
TWO_SLICES = ((NUMEL,), (NUMEL,))
# Four slices: with two segments, with one, with parts of two tensors, and the rest of a tensor.
SHAPES = ((96,), (4, 8), (64,), (16,), (48,))
GRADIENT = 5040.0  # Divided by every number of samples up to ten it is a whole number.
SAMPLES = (1.0, 2.0)
SELDOM, SOMETIMES, HALF, MOSTLY, USUALLY = 0.12, 0.3, 0.5, 0.7, 0.8  # Probabilities.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated job."""

    seed: int  # Seed of the network.
    rule: Rule
    compressor: Compressor = RAW
    pull_compressor: Compressor = RAW
    num_shards: int = 2
    steps: tuple[int, ...]  # Steps of each worker; one with fewer leaves early.
    compute_s: tuple[float, ...]  # Computing time of each worker and step.
    begins_s: float = 0.0  # No worker computes before.
    is_steady: bool = False  # Steps take exactly that, not half of it to one and a half.
    dies_s: tuple[float | None, ...]  # When each worker falls silent, after its first step began.
    back_s: tuple[float | None, ...]  # How long after that it is started again.
    samples: tuple[float, ...]
    faults: MessageFaults = NO_FAULTS
    cuts: tuple[Cut, ...] = ()
    crashes: tuple[tuple[int, float], ...] = ()  # Which shard is killed, and when in seconds.
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    min_workers: int = 0  # Minimum of an elastic job.
    comes_s: tuple[float, ...] = ()  # When each worker starts; empty: all at once.
    shares: tuple[bool, ...] = ()  # Whether a worker's gradients are in memory that the shards map.
    captures_s: tuple[float, ...] = ()  # When a checkpoint of all shards is begun.
    quadratic: bool = False  # Gradients depend on the weights; else each has an element of its own.

    @property
    def has_units(self) -> bool:
        """Whether what each push moves can be read from its own element of the weights."""
        local = self.rule.local_update()
        return not (self.quadratic or (isinstance(local, Overlap) and local.mixes))

    @property
    def num_workers(self) -> int:
        """Workers that take part at some time."""
        return len(self.steps)

    def __str__(self) -> str:
        return f"{self.rule}, {self.compressor}, {self.num_workers}x{self.num_shards}"


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
