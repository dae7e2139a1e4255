"""A change of the mode while a job runs: every gradient counts once, and nothing else is lost."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from pscore.errors import ConfigError, JobMismatchError
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, Worker, results_of
from tests.integration.command import Command

Array = npt.NDArray[Any]
NUMEL = 9000  # Two slices on two shards.
LR, MOMENTUM = 0.05, 0.9
# When each mode begins, and which: the last is the first one again.
WAY = ((0, "ssgd"), (8, "ssd(steps=3, warmup=0)"), (20, "ssd(steps=5, warmup=0)"), (31, "ssgd"))
STEPS = 36


def table(*key: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(key).standard_normal(NUMEL, np.float32)


def gradient(rank: int, step: int, weights: Array) -> Array:
    """Returns the slope of a quadratic of each worker, and noise."""
    return np.abs(table(1, rank)) * weights - table(2, rank, step)


def make(mode: str, lr: float, momentum: float) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.from_numpy(table(0)))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=lr, momentum=momentum),
        named_parameters=[("weight", weight)],
        mode=mode,
    )
    return weight, optimizer


def work_along(me: Station, way: Sequence[tuple[int, str]]) -> tuple[list[Array], Array, list[int]]:
    """Trains along a way of modes; returns all weights, those at the end, and the versions."""
    weight, optimizer = make(way[0][1], LR, MOMENTUM)
    changes = dict(way[1:])
    path = []
    for step in range(STEPS):
        if step in changes:
            optimizer.set_mode(changes[step])
        path.append(weight.detach().numpy().copy())
        optimizer.zero_grad()
        slope = torch.from_numpy(gradient(me.rank, step, path[-1]))
        torch.autograd.backward((weight * slope).sum())
        optimizer.step()
    optimizer.close()
    versions = [part.version for part in table_of(optimizer).replica.parts]
    psworker.shutdown()
    return path, weight.detach().numpy().copy(), versions


def model(way: Sequence[tuple[int, str]]) -> tuple[list[list[Array]], Array]:
    """Returns what `work_along` does, of two workers, in float64 and by the equations.

    Between two pulls a worker runs the shards' optimizer from their weights and momentum (mirror);
    a change of the mode gives both to every worker, as a pull that is waited for does.
    """
    shard = table(0).astype(np.float64)
    velocity = np.zeros(NUMEL)
    base, speed = [shard, shard], [velocity, velocity]
    pulled: tuple[Array, Array] | None = None
    modes = dict(way)
    delay = 0
    paths: list[list[Array]] = [[], []]
    for step in range(STEPS):
        if step in modes:
            delay = int(modes[step].partition("steps=")[2].partition(",")[0] or 0)
            base, speed, pulled = [shard, shard], [velocity, velocity], None
        for path, weights in zip(paths, base, strict=True):
            path.append(weights)
        gradients = [gradient(rank, step, base[rank]) for rank in range(2)]
        if pulled is not None:
            base, speed, pulled = [pulled[0]] * 2, [pulled[1]] * 2, None
        velocity = MOMENTUM * velocity + sum(gradients) / 2
        shard = shard - LR * velocity
        if delay == 0:
            base, speed = [shard, shard], [velocity, velocity]
            continue
        speed = [MOMENTUM * v + g for v, g in zip(speed, gradients, strict=True)]
        base = [weights - LR * v for weights, v in zip(base, speed, strict=True)]
        if step % delay == delay - 1:
            pulled = shard, velocity
    return paths, shard


@pytest.mark.slow
def test_ssgd_to_ssd_and_back_follows_a_model_of_it(shards: Shards) -> None:
    results = shards.run(work_along, WAY)
    expected, end = model(WAY)
    for rank, (path, last, versions) in enumerate(results):
        for step, (ours, theirs) in enumerate(zip(path, expected[rank], strict=True)):
            assert np.abs(ours - theirs).max() < 2e-5, (rank, step)
        assert np.abs(last - end).max() < 2e-5, rank
        assert versions == [STEPS] * 2, "versions continue"
    assert np.abs(expected[0][15] - expected[1][15]).max() > 0.01, "the delay must be seen"


# ----- to the unit: gradients that do not depend on the weights


def work_units(
    me: Station, modes: Sequence[str], steps: Sequence[Sequence[int]]
) -> tuple[Array, int]:
    """Makes `steps[i][rank]` steps in mode i; each gradient is 2 in two elements of its own."""
    weight, optimizer = make(modes[0], 1.0, 0.0)
    number = 0
    for index, (mode, count) in enumerate(zip(modes, steps, strict=True)):
        if index:
            optimizer.set_mode(mode)
        for _ in range(count[me.rank]):
            optimizer.zero_grad()
            grad = torch.zeros(NUMEL)
            grad[100 * me.rank + number] = grad[-1 - 100 * me.rank - number] = 2.0
            torch.autograd.backward((weight * grad).sum())
            optimizer.step()
            number += 1
    table_of(optimizer).session.barrier(
        "end"
    )  # In an asynchronous mode nobody waits for the last of others.
    psworker.shutdown()
    return weight.detach().numpy().copy(), optimizer.traffic.num_too_late


SINGLE, MEAN = 2.0, 1.0  # The move by a gradient of 2: alone, and in a mean of two.
CHANGES = {
    "asgd to ssgd": (("asgd", "ssgd"), ((4, 4), (3, 3)), {0: SINGLE, 4: MEAN}),
    "ssgd to asgd": (("ssgd", "asgd"), ((4, 4), (3, 3)), {0: MEAN, 4: SINGLE}),
    "a collection that is not full": (
        ("staleness(splits=1)", "asgd"),
        ((2, 1), (2, 2)),
        None,  # The pairs that share an update depend on the order of arrival.
    ),
    "ssd to od": (("ssd(steps=4, warmup=0)", "od(warmup=0)"), ((6, 6), (3, 3)), {0: MEAN}),
    "round to round": (("local(steps=4)", "local(steps=2)"), ((6, 6), (3, 3)), {0: MEAN}),
    "from a round that the last answer has not reached": (
        (
            "local(steps=4, overlap=mirror, delay=3)",
            "local(steps=2)",
            "local(steps=2, overlap=mirror)",
        ),
        ((6, 6), (3, 3), (3, 3)),
        {0: MEAN},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_every_gradient_counts_once(shards: Shards, name: str) -> None:
    modes, steps, shares = CHANGES[name]
    results = shards.run(work_units, modes, steps)
    assert [late for _, late in results] == [0, 0]
    assert np.array_equal(results[0][0], results[1][0])
    moved = (table(0).astype(np.float64) - results[0][0]).round(4)
    for rank in range(2):
        for number in range(sum(count[rank] for count in steps)):
            parts = moved[100 * rank + number], moved[-1 - 100 * rank - number]
            if shares is None:
                assert all(share in (SINGLE, MEAN) for share in parts), (rank, number, parts)
            else:
                share = shares[max(start for start in shares if start <= number)]
                assert parts == (share, share), (rank, number)
    assert np.count_nonzero(moved) == 2 * sum(sum(count) for count in steps)


def test_workers_that_come_to_it_at_different_steps_do_not_wait_for_each_other(
    shards: Shards,
) -> None:
    """Worker 1 calls it two steps earlier; worker 0's last two steps are its own alone."""
    results = shards.run(work_units, ("ssgd", "ssd(steps=2, warmup=0)"), ((5, 3), (4, 4)))
    moved = (table(0).astype(np.float64) - results[0][0]).round(4)
    assert moved[:9].tolist() == [MEAN] * 3 + [SINGLE] * 2 + [MEAN] * 4
    assert moved[100:107].tolist() == [MEAN] * 7


