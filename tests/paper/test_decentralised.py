"""Decentralised modes in the simulator, against float64 models of their formulas, with faults."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pscore.graphs import GRAPHS, directed_graph_of, graph_of
from pscore.rules import parse_mode
from pscore.rules.decentralised import Decentralised
from pssim.peers import Entry, PeerWorld, Trouble
from psworker.gossip import ring
from psworker.gossip.pairs import Pairs
from psworker.gossip.push_sum import PushSum

Array = npt.NDArray[Any]
NUMEL, LR = 5, 0.1
CURVATURE = np.random.default_rng(1).uniform(0.2, 1.0, (16, NUMEL))
TARGET = np.random.default_rng(2).normal(size=(16, NUMEL))
START = np.random.default_rng(3).normal(size=NUMEL).astype(np.float32)


def gradient(rank: int, step: int, weights: Array) -> Array:
    """Returns the gradient of an ellipsoid of each worker's own, with a part that changes."""
    found: Array = CURVATURE[rank] * (weights - TARGET[rank]) + 0.1 * np.sin(step + rank)
    return found


def still(rank: int, step: int, weights: Array) -> Array:
    return np.zeros(NUMEL)


def world(mode: str, num: int, steps: int = 12, **options: Any) -> PeerWorld:
    rule = parse_mode(mode)
    assert isinstance(rule, Decentralised)
    given: dict[str, Any] = {"gradient": gradient, "start": START, "lr": LR} | options
    return PeerWorld(rule, num_workers=num, steps=steps, **given)


def models(found: PeerWorld) -> Array:
    return np.stack([found.model(worker) for worker in found.workers])


def close(ours: Array, theirs: Array, limit: float = 1e-6) -> bool:
    return bool(np.max(np.abs(ours - theirs)) <= limit * np.max(np.abs(theirs)))


# ----- oracles in float64


def mixing(name: str, num: int, step: int) -> Array:
    found = np.zeros((num, num))
    for taker, giver, weight in graph_of(name)(list(range(num)), step):
        found[taker, giver] += weight
    return found + np.diag(1 - found.sum(axis=1))


def dpsgd(graph: str, order: str, num: int, steps: int, warmup: int = 0) -> Array:
    x = np.tile(START.astype(np.float64), (num, 1))
    for step in range(steps):
        moves = LR * np.stack([gradient(rank, step, x[rank]) for rank in range(num)])
        if step < warmup:
            x = np.tile((x - moves).mean(axis=0), (num, 1))
            continue
        weights = mixing(graph, num, step)
        x = weights @ (x - moves) if order == "atc" else weights @ x - moves
    return x


@pytest.mark.parametrize("mode", ["dpsgd", "dpsgd(graph=ring, order=atc)", "adpsgd", "sgp"])
def test_a_warmup_has_the_mean_of_all_models(mode: str) -> None:
    rule = str(parse_mode(mode)).replace("warmup=0", "warmup=5")
    trouble = Trouble(lost=0.2, twice=0.2)
    found = world(rule, 5, 5, trouble=trouble, seed=4).run()
    assert close(models(found), dpsgd("complete", "atc", 5, 5))
    if mode.startswith("dpsgd"):
        given = parse_mode(mode).arguments()
        found = world(rule, 5, 12, trouble=trouble, seed=4).run()
        assert close(models(found), dpsgd(given["graph"], given["order"], 5, 12, warmup=5))


@pytest.mark.parametrize("graph", [*sorted(GRAPHS), "0-1 1-2 2-3 1-4"])
@pytest.mark.parametrize("order", ["awc", "atc"])
def test_dpsgd_follows_its_formula_whatever_the_network_does(graph: str, order: str) -> None:
    trouble = Trouble(lost=0.2, twice=0.2)
    found = world(f"dpsgd(graph='{graph}', order={order})", 5, trouble=trouble, seed=4).run()
    assert close(models(found), dpsgd(graph, order, 5, 12))


