"""The classic verbs on named tensors, from workers of one job."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import DEADLINE_S, Shards, Station, new_job

LARGE = (1 << 21) + 77  # Elements: more than one slice on each of two shards.


def ask(me: Station) -> tuple[int, int]:
    psworker.init()
    psworker.barrier()
    psworker.barrier()
    psworker.barrier("another")
    return psworker.rank(), psworker.size()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rank_and_size_are_the_launchers(shards: Shards, num_workers: int) -> None:
    expected = [(rank, num_workers) for rank in range(num_workers)]
    assert shards.run(ask, num_workers=num_workers) == expected


def test_without_ranks_the_shards_give_each_worker_another(shards: Shards) -> None:
    ranks = shards.run(ask, num_workers=3, env={"RANK": "", "LOCAL_RANK": ""})
    assert sorted(ranks) == [(0, 3), (1, 3), (2, 3)]


def exchange(me: Station) -> list[Any]:
    """Returns what each verb gave, worker i with i + 1 times a tensor."""
    psworker.init()
    mine = torch.arange(6.0).view(2, 3) * (me.rank + 1)
    mean = psworker.push_pull(mine, "matrix")
    total = psworker.push_pull(mine, "matrix", average=False)
    scalar = psworker.push_pull(torch.tensor(float(me.rank)), "scalar")
    half = psworker.push_pull(mine.half().t(), "transposed")
    large = psworker.push_pull(torch.full((LARGE,), float(me.rank)), "large")
    out = torch.full((2, 3), -1.0)
    returned = psworker.pull("untouched", out)
    assert returned is out
    psworker.push(mine, "slow")
    psworker.pull("slow", out)
    return [
        mean.tolist(),
        total.tolist(),
        (scalar.shape, scalar.item()),
        (str(half.dtype), half.tolist()),
        (large.min().item(), large.max().item(), large.numel()),
        out.tolist(),
    ]


def test_push_pull_gives_the_mean_or_the_sum_of_all(shards: Shards) -> None:
    base = torch.arange(6.0).view(2, 3)
    expected = [
        (base * 2).tolist(),
        (base * 6).tolist(),
        (torch.Size([]), 1.0),
        ("torch.float16", (base * 2).t().tolist()),
        (1.0, 1.0, LARGE),
        (base * 2).tolist(),
    ]
    assert shards.run(exchange, num_workers=3) == [expected] * 3


def pull_before(me: Station) -> list[float]:
    psworker.init()
    values = []
    out = torch.full((2,), 5.0)
    values.append(psworker.pull("value", out)[0].item())
    psworker.barrier()
    for number in range(3):
        psworker.push(torch.full((2,), 10.0 * number + 2 * me.rank), "value")
        values.append(psworker.pull("value", out)[0].item())
    return values


def test_a_pull_gives_the_round_of_the_last_push(shards: Shards) -> None:
    assert shards.run(pull_before) == [[0.0, 1.0, 11.0, 21.0]] * 2


def broadcast(me: Station, root: int) -> list[list[float]]:
    psworker.init()
    torch.manual_seed(me.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    psworker.broadcast_parameters(model.named_parameters(), root_rank=root)
    psworker.broadcast_parameters(model.named_buffers(), root_rank=root)
    return [value.flatten().tolist() for value in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_takes_the_values_of_the_root(shards: Shards, root: int) -> None:
    torch.manual_seed(root)
    weight = torch.nn.Linear(3, 2).weight.flatten().tolist()
    results = shards.run(broadcast, root, num_workers=3)
    assert results[0][0] == pytest.approx(weight, rel=1e-6)
    assert results == [results[0]] * 3


def other_order(me: Station) -> list[float]:
    """Names 20 tensors, worker 1 from the last to the first."""
    psworker.init()
    if me.rank == 1:
        psworker.barrier()
    numbers = range(20) if me.rank == 0 else range(19, -1, -1)
    for number in numbers:
        psworker.push(torch.tensor([float(number)]), f"tensor-{number}")
    if me.rank == 0:
        psworker.barrier()
    out = torch.zeros(1)
    return [psworker.pull(f"tensor-{number}", out).item() for number in range(20)]


def test_workers_may_name_tensors_in_any_order(shards: Shards) -> None:
    assert shards.run(other_order) == [[float(number) for number in range(20)]] * 2


def again(me: Station, job: str) -> list[float]:
    """Uses one name in two jobs of one process."""
    values = []
    for number in range(2):
        psworker.init(job=f"{job}-{number}")
        values.append(psworker.push_pull(torch.tensor(number + 2.0 * me.rank), "value").item())
        psworker.shutdown()
    return values


def test_a_process_may_join_one_job_after_another(shards: Shards) -> None:
    assert shards.run(again, new_job()) == [[1.0, 2.0]] * 2


def misuse(me: Station) -> list[str]:
    psworker.init()
    psworker.push_pull(torch.zeros(2, 3), "value")
    if me.rank == 0:
        psworker.push(torch.zeros(4), "differs")
    psworker.barrier()
    problems: list[str] = []
    calls: list[Callable[[], object]] = [
        lambda: psworker.push_pull(torch.zeros(3, 2), "value"),
        lambda: psworker.broadcast_parameters([], root_rank=2),
        lambda: psworker.push(torch.zeros(4 + me.rank), "differs"),
    ]
    for call in calls:
        try:
            call()
        except psworker.PacelineError as problem:
            problems.append(f"{type(problem).__name__}: {problem}")
    return problems


def test_misuse_is_refused_by_name(shards: Shards) -> None:
    first, second = shards.run(misuse)
    assert first == [
        "ConfigError: tensor 'value' has shape [3, 2], it was made with [2, 3]",
        "ConfigError: root_rank is 2, must be in 0..1",
    ]
    assert second[:2] == first
    assert re.search(
        r"JobMismatchError: .*tensor 0 is 'differs' \[5\] .* here and 'differs' \[4\]", second[2]
    )


def push_on(me: Station) -> None:
    """Worker 0 pushes rounds that worker 1 does not, until there is no room."""
    psworker.init()
    psworker.push(torch.zeros(3), "value")
    psworker.barrier()
    me.tell()
    if me.rank == 1:
        me.hear()
    for _ in range(3):
        psworker.push(torch.zeros(3), "value")


def test_a_push_that_waits_for_room_says_so(shards: Shards) -> None:
    with shards.workers(push_on) as (first, second):
        for worker in (first, second):
            worker.hear()
        end_s = time.monotonic() + DEADLINE_S
        pattern = (
            r"worker 0 has waited (\d+) s for room for step \d of slice 0 of "
            rf"'tensor.value' from shard \d at [\d.:]+, "
            rf"which waits for step \d of worker 1 \(process {second.pid} on "
        )
        while not re.search(pattern, first.written()):
            assert time.monotonic() < end_s, first.written()
            time.sleep(0.05)
        second.tell()
        for worker in (first, second):
            worker.result()