# ----- what is refused


def work_refused(me: Station) -> list[str]:
    _, optimizer = make("ssgd", 1.0, 0.0)
    said = []
    for mode in ("local", "ssgd(backup=2)", "sgsd"):
        with pytest.raises(ConfigError) as problem:
            optimizer.set_mode(mode)
        said.append(str(problem.value))
    optimizer.set_mode("ssgd")  # As it is.
    try:
        optimizer.set_mode("od" if me.rank else "ssd")
    except JobMismatchError as problem:
        said.append(str(problem))
    psworker.shutdown()
    with pytest.raises(ConfigError, match="before training has ended"):
        optimizer.set_mode("od")
    return said


def test_wrong_combinations_are_refused(shards: Shards) -> None:
    results = shards.run(work_refused)
    for said in results:
        assert "cannot become local(" in said[0]
        assert "must be less than the 2 workers" in said[1]
        assert "ssgd" in said[2]
    (refused,) = [said[3] for said in results if len(said) > 3]
    assert "changes the mode to" in refused


def train_in_long_slices(me: Station) -> tuple[str, set[float]]:
    """Trains in rounds, at first of all slices at once; returns what was refused, and weights."""
    weights = torch.nn.Parameter(torch.zeros(1_500_000))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0), [("weights", weights)], mode="local(steps=6)"
    )
    weights.grad = torch.full_like(weights, 1.0 + me.rank)
    for _ in range(6):
        optimizer.step()
    with pytest.raises(ConfigError) as refused:
        optimizer.set_mode("local(steps=6, fragments=6)")
    for _ in range(6):
        optimizer.step()
    optimizer.set_mode("local(steps=6, fragments=4)")
    for _ in range(12):
        optimizer.step()
    psworker.shutdown()
    return str(refused.value), set(weights.tolist())


def test_fragments_that_a_table_with_long_slices_has_not_are_refused(shards: Shards) -> None:
    """A refusal changes nothing; other slices would need a new job."""
    for said, values in shards.run(train_in_long_slices):
        assert "fragments is 6, and the model has 4 slices" in said
        assert "start a new job" in said
        assert values == {-24 * 1.5}


def meets_full_shard(me: Station) -> tuple[str, int]:
    """Asks for a mode for which one shard has no memory, and trains on."""
    weight = torch.nn.Parameter(torch.zeros(3 << 20))  # 6 MiB on each of two shards.
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)], mode="ssgd"
    )
    for step in range(4):
        if step == 2:
            with pytest.raises(ConfigError, match="on shard 0 needs 12582912 bytes"):
                optimizer.set_mode("ssd(steps=3, warmup=0)")
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.close()
    assert (weight == -4.0).all()
    return optimizer.rule.name, optimizer.steps


def test_a_mode_that_one_shard_cannot_take_changes_no_shard(tmp_path: Path) -> None:
    """The others had it then, and waited for pushes that none of the workers made."""
    with ExitStack() as stack:
        addresses: list[str] = []
        for index, megabytes in enumerate((40, 400)):
            shard = Command(tmp_path / f"machine-{index}")
            shard.folder.mkdir(mode=0o700)
            place = ("--cluster", "night", "--shards", 2, "--shard-index", index)
            run = stack.enter_context(shard.detached(*place, "--memory-mb", megabytes))
            addresses += run["addresses"]
        world = {"PACELINE_SERVERS": ",".join(addresses), "PACELINE_JOB": "night"}
        workers: list[Worker] = []
        for rank in range(2):
            place_of = {"RANK": str(rank), "WORLD_SIZE": "2"}
            workers.append(Worker(meets_full_shard, rank, (), world | place_of))
            stack.callback(workers[-1].close)
        assert results_of(workers) == [("ssgd", 4)] * 2