def pushing(graph: str, num: int, step: int) -> Array:
    """Returns the matrix P of push-sum, whose columns sum to 1."""
    found = np.zeros((num, num))
    for taker, giver, weight in directed_graph_of(graph)(list(range(num)), step):
        found[taker, giver] += weight
    return found + np.diag(1 - found.sum(axis=0))


def sgp(graph: str, num: int, steps: int) -> Array:
    x, w = np.tile(START.astype(np.float64), (num, 1)), np.ones((num, 1))
    for step in range(steps):
        z = x / w
        moves = LR * np.stack([gradient(rank, step, z[rank]) for rank in range(num)])
        pushed = pushing(graph, num, step)
        x, w = pushed @ (x - moves), pushed @ w
    return x / w


ONE_WAY = "0>1 1>2 2>3 3>4 4>0 0>2 0>3"


@pytest.mark.parametrize("graph", [*sorted(GRAPHS), ONE_WAY])
def test_sgp_follows_its_formula_whatever_the_network_does(graph: str) -> None:
    trouble = Trouble(lost=0.2, twice=0.2)
    found = world(f"sgp(graph='{graph}')", 5, trouble=trouble, seed=4).run()
    assert close(models(found), sgp(graph, 5, 12))


def test_sgp_comes_to_the_mean_over_edges_of_one_way() -> None:
    """Without the weight that travels along, workers 2 and 3 would count for more."""
    given = starts(5)
    mode = f"sgp(graph='{ONE_WAY}')"
    found = world(mode, 5, 80, gradient=still, starts=given, trouble=Trouble(lost=0.2)).run()
    assert close(models(found), np.tile(np.mean(given, axis=0), (5, 1)), 1e-5)
    gossips = [worker.gossip for worker in found.workers]
    assert all(isinstance(gossip, PushSum) for gossip in gossips)
    weights = [gossip.weight for gossip in gossips if isinstance(gossip, PushSum)]
    assert sum(weights) == pytest.approx(5, abs=1e-5)
    assert max(weights) > 1.2


def late_sgp(graph: str, num: int, steps: int, warmup: int) -> Array:
    """Returns the models of sgp whose shares are added one step after they were sent."""
    x, w = np.tile(START.astype(np.float64), (num, 1)), np.ones((num, 1))
    way_x, way_w = np.zeros_like(x), np.zeros_like(w)
    for step in range(steps):
        z = x / w
        x = x - LR * np.stack([gradient(rank, step, z[rank]) for rank in range(num)])
        if step < warmup:
            x = np.tile(x.mean(axis=0), (num, 1))
            continue
        pushed = pushing(graph, num, step)
        own = np.diag(np.diag(pushed))
        x, way_x = own @ x + way_x, (pushed - own) @ x
        w, way_w = own @ w + way_w, (pushed - own) @ w
    return (x + way_x) / (w + way_w)  # A worker that ends adds what is under way to it.


@pytest.mark.parametrize(("graph", "warmup"), [("exp", 0), ("ring", 4), (ONE_WAY, 0), (ONE_WAY, 3)])
def test_late_sgp_follows_its_formula_whatever_the_network_does(graph: str, warmup: int) -> None:
    trouble = Trouble(lost=0.2, twice=0.2)
    mode = f"sgp(graph='{graph}', late=1, warmup={warmup})"
    found = world(mode, 5, trouble=trouble, seed=4).run()
    assert close(models(found), late_sgp(graph, 5, 12, warmup))
    assert not close(models(found), sgp(graph, 5, 12), 1e-3)


def test_late_sgp_loses_no_mass_and_comes_to_the_mean() -> None:
    given = starts(5)
    mode = f"sgp(graph='{ONE_WAY}', late=1)"
    found = world(mode, 5, 120, gradient=still, starts=given, trouble=Trouble(lost=0.2)).run()
    assert close(models(found), np.tile(np.mean(given, axis=0), (5, 1)), 1e-5)
    gossips = [worker.gossip for worker in found.workers]
    weights = [gossip.weight for gossip in gossips if isinstance(gossip, PushSum)]
    assert sum(weights) == pytest.approx(5, abs=1e-5)


