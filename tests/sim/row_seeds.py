"""Row slices under kills, repeated pushes and any order, drawn from a seed.

    python -m tests.sim.row_seeds 0 10000

A faulty job has journals, and its shards are killed before and after any change of a slice; pushes
come in any order, and some twice. A calm job without journals gets the same pushes. Both must have
the same bits in all rows, states, counts and ids that wait: where all make each step together, also
on another number of shards and in another order of arrival; else each slice gets its pushes in the
order of the faulty one. A worker keeps some rows and asks only for those that have changed: these
must be those of a full pull. Looks create nothing.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.rows.spec import LRU_MIN, RowTable
from pscore.rules import ASGD, SSGD, SSP
from pscore.rules.base import Rule
from tests.row_driver import RowShards, crowded, row_spec
from tests.unit.psserver.rows.test_row_journal import Death, KilledError

SEED, DIM, HELD = 3, 3, ("rows", "ids_waiting", "rows_removed", "gradients_dropped")
IDS = crowded(SEED, 120)  # Of 16 buckets.
HYPER = {"lr": 0.25, "weight_decay": 0.01, "maximize": 0.0, "lr_decay": 0.1, "eps": 1e-3,
         "initial_accumulator_value": 0.1, "beta1": 0.8, "beta2": 0.9, "beta": 1.0, "l1": 0.01,
         "l2": 0.1}  # fmt: skip
POLICIES: tuple[dict[str, int], ...] = (
    {}, {"min_count": 2}, {"ttl": 2}, {"ttl": 5}, {"lru": LRU_MIN}, {"min_count": 3, "ttl": 4},
    {"lru": LRU_MIN, "ttl": 6}, {"lru": LRU_MIN, "min_count": 2, "ttl": 3},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCase:
    """One job, its faults, and the one that it is compared with."""

    rule: Rule
    optimizer: str
    table: RowTable
    num_workers: int
    num_shards: int
    calm_shards: int
    steps: int


def draw(seed: int) -> RowCase:
    """Returns the case of a seed."""
    rng = random.Random(seed)
    rule: Rule = rng.choice((SSGD(), SSGD(), ASGD(), SSP(bound=2)))
    num_shards = rng.randint(1, 3)
    return RowCase(
        rule=rule,
        optimizer=rng.choice(sorted(ROW_OPTIMIZERS)),
        table=RowTable(seed=SEED, init="uniform(0.5)", **rng.choice(POLICIES)),
        num_workers=rng.randint(1, 3),
        num_shards=num_shards,
        calm_shards=rng.randint(1, 4) if rule.by_step else num_shards,
        steps=rng.randint(3, 8),
    )


class Job:
    """Shards of a case, and the pushes of its workers."""

    def __init__(self, case: RowCase, seed: int, num_shards: int, folder: Path | None) -> None:
        spec = row_spec(
            ("a", 0, DIM, case.table),
            optimizer=case.optimizer,
            rule=case.rule,
            num_shards=num_shards,
        )
        self.shards = RowShards(spec, case.num_workers, folder)
        self.shards.begin()
        names = ROW_OPTIMIZERS[case.optimizer].hyper_names
        self._hyper, self._seed = np.array([[HYPER[name] for name in names]]), seed

    def push(self, worker: int, step: int, slice_: int) -> None:
        """Pushes a step of a worker to one slice."""
        rng = np.random.default_rng((self._seed, worker, step))
        count = int(rng.integers(0, 25)) * int(rng.random() < 0.9)
        ids = np.sort(IDS[np.unique((len(IDS) * rng.random(count) ** 2).astype(np.int64))])
        grads = rng.standard_normal((len(ids), DIM))
        samples = float(rng.integers(1, 3))
        self.shards.push(worker, step, [ids], [grads], self._hyper, samples=samples, only=[slice_])

    def result(self) -> list[np.ndarray]:
        """Returns all rows and their states, and the counts of each policy."""
        stores = self.shards.stores()
        held = [[store.count_held()[name] for store in stores] for name in HELD]
        for store in stores:
            store.check_invariants()
        steps = np.max([store.counts for store in stores], axis=0)
        return [*self.shards.pull([IDS], with_state=True), np.sum(held, axis=1), steps]


def simulate(seed: int) -> int:
    """Runs the case of a seed; returns how many processes were killed.

    Raises:
        AssertionError: The two jobs differ.
    """
    case, rng = draw(seed), random.Random(~seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pytest.MonkeyPatch.context() as p:
        death = Death(p)
        job = Job(case, seed, case.num_shards, Path(folder))
        order, kills = _train(case, job, death, rng)
        found = job.result()
        calm = Job(case, seed, case.calm_shards, None)
        if case.rule.by_step:
            order = [
                (worker, step, slice_)
                for step in range(case.steps)
                for slice_ in range(case.calm_shards)
                for worker in rng.sample(range(case.num_workers), case.num_workers)
            ]
        for push in order:
            calm.push(*push)
        for one, other in zip(found, calm.result(), strict=True):
            np.testing.assert_array_equal(one, other)
    return kills


def _train(
    case: RowCase, job: Job, death: Death, rng: random.Random
) -> tuple[list[tuple[int, int, int]], int]:
    """Makes all pushes with faults; returns them in their order, and the number of kills."""
    slices = range(case.num_shards)
    next_of = {(worker, part): 0 for worker in range(case.num_workers) for part in slices}
    order: list[tuple[int, int, int]] = []
    kills, copy, since = 0, job.shards.pull([IDS])[0], [0] * case.num_shards
    while open_ := [key for key, step in next_of.items() if step < case.steps]:
        part = rng.choice([part for _, part in open_])
        first = min(next_of[key] for key in open_ if key[1] == part)
        ahead = 0 if case.rule.by_step else 1  # A push that is further ahead is answered later.
        worker = rng.choice([w for w, p in open_ if p == part and next_of[w, p] <= first + ahead])
        push = worker, next_of[worker, part], part
        death.left = rng.randint(1, 25) if rng.random() < 0.3 else None
        for _ in range(2 if rng.random() < 0.1 else 1):  # The answer to the first one is lost.
            while True:
                try:
                    job.push(*push)
                    break
                except KilledError:
                    death.left, kills = None, kills + 1
                    job.shards.kill(part)
        death.left = None
        next_of[worker, part] += 1
        order.append(push)
        if rng.random() < 0.3:
            copy = _follow(job, copy, since)
    _follow(job, copy, since)
    return order, kills


def _follow(job: Job, copy: np.ndarray, since: list[int]) -> np.ndarray:
    """Brings a worker's copy of all rows up to date, slice by slice, and checks it."""
    shards, whole = job.shards, job.shards.pull([IDS])[0]
    before = [store.count_held() for store in shards.stores()]
    for part, chosen in shards.divide([IDS]):
        clocks: Any = [e.jobs["rows"].job.table(0).clocks for e in shards.engines]
        version = next(of[part] for of in clocks if part in of).version
        own = [IDS[chosen[0]]]
        (rows,) = shards.pull(own, since=since[part], held=[copy[chosen[0]]])
        copy[chosen[0]], since[part] = rows, version
    np.testing.assert_array_equal(copy, whole)
    assert [store.count_held() for store in shards.stores()] == before
    return copy


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    start, stop = int(sys.argv[1]), int(sys.argv[2])
    sys.stdout.write(f"{sum(map(simulate, range(start, stop)))} kills, no difference\n")
