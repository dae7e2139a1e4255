"""Workers that come and go: new ones take part, killed ones are left out, and too few wait."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

import psworker
from tests.integration import warm
from tests.integration.cluster import (
    Shards,
    Station,
    Worker,
    clean_environment,
    new_job,
    wait_until,
)
from tests.integration.models import (
    backward,
    batch,
    make_model,
    relative_error,
    same,
    sgd,
    weights_of,
)

Weights = dict[str, np.ndarray]
LEASE_S = 10.0  # A healthy worker keeps it under load; of a killed one 40 % are enough.
STEPS = 4  # Between two events.
RANKS = 4 * STEPS  # The rows below are those of steps.
Train = Callable[[Station], tuple[list[int], Weights]]


def train(me: Station) -> tuple[list[int], Weights]:
    """Sends its rank and its next step, and makes that step, until the test says stop."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    while True:
        me.tell((psworker.rank(), optimizer.clock))
        if not me.hear():
            break
        optimizer.zero_grad()
        assert np.isfinite(backward(model, *batch(psworker.rank(), optimizer.clock)))
        optimizer.step()
    live = psworker.live_ranks()
    psworker.barrier()  # Nobody goes before all have asked.
    psworker.shutdown()
    return live, weights_of(model)


def train_rows(me: Station) -> tuple[list[int], Weights]:
    """Makes steps as `train` does, with a row of each step and one of each rank."""
    table = psworker.Embedding(None, 2, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(2, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
    )
    while True:
        with torch.no_grad():  # A worker that is killed has its rows in the mean by then.
            table(torch.tensor([RANKS + psworker.rank()]))
        me.tell((psworker.rank(), optimizer.clock))
        if not me.hear():
            break
        optimizer.zero_grad()
        rows = table(torch.tensor([optimizer.clock, RANKS + psworker.rank()]))
        torch.autograd.backward(rows.sum() + 0.0 * model["top"](rows).sum())
        optimizer.step()
    live = psworker.live_ranks()
    psworker.barrier()
    with torch.no_grad():
        found = -table(torch.arange(RANKS + 3)).numpy()
    psworker.barrier("looked")
    psworker.shutdown()
    return live, {"steps": found[:RANKS], "ranks": found[RANKS:]}


def alone(present: Sequence[int]) -> Weights:
    """Returns torch's weights: of the mean over as many workers as there are at each step."""
    model = make_model()
    optimizer = sgd(model.parameters())
    for step, num_workers in enumerate(present):
        optimizer.zero_grad()
        for rank in range(num_workers):
            inputs, classes = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes) / num_workers
            torch.autograd.backward(loss)
        optimizer.step()
    return weights_of(model)


def joins(
    shards: Shards, job: str, bounds: tuple[int, int], num_workers: int = 1, function: Train = train
) -> AbstractContextManager[list[Worker]]:
    """Starts workers of an elastic job, whose ranks the shards give."""
    least, most = (str(bound) for bound in bounds)
    env = {"PACELINE_MIN_WORKERS": least, "PACELINE_MAX_WORKERS": most, "PACELINE_RANK": "-1"}
    return shards.workers(function, num_workers=num_workers, job=job, env=env)


def go(workers: Sequence[Worker], step: int) -> None:
    """Makes workers that have sent their next step make it together."""
    for _ in range(STEPS):
        for worker in workers:
            worker.tell(True)
        step += 1
        assert {worker.hear()[1] for worker in workers} == {step}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Shards]:
    """Shards of this file's own, whose log names the workers of its jobs alone."""
    with Shards(2, lease_s=LEASE_S) as started:
        yield started


def come_and_go(impatient: Shards, function: Train) -> Weights:
    """Starts two workers, then a third, which dies, then a fourth; returns their weights."""
    job, bounds = new_job(), (1, 3)
    with joins(impatient, job, bounds, 2, function) as (first, second):
        ranks = dict((worker.hear()[0], worker) for worker in (first, second))
        assert sorted(ranks) == [0, 1]
        go([first, second], 0)
        with joins(impatient, job, bounds, 1, function) as (third,):
            assert third.hear() == (2, STEPS)
            go([first, second, third], STEPS)
            third.kill()
            go([first, second], 2 * STEPS)  # When its lease is over.
            with joins(impatient, job, bounds, 1, function) as (fourth,):
                assert fourth.hear() == (2, 3 * STEPS)
                everybody = [first, second, fourth]
                go(everybody, 3 * STEPS)
                for worker in everybody:
                    worker.tell(False)
                (live, weights), *others = [worker.result() for worker in everybody]
    assert live == [0, 1, 2]
    lost = re.findall(f"worker lost .*job={job} ", impatient.written())
    assert len(lost) == len(impatient.addresses), "a healthy worker lost its lease"
    assert all(same(weights, theirs) for _, theirs in others)
    found: Weights = weights
    return found


@pytest.mark.slow
def test_workers_join_die_and_take_the_place_of_the_dead(impatient: Shards) -> None:
    weights = come_and_go(impatient, train)
    for name, weight in alone([2] * STEPS + [3] * STEPS + [2] * STEPS + [3] * STEPS).items():
        assert relative_error(weights[name], weight) <= 1e-5, name


@pytest.mark.slow
def test_rows_are_means_over_the_workers_that_there_are(impatient: Shards) -> None:
    rows = come_and_go(impatient, train_rows)
    assert np.array_equal(rows["steps"], np.ones((RANKS, 2)))
    shares = STEPS / np.array([2, 3, 2, 3])
    wanted = [shares.sum(), shares.sum(), shares[1] + shares[3]]
    np.testing.assert_allclose(rows["ranks"], np.repeat(wanted, 2).reshape(3, 2), rtol=1e-6)


@pytest.mark.slow
def test_a_job_with_too_few_workers_waits_and_says_so(impatient: Shards) -> None:
    job, bounds = new_job(), (2, 3)
    named = re.compile(r"1 more worker \(1 of at least 2\), at slice \d of 'model' on shard \d")
    logged = re.compile(f"{job}.*{named.pattern}")
    with joins(impatient, job, bounds) as (first,):
        assert first.hear() == (0, 0)
        first.tell(True)
        wait_until(lambda: named.search(first.written()) is not None)
        wait_until(lambda: logged.search(impatient.written()) is not None)
        with joins(impatient, job, bounds) as (second,):
            assert second.hear() == (1, 0)
            second.tell(True)
            assert [worker.hear() for worker in (first, second)] == [(0, 1), (1, 1)]
            second.kill()
        first.tell(True)  # Its pushes are held by each shard that has lost the second.
        lost = re.compile(f"worker lost .*job={job} ")
        wait_until(lambda: len(lost.findall(impatient.written())) == len(impatient.addresses))
        with joins(impatient, job, bounds) as (third,):
            assert [worker.hear() for worker in (first, third)] == [(0, 2), (1, 2)]
            go([first, third], 2)
            for worker in (first, third):
                worker.tell(False)
            assert same(first.result()[1], third.result()[1])


SCRIPT = """
import psworker

psworker.init()
psworker.barrier()
print(psworker.size(), "of whom", psworker.rank(), flush=True)
psworker.barrier()
"""


@pytest.mark.slow
def test_a_launcher_starts_workers_that_the_shards_give_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = ("run", "--elastic", "2:5", "--job", "mine", "--no-prefix", "--", str(script))
    done = warm.run(
        ["-m", "psworker", *command],
        env=clean_environment() | {"RANK": "7", "WORLD_SIZE": "9"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "job mine: 2 workers of 2 to 5, 1 shard on this machine" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["5 of whom 0", "5 of whom 1"]