def test_late_sgp_hides_the_time_of_messages() -> None:
    """In simulated time: a message takes up to as long as a gradient."""
    ended = {}
    for late in (0, 1):
        found = world(f"sgp(late={late})", 4, 30, latency_s=0.1).run()
        ended[late] = max(worker.finished_s[-1] for worker in found.workers)
    assert ended[1] < 0.8 * ended[0]


def test_sgp_by_hand() -> None:
    """Worker 0 sends a third of (0.9, 1) to each other; 1 sends half to 2, and 2 half to 0."""

    def own(rank: int, step: int, weights: Array) -> Array:
        return weights

    given = [np.array([start], np.float32) for start in (1.0, 3.0, 5.0)]
    found = world("sgp(graph='0>1 0>2 1>2 2>0')", 3, 1, gradient=own, starts=given).run()
    assert models(found).ravel() == pytest.approx([3.06, 1.98, 2.925], abs=1e-6)


@pytest.mark.parametrize("order", ["ring", "ranks"])
@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_allreduce_is_synchronous_sgd_and_alike_on_all(order: str, num: int) -> None:
    found = world(f"allreduce(order={order})", num, trouble=Trouble(lost=0.1, twice=0.2)).run()
    x = START.astype(np.float64)
    for step in range(12):
        x = x - LR * np.mean([gradient(rank, step, x) for rank in range(num)], axis=0)
    assert close(models(found), np.tile(x, (num, 1)))
    assert len({model.tobytes() for model in models(found)}) == 1


