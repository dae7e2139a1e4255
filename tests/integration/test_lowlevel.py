"""The classic verbs on named tensors, from workers of one job."""

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import psworker
from pscore.pb.ps.v1.control_pb2 import DefineRequest
from psworker.connection.shard_link import Link
from tests.integration.cluster import DEADLINE_S, Shards, Station, new_job, wait_until

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


def ask_with(me: Station, options: dict[str, int]) -> tuple[int, int]:
    psworker.init(**options)  # type: ignore[arg-type]
    psworker.barrier()
    return psworker.rank(), psworker.size()


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"min_workers": 2, "max_workers": 4}])
def test_a_size_in_the_script_alone_gives_each_worker_another_rank(
    shards: Shards, options: dict[str, int]
) -> None:
    env = {"RANK": "", "LOCAL_RANK": "", "PACELINE_NUM_WORKERS": "1", "LOCAL_WORLD_SIZE": ""}
    ranks = shards.run(ask_with, options, env=env)
    assert sorted(ranks) == [(rank, max(options.values())) for rank in range(2)]


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


EXACT = {
    "int64": torch.tensor([2**31 + 7, -(2**62) + 1, 3]),
    "int32": torch.tensor([2**24 + 1, -5, 0], dtype=torch.int32),
    "uint8": torch.tensor([80, 1, 0], dtype=torch.uint8),
    "float64": torch.tensor([1 + 2.0**-40, 1e300, -0.1], dtype=torch.float64),
    "complex64": torch.tensor([1 + 2j, -3j, 0.5]),
    "complex128": torch.tensor([1 + 2.0**-40 * 1j, 1e300, -3j], dtype=torch.complex128),
    "float16": torch.tensor([1.5, -2.0, 0.25], dtype=torch.float16),
    "bfloat16": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "scalar": torch.tensor(2**40 + 1),
}


def exchange_exactly(me: Station) -> list[str]:
    """Returns the names of the tensors whose sum, mean or pull is not torch's own."""
    psworker.init()
    wrong = []
    for name, base in EXACT.items():
        parts = [base, base.flip(0) if base.dim() else base, base * 0]
        mine = parts[me.rank]
        wide = torch.stack(parts).sum(0).to(base.dtype)
        found = psworker.push_pull(mine, name, average=False)
        if found.dtype != base.dtype or not torch.equal(found, wide):
            wrong.append(f"{name}: {found} for {wide}")
        if base.is_floating_point() or base.is_complex():
            mean = psworker.push_pull(mine, name)
            if not torch.equal(mean, (torch.stack(parts).sum(0) / 3).to(base.dtype)):
                wrong.append(f"mean of {name}: {mean}")
        psworker.push(mine, name)
        out = torch.full_like(base, 1)
        if psworker.pull(out, name, average=False) is not out or not torch.equal(out, wide):
            wrong.append(f"pulled {name}: {out} for {wide}")
    return wrong


def test_sums_and_means_are_exact_in_every_dtype(shards: Shards) -> None:
    assert shards.run(exchange_exactly, num_workers=3) == [[]] * 3


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def broadcast_exactly(me: Station) -> list[str]:
    """Returns the names of the tensors that did not become rank 1's; rank 0 begins with NaN."""
    psworker.init()
    values = EXACT | {
        "bool": torch.tensor([True, False, True]),
        "float32": torch.tensor([1.0, float("inf"), 2.0**-149]),
        "uint64": torch.tensor([2**63 + 5, 1], dtype=torch.uint64),
        "nan": torch.tensor([float("nan"), 1.0]),
        "empty": torch.zeros(0),
    }
    mine = {name: value.clone() for name, value in values.items()}
    for value in mine.values() if me.rank != 1 else ():
        value.fill_(float("nan") if value.dtype.is_floating_point else 1)
    psworker.broadcast_parameters(mine, root_rank=1)
    return [
        f"{name}: {mine[name]}"
        for name, value in values.items()
        if not torch.equal(bytes_of(value), bytes_of(mine[name]))
    ]


def test_a_broadcast_is_exact_in_every_dtype_and_takes_nothing_of_the_others(
    shards: Shards,
) -> None:
    assert shards.run(broadcast_exactly) == [[]] * 2


def leave_early(me: Station) -> tuple[float, float, str]:
    psworker.init()
    psworker.push_pull(torch.ones(1), "value")
    if psworker.rank() == 2:
        psworker.shutdown()
        me.tell()
        return 3.0, 1.0, ""
    me.tell()
    me.hear()
    total = psworker.push_pull(torch.ones(1), "value", average=False).item()
    mean = psworker.push_pull(torch.ones(1), "value").item()
    problem = ""
    try:
        psworker.broadcast_parameters([("w", torch.zeros(1))], root_rank=2)
    except psworker.ConfigError as error:
        problem = str(error)
    return total, mean, problem


