"""One case of workers that exchange models: its members, mode and faults, drawn from a seed.

`check` runs it and raises an AssertionError that names what broke. In half of the cases no worker
changes its model by itself: then a graph must bring all together at least by its spectral gap, and
exchanges of pairs and push-sum must keep the sum of all models. In every case all living workers
must come to their end, no exchange may be applied twice, and all-reduce must leave the same bits.
Atomic exchanges are drawn with any number of workers and any graph, as after deaths.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pscore.graphs import GRAPHS, graph_of
from pscore.rules import parse_mode
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from pssim.peers import DIRECTORY, LEASE_S, PeersStuckError, PeerWorld, Trouble
from psworker.gossip.push_sum import PushSum

Array = npt.NDArray[np.float64]
NUMEL, LR = 5, 0.1
NUM_MAX, STEPS_MAX = 9, 25
TOLERANCE = 1e-4  # Relative; float32 rounds some hundred times.


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCase:
    """A drawn case."""

    seed: int
    mode: str  # As `mode=` takes it.
    num: int  # Workers.
    steps: int  # Steps of each.
    is_still: bool  # Whether gradients are 0.
    trouble: Trouble  # Faults of the network, and kills.
    compute_s: tuple[float, ...]  # Seconds of each worker's gradient.
    latency_s: float  # Longest time of a message.
    min_workers: int = 0  # Least number of workers of an elastic job; 0: it is not elastic.

    @property
    def rule(self) -> Decentralised:
        """The mode."""
        rule = parse_mode(self.mode)
        assert isinstance(rule, Decentralised)
        return rule


def draw(seed: int) -> PeerCase:
    """Returns the case of a seed."""
    rng = random.Random(seed)
    num = rng.randint(1, NUM_MAX)
    kills = {}
    if rng.choice((False, True)):
        for rank in rng.sample(range(num), min(num - 1, rng.randint(0, 2))):
            kills[rank] = rng.uniform(0.0, 3.0)
    trouble = Trouble(
        lost=rng.choice((0.0, 0.1, 0.3)), twice=rng.choice((0.0, 0.1, 0.3)), kills=kills
    )
    case = PeerCase(
        seed=seed,
        mode=_mode(rng, num),
        num=num,
        steps=rng.randint(1, STEPS_MAX),
        is_still=rng.choice((False, True)),
        trouble=trouble,
        compute_s=tuple(rng.choice((0.02, 0.1, 0.13, 0.5)) for _ in range(num)),
        latency_s=rng.choice((0.01, 0.05, 0.4)),
    )
    # torch.distributed, which is not simulated, has limits of its own for workers that are apart.
    return case if kills or case.rule.exchange_name == "collective" else _cut(case, rng)


def _cut(case: PeerCase, rng: random.Random) -> PeerCase:
    """Returns a case, perhaps with a cut: of one or both ways of a pair, or around some workers."""
    kind, cuts = rng.choice(("", "", "one way", "both ways", "partition")), {}
    ranks, when_s = rng.sample(range(case.num), case.num), rng.uniform(0.0, 3.0)
    least = case.min_workers
    if kind and case.num > 1:
        one, other = ranks[:2]
        cuts[one, other] = when_s
        if kind == "both ways":
            cuts[other, one] = when_s
    if kind == "partition" and case.num > 1:
        least = case.num // 2 + 1
        away, there = ranks[least:], ranks[:least]
        cuts = {(one, DIRECTORY): when_s for one in away}
        pairs = itertools.chain(itertools.product(away, there), itertools.product(there, away))
        cuts |= dict.fromkeys(pairs, when_s)
    return replace(case, trouble=replace(case.trouble, cuts=cuts), min_workers=least)


def _mode(rng: random.Random, num: int) -> str:
    """Returns a mode with arguments, and a graph by name or by its edges."""
    graph = rng.choice([*sorted(GRAPHS), _edges(rng, num)])
    return rng.choice(
        (
            f"allreduce({rng.choice(('order=ring', 'order=ranks', 'backend=gloo'))})",
            f"dpsgd(graph='{graph}', order={rng.choice(('awc', 'atc'))})",
            f"adpsgd(graph='{graph}', every={rng.randint(1, 3)}, max_behind={rng.randint(0, 2)})",
            f"adpsgd(graph='{graph}', every={rng.randint(1, 3)}, exchange=atomic)",
            f"sgp(graph='{rng.choice([graph, _one_way(rng, num)])}', late={rng.randint(0, 1)})",
        )
    )


def _edges(rng: random.Random, num: int) -> str:
    """Returns a path through all workers in some order, and some edges more."""
    order = rng.sample(range(num), num)
    edges = set(itertools.pairwise(order))
    for _ in range(rng.randint(0, num)):
        one, other = rng.randrange(num), rng.randrange(num)
        if one != other and (other, one) not in edges:
            edges.add((one, other))
    return " ".join(f"{one}-{other}" for one, other in sorted(edges)) or "0-1"


def _one_way(rng: random.Random, num: int) -> str:
    """Returns a cycle through all workers in some order, and some edges more, each one way."""
    order = rng.sample(range(num), num)
    edges = set(itertools.pairwise([*order, order[0]]))
    for _ in range(rng.randint(0, num)):
        edges.add((rng.randrange(num), rng.randrange(num)))
    return " ".join(f"{one}>{other}" for one, other in sorted(edges) if one != other) or "0>1 1>0"


def check(case: PeerCase) -> PeerWorld:
    """Runs a case to its end.

    Raises:
        AssertionError: Workers wait for ever, or an invariant does not hold.
    """
    rng = np.random.default_rng(case.seed)
    curvature = rng.uniform(0.2, 1.0, (case.num, NUMEL))
    target = rng.normal(size=(case.num, NUMEL))
    starts = [rng.normal(size=NUMEL).astype(np.float32) for _ in range(case.num)]
    if case.rule.gossip == "ring":  # Its workers always begin alike.
        starts = [starts[0]] * case.num

    def gradient(rank: int, step: int, weights: FloatArray) -> FloatArray:
        found: FloatArray = (curvature[rank] * (weights - target[rank])).astype(np.float32)
        return np.zeros_like(found) if case.is_still else found

    world = PeerWorld(
        case.rule,
        gradient,
        starts[0],
        num_workers=case.num,
        steps=case.steps,
        lr=LR,
        seed=case.seed,
        compute_s=case.compute_s,
        latency_s=case.latency_s,
        trouble=case.trouble,
        starts=starts,
        min_workers=case.min_workers,
    ).run()
    _require(case, world, np.stack(starts).astype(np.float64))
    return world


def _require(case: PeerCase, world: PeerWorld, starts: Array) -> None:
    """Raises an AssertionError if an invariant does not hold."""
    models = np.stack([world.model(worker) for worker in world.workers])
    if not np.isfinite(models).all():
        raise AssertionError("a model is not finite")
    _require_once(world)
    _require_ends(case, world)
    is_whole = not (case.trouble.kills or case.trouble.cuts)
    if case.rule.gossip == "ring":
        _require_same_bits(world)
    if is_whole and case.rule.gossip == "push_sum":
        models = _masses(case, world)
    if is_whole and case.is_still:
        scale = np.abs(starts).max() * case.num
        if np.abs(models.sum(axis=0) - starts.sum(axis=0)).max() > TOLERANCE * scale:
            raise AssertionError("the sum of the models has changed")
        if case.rule.gossip == "mixing":
            bound = _contraction(case) * _spread(starts) + TOLERANCE * scale
            if _spread(models) > bound:
                raise AssertionError(f"models are {_spread(models):g} apart, at most {bound:g}")


def _masses(case: PeerCase, world: PeerWorld) -> Array:
    """Returns the mass of each worker of push-sum; the weights must add up to their number."""
    pushed = [worker.gossip for worker in world.workers if isinstance(worker.gossip, PushSum)]
    total = sum(one.weight for one in pushed)
    if abs(total - case.num) > TOLERANCE * case.num:
        raise AssertionError(f"weights add up to {total:g} in place of {case.num}")
    return np.stack([one.mass.numpy() for one in pushed]).astype(np.float64)


def _require_same_bits(world: PeerWorld) -> None:
    """Raises an AssertionError if all-reduce has left different models."""
    living = [worker for worker in world.workers if worker.has_ended]
    if len({worker.weights.numpy().tobytes() for worker in living}) > 1:
        raise AssertionError("all-reduce has left different bits")


def _require_ends(case: PeerCase, world: PeerWorld) -> None:
    """Raises an AssertionError if a cut has ended or stopped other workers than it may."""
    cuts, ended = case.trouble.cuts, [worker.has_ended for worker in world.workers]
    away = {rank for rank, other in cuts if other == DIRECTORY}
    if away and not all(has_ended or rank in away for rank, has_ended in enumerate(ended)):
        raise AssertionError("a worker of the larger part has not come to its end")
    if away and case.rule.gossip == "pairs":
        # An atomic exchange under way ends a lease later.
        limit_s = min(cuts.values()) + 2 * LEASE_S + max(case.compute_s) + case.latency_s
        if any(max(world.workers[rank].finished_s, default=0.0) > limit_s for rank in away):
            raise AssertionError("a worker of the smaller part has continued by itself")
    elif cuts and not away and ended.count(False) > (case.rule.gossip != "pairs"):
        raise AssertionError("a cut between two workers has ended others too")


def _require_once(world: PeerWorld) -> None:
    """Raises an AssertionError if an exchange was applied twice at one of its ends."""
    for what in ("half", "answer"):
        entries = Counter((e.rank, e.other, e.number) for e in world.log if e.what == what)
        twice = [key for key, count in entries.items() if count > 1]
        if twice:
            raise AssertionError(f"{what} of worker, other, number {twice[0]} was applied twice")


def _spread(models: Array) -> float:
    return float(np.linalg.norm(models - models.mean(axis=0)))


def _contraction(case: PeerCase) -> float:
    """Returns the largest factor on the distance to the mean that all steps' graphs leave."""
    graph, members = graph_of(str(case.rule.arguments()["graph"])), list(range(case.num))
    factor = 1.0
    for step in range(case.steps):
        mixing = np.zeros((case.num, case.num))
        for taker, giver, weight in graph(members, step):
            mixing[taker, giver] += weight
        mixing += np.diag(1 - mixing.sum(axis=1))
        factor *= float(np.linalg.norm(mixing - 1 / case.num, ord=2))
    return factor


def find_failure(seed: int) -> str:
    """Runs one seed; returns the command that shows its failure, or nothing."""
    case = draw(seed)
    try:
        check(case)
    except (AssertionError, PeersStuckError) as problem:
        reason = str(problem).partition("\n")[0]
        return f"python -m tests.sim peers {seed} {seed + 1}: {case.mode}: {reason}"
    return ""