def test_the_parts_of_a_chunk_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is far from worker 2, so it cuts its chunk of 20 numbers into more parts."""
    given = [np.arange(60, dtype=np.float32) / 7] * 3
    trouble = Trouble(lost=0.1, twice=0.2)

    def own(rank: int, step: int, weights: Array) -> Array:
        found: Array = np.sin(weights + rank + step)
        return found

    def train() -> PeerWorld:
        return world("allreduce", 3, 6, gradient=own, starts=given, trouble=trouble).run()

    whole = models(train())
    monkeypatch.setattr(ring, "PART_NUMEL_MIN", 1)
    found = train()
    assert (models(found) == whole).all()
    came = {tag.part for worker in found.workers for _, tag in worker.taken if tag.kind == ring.SUM}
    assert Counter(part >> 16 for part in came) == {0: 2, 1: 7, 2: 2}


def replay(found: PeerWorld) -> Array:
    """Replays the events of adpsgd in float64: offers, halves, answers, reads and writes."""
    num = len(found.workers)
    x = {rank: START.astype(np.float64) for rank in range(num)}
    read = dict(x)
    offered: dict[tuple[int, int], Array] = {}
    answers: dict[tuple[int, int], Array] = {}
    for entry in found.log:
        rank, key = entry.rank, (entry.rank, entry.number)
        if entry.what == "read":
            read[rank] = x[rank].copy()
        elif entry.what == "write":
            x[rank] = x[rank] - LR * gradient(rank, entry.number, read[rank])
        elif entry.what == "offer":
            offered[key] = x[rank].copy()
        elif entry.what == "half":
            asked = entry.other, entry.number
            answers[asked] = x[rank].copy()
            x[rank] = x[rank] + (offered[asked] - x[rank]) / 2
        else:
            x[rank] = x[rank] + (answers[key] - offered[key]) / 2
    return np.stack([x[rank] for rank in range(num)])


@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_adpsgd_follows_the_replay_of_its_events(graph: str) -> None:
    mode = f"adpsgd(graph={graph})"
    compute = [0.1, 0.13, 0.5, 0.1, 0.07]
    trouble = Trouble(lost=0.1, twice=0.2)
    found = world(mode, 5, 30, compute_s=compute, latency_s=0.4, trouble=trouble, seed=9).run()
    assert sum(entry.what == "answer" for entry in found.log) >= 20
    assert close(models(found), replay(found))


def replay_atomic(found: PeerWorld) -> Array:
    """Replays the events of atomic exchanges: one average, which both ends write."""
    x = {worker.rank: START.astype(np.float64) for worker in found.workers}
    read = dict(x)
    offered: dict[int, Array] = {}  # By rank; of the exchange that is open.
    averages: dict[tuple[int, int], Array] = {}
    for entry in found.log:
        rank, key = entry.rank, (entry.rank, entry.number)
        if entry.what == "read":
            assert rank not in offered, "a step has begun before the answer came"
            read[rank] = x[rank].copy()
        elif entry.what == "write":
            x[rank] = x[rank] - LR * gradient(rank, entry.number, read[rank])
            offered.pop(rank, None)  # A busy or dead partner: nothing was averaged.
        elif entry.what == "offer":
            offered[rank] = x[rank].copy()
        elif entry.what == "half":
            asked = entry.other, entry.number
            averages[asked] = x[rank] = (offered[entry.other] + x[rank]) / 2
        else:
            assert np.array_equal(offered.pop(rank), x[rank]), "its model has moved meanwhile"
            x[rank] = averages[key].copy()
    return np.stack([x[rank] for rank in range(len(found.workers))])


@pytest.mark.parametrize("graph", ["exp", "ring", "0-1 2-1 2-3 0-5 4-5"])
def test_an_atomic_exchange_is_the_average_of_both_at_one_moment(graph: str) -> None:
    mode, compute = f"adpsgd(graph='{graph}', exchange=atomic)", [0.1, 0.13, 0.5, 0.1, 0.07, 0.3]
    trouble = Trouble(lost=0.1, twice=0.2)
    options: dict[str, Any] = {"compute_s": compute, "latency_s": 0.4, "trouble": trouble}
    found = world(mode, 6, 30, seed=9, **options).run()
    answers = [entry for entry in found.log if entry.what == "answer"]
    assert len(answers) >= 12
    early = answers[:6]  # Sides change when a worker has come to its end.
    assert not {entry.rank for entry in early} & {entry.other for entry in early}
    assert close(models(found), replay_atomic(found))


def test_atomic_exchanges_alone_are_the_same_bits_at_both_ends() -> None:
    trouble = Trouble(lost=0.3, twice=0.3)
    options: dict[str, Any] = {"gradient": still, "starts": starts(6), "trouble": trouble}
    found = world("adpsgd(exchange=atomic)", 6, 30, latency_s=0.5, **options).run()
    x = dict(enumerate(starts(6)))
    offered: dict[tuple[int, int], Array] = {}
    for entry in found.log:
        if entry.what == "offer":
            offered[entry.rank, entry.number] = x[entry.rank]
        elif entry.what == "half":
            one, other = entry.rank, entry.other
            x[one] = x[other] = (offered[other, entry.number] + x[one]) * np.float32(0.5)
    for worker in found.workers:
        assert np.array_equal(getattr(worker.gossip, "shared"), x[worker.rank])  # noqa: B009


def test_active_workers_alone_begin_atomic_exchanges_and_passive_ones_answer() -> None:
    graph = "0-1 0-2 1-3 2-4 3-4"  # Workers 3 and 4 are passive both, in a cycle of five.
    found = world(f"adpsgd(exchange=atomic, graph='{graph}')", 5, 30).run()
    early = found.log[: found.log.index(Entry("write", 0, number=20))]  # Sides change at an end.
    pairs = {(entry.rank, entry.other) for entry in early if entry.what == "offer"}
    assert pairs == {(1, 0), (2, 0), (1, 3), (2, 4)}


# ----- numbers by hand, for workers at x = (1, 3), with g_i(x) = x and a rate of 0.1


def by_hand(mode: str) -> Array:
    def own(rank: int, step: int, weights: Array) -> Array:
        return weights

    starts = [np.array([1.0], np.float32), np.array([3.0], np.float32)]
    return models(world(mode, 2, 1, gradient=own, starts=starts).run()).ravel()


@pytest.mark.parametrize(("order", "expected"), [("awc", (1.9, 1.7)), ("atc", (1.8, 1.8))])
def test_dpsgd_by_hand(order: str, expected: tuple[float, float]) -> None:
    assert by_hand(f"dpsgd(graph=exp, order={order})") == pytest.approx(expected, abs=1e-6)


def test_atomic_adpsgd_by_hand() -> None:
    """Worker 1 averages at its gradient, while worker 0 computes its own."""

    def own(rank: int, step: int, weights: Array) -> Array:
        return weights

    given = [np.array([1.0], np.float32), np.array([3.0], np.float32)]
    mode, compute = "adpsgd(exchange=atomic)", [1.0, 0.1]
    found = world(mode, 2, 1, gradient=own, starts=given, compute_s=compute).run()
    assert models(found).ravel() == pytest.approx([1.9, 1.7], abs=1e-6)


def test_adpsgd_by_hand() -> None:
    given = [np.array([1.0], np.float32), np.array([3.0], np.float32)]
    found = world("adpsgd", 2, 1, starts=given, gradient=still)
    one, other = found.workers
    assert isinstance(one.gossip, Pairs)
    assert isinstance(other.gossip, Pairs)
    for worker in found.workers:
        start = worker.gossip.start()
        next(start)
        with pytest.raises(StopIteration):
            start.send([])
    # Worker 0 reads 1, the pair mixes to 2, and the gradient at 1 is written: 2 - 0.1.
    answer = other.gossip.on_offer(0, 7, 1, 0, given[0])
    assert answer is not None
    assert answer.tolist() == [3.0]
    assert other.gossip.shared.tolist() == [2.0]
    one.gossip._open, one.gossip._number = {0: (given[0], 0)}, 1
    one.gossip.on_answer(1, 0, answer)
    assert one.gossip.shared.tolist() == [2.0]
    one.grad = given[0].copy()
    with pytest.raises(StopIteration):
        next(one.gossip.step())
    assert one.gossip.shared.tolist() == pytest.approx([1.9], abs=1e-6)


# ----- limits with a rate of 0


def starts(num: int) -> list[Array]:
    rng = np.random.default_rng(num)
    return [rng.normal(size=NUMEL).astype(np.float32) for _ in range(num)]


@pytest.mark.parametrize("num", [2, 4, 8, 16])
def test_exp_makes_the_mean_in_a_cycle(num: int) -> None:
    given = starts(num)
    found = world("dpsgd", num, num.bit_length() - 1, gradient=still, starts=given).run()
    assert close(models(found), np.tile(np.mean(given, axis=0), (num, 1)), 1e-5)


def test_a_ring_contracts_by_its_spectral_gap() -> None:
    num, steps = 8, 30
    given = starts(num)
    found = world("dpsgd(graph=ring)", num, steps, gradient=still, starts=given).run()
    rho = 1 - 2 / 3 * (1 - np.cos(2 * np.pi / num))
    left = np.linalg.norm(models(found) - np.mean(given, axis=0))
    first = np.linalg.norm(given - np.mean(given, axis=0))
    assert left <= 1.01 * first * rho**steps
    assert left >= 0.05 * first * rho**steps


@pytest.mark.parametrize("seed", range(20))
def test_adpsgd_keeps_the_sum_and_brings_all_together(seed: int) -> None:
    given = starts(6)
    trouble = Trouble(lost=0.3, twice=0.3)
    found = world(
        "adpsgd", 6, 250, gradient=still, starts=given, trouble=trouble, seed=seed, latency_s=0.5
    ).run()
    entries = [(entry.rank, entry.other, entry.number) for entry in found.log]
    halves = [e for e, entry in zip(entries, found.log, strict=True) if entry.what == "half"]
    assert len(halves) == len(set(halves)), "an offer was applied twice"
    assert close(models(found).sum(axis=0), np.sum(given, axis=0), 1e-5)
    spread = np.linalg.norm(models(found) - models(found).mean(axis=0))
    assert spread < 0.05 * np.linalg.norm(given - np.mean(given, axis=0))


# ----- kills: nobody hangs, on any graph

KILLED = (
    *("allreduce", "allreduce(order=ranks)", "adpsgd", "adpsgd(max_behind=2)"),
    *("adpsgd(exchange=atomic)", "adpsgd(exchange=atomic, graph=ring, every=2, warmup=4)"),
    *("dpsgd(warmup=4)", "adpsgd(warmup=4)"),
    *("sgp(late=1)", "sgp(graph=ring, late=1, warmup=3)"),
    *("sgp", "sgp(graph=ring)", "sgp(graph='0>1 1>2 2>3 3>4 4>5 5>0 0>3')"),
    *(f"dpsgd(graph={g}, order={o})" for g, o in itertools.product(sorted(GRAPHS), ("awc", "atc"))),
)


def run_with_kills(mode: str, seed: int) -> PeerWorld:
    """Runs 3 to 6 workers, of which up to two are killed, over a bad network."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(3, 7))
    doomed = rng.choice(num, int(rng.integers(1, 3)), replace=False)
    trouble = Trouble(
        lost=0.1, twice=0.1, kills={int(rank): float(rng.uniform(0, 3)) for rank in doomed}
    )
    compute = [float(rng.uniform(0.05, 0.3)) for _ in range(num)]
    return world(mode, num, 15, seed=seed, trouble=trouble, compute_s=compute).run()