def test_the_sum_holds_what_was_pushed_after_a_worker_has_left(shards: Shards) -> None:
    with shards.workers(leave_early, num_workers=3) as workers:
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell()
        results = [worker.result() for worker in workers]
    gone = "rank 2 has left the job: nobody has values of 'w'"
    assert sorted(results) == [(2.0, 1.0, gone), (2.0, 1.0, gone), (3.0, 1.0, "")]


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
    model = torch.nn.Linear(1, 1)
    calls: list[Callable[[], object]] = [
        lambda: psworker.push_pull(torch.zeros(3, 2), "value"),
        lambda: psworker.broadcast_parameters([], root_rank=2),
        lambda: psworker.push("value", torch.zeros(2, 3)),  # type: ignore[arg-type]
        lambda: psworker.push_pull(torch.ones(2, dtype=torch.int64), "count"),
        lambda: psworker.push_pull(torch.ones(2, dtype=torch.bool), "flag", average=False),
        lambda: psworker.push(torch.zeros(2, 3).double(), "value"),
        lambda: psworker.push(torch.zeros(2, 3).to_sparse(), "sparse"),
        lambda: psworker.push_pull(torch.full((1,), 200, dtype=torch.uint8), "u", average=False),
        lambda: psworker.push_pull(torch.full((1,), 2**62), "long", average=False),
        lambda: psworker.broadcast_parameters(model.parameters()),  # type: ignore[arg-type]
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
        "ConfigError: psworker.push() takes a tensor and its name, in this order; it was given a "
        "str and a Tensor",
        "ConfigError: tensor 'count' is torch.int64, which has no mean; pass average=False for the "
        "exact sum, or exchange tensor.double()",
        "ConfigError: tensor 'flag' is torch.bool, which has neither a mean nor a sum; exchange "
        "tensor.int(), with average=False for the number of workers",
        "ConfigError: tensor 'value' is torch.float64 here, and its tensors are added as "
        "torch.float32: use one dtype for a name",
        "ConfigError: a tensor is torch.float32 with layout torch.sparse_coo; exchange its dense "
        "values, tensor.to_dense() or tensor.dequantize()",
        "ConfigError: the sum of 'u' is beyond torch.uint8, the dtype of its tensors; exchange "
        "tensor.long()",
        "ConfigError: the sum of 'long' is beyond int64; exchange tensor.double()",
        "ConfigError: broadcast_parameters() takes pairs of name and tensor: "
        "model.named_parameters(), model.named_buffers() or model.state_dict()",
    ]
    assert second[:-1] == first
    assert re.search(
        r"JobMismatchError: .*tensor 0 is 'differs' \[5\] .* here and 'differs' \[4\]", second[-1]
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


def is_interrupted(me: Station) -> None:
    """Waits in a second mean, in which the first worker does not take part."""
    psworker.init()
    psworker.push_pull(torch.ones(9000), "loss")
    if me.rank == 0:
        me.tell()
        me.hear()
    psworker.push_pull(torch.full((9000,), 100.0), "loss")


def takes_part_again(me: Station) -> list[float]:
    psworker.init()
    values = (psworker.push_pull(torch.full((9000,), float(value)), "loss") for value in (2, 3))
    return [float(value[-1]) for value in values]


@pytest.mark.slow
def test_a_mean_in_which_all_workers_were_killed_is_void_for_those_who_come_after(
    shards: Shards,
) -> None:
    """Launchers such as torchrun start all workers again after a death."""
    job = new_job()
    with shards.workers(is_interrupted, num_workers=3, job=job) as workers:
        workers[0].hear()
        wait_until(lambda: all("has waited" in each.written() for each in workers[1:]))
        for worker in workers:
            worker.kill()
    again = {"PACELINE_RESTART": "1"}
    results = shards.run(takes_part_again, num_workers=3, job=job, env=again)
    assert results == [[2.0, 3.0]] * 3


def declares_on_the_first_shard(me: Station) -> None:
    """Waits where the first shard has its tensor, and the second one does not yet."""
    psworker.init()
    psworker.push_pull(torch.ones(9000), "a")
    call, asked = Link.call, list[Link]()

    def cut(link: Link, method: Any, request: Any) -> Any:
        if isinstance(request, DefineRequest):
            if asked:
                me.tell()
                me.hear()
            asked.append(link)
        return call(link, method, request)

    with mock.patch.object(Link, "call", cut):
        psworker.push_pull(torch.ones(9000), "unfinished")


def names_another(me: Station) -> list[float]:
    psworker.init()
    return [float(psworker.push_pull(torch.ones(9000), name)[0]) for name in ("b", "unfinished")]


def test_workers_that_are_killed_between_two_shards_leave_a_job_that_continues(
    shards: Shards,
) -> None:
    """They have declared a tensor on the first shard alone: its number is free on the second."""
    job = new_job()
    with shards.workers(declares_on_the_first_shard, num_workers=1, job=job) as (worker,):
        worker.hear()
        worker.kill()
    again = {"PACELINE_RESTART": "1"}
    assert shards.run(names_another, num_workers=1, job=job, env=again) == [[1.0, 1.0]]