@pytest.mark.parametrize("mode", KILLED)
def test_the_living_come_to_their_end(mode: str) -> None:
    for seed in range(15):
        found = run_with_kills(mode, seed)
        alive = [worker for worker in found.workers if not worker.is_dead]
        assert np.isfinite(models(found)).all()
        if mode.startswith("allreduce"):
            assert len({worker.weights.numpy().tobytes() for worker in alive}) == 1, seed


@pytest.mark.parametrize("seed", range(10))
def test_adpsgd_applies_nothing_of_a_partner_that_has_died(seed: int) -> None:
    """The living follow the replay, in which only answers that came move those who asked."""
    kills = {1: 0.6 + 0.11 * seed, 4: 1.3 + 0.07 * seed}
    trouble = Trouble(lost=0.1, twice=0.2, kills=kills)
    found = world("adpsgd", 6, 30, latency_s=0.4, trouble=trouble, seed=seed).run()
    living = [worker.rank for worker in found.workers if not worker.is_dead]
    assert living == [0, 2, 3, 5]
    assert close(models(found)[living], replay(found)[living])


@pytest.mark.parametrize("graph", ["ring", "complete", "0-1 1-2 2-3 3-4 4-0 1-3"])
def test_the_mean_of_the_living_stays_when_a_neighbour_of_dpsgd_dies(graph: str) -> None:
    """Its weight falls to the workers themselves, until and after the graph is made again."""
    trouble = Trouble(kills={2: 0.55})
    found = world(
        f"dpsgd(graph='{graph}')", 5, 20, gradient=still, starts=starts(5), latency_s=0.001,
        trouble=trouble,
    ).run()  # fmt: skip
    living = [worker for worker in found.workers if not worker.is_dead]
    last = len(found.workers[2].path)  # Steps that the dead worker has begun.
    assert 2 < last < 15
    sums = [sum(worker.path[step].astype(np.float64) for worker in living) for step in range(20)]
    for later in sums[last + 1 :]:
        assert close(np.asarray(later), np.asarray(sums[last]), 1e-5)
    assert not close(np.asarray(sums[last]), np.asarray(sums[0]), 1e-3)
