"""A shard that comes back empty is filled by the workers, where they run the optimizer.

Real processes are killed, and the folder of a machine is deleted, in the moments that matter. The
weights are then those of a run without a fault, bit for bit.
"""

from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import Session
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.machines import Machine, addresses_of_two

STEPS, AT = 14, 6
NUMEL = 3 << 19  # Of each tensor: several slices on each shard.
RANKS = (0, 1)
Stop = tuple[str, int, int]  # A method, a step, and which call from then on.
OWNERS = {"agree_at": Session}  # Of the methods; of others it is `Exchange`.
Weights = list[np.ndarray]


class Stops:
    """Makes a call of a method tell the test, and wait for it, before it begins."""

    def __init__(self, station: Station) -> None:
        self._station = station

    def set(self, name: str, number: int) -> None:
        owner, calls, station = OWNERS.get(name, Exchange), [0], self._station
        original = getattr(owner, name)

        def method(self: Any, *args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                station.tell(name)
                station.hear()
            return original(self, *args, **options)

        setattr(owner, name, method)


def gradient(weight: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Returns a gradient that depends on the weights, so that no lost step can be hidden."""
    noise = torch.Generator().manual_seed(100 * step + rank)
    return 0.1 * weight + torch.randn(weight.shape, generator=noise)


def train(station: Station, stops: list[Stop], clips: bool = False) -> Weights:
    """Trains all steps; some calls wait for the test."""
    torch.set_num_threads(1)
    parts = [torch.nn.Parameter(torch.full((NUMEL,), 1.0 + number)) for number in range(2)]
    inner = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(inner, named, optimizer_on="worker")
    for step in range(STEPS):
        for part in parts:
            part.grad = gradient(part.detach(), station.rank, step)
        for name, at, number in stops:
            if at == step:
                Stops(station).set(name, number)
        if clips:
            psworker.clip_grad_norm_(optimizer, 1e9)
        optimizer.step()
    optimizer.close()
    return [part.detach().numpy().copy() for part in parts]


def train_alone(after: int = STEPS) -> Weights:
    """Returns the weights of one process; from a step on, rank 1's gradient is left out."""
    parts = [torch.nn.Parameter(torch.full((NUMEL,), 1.0 + number)) for number in range(2)]
    inner = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for part in parts:
            now = RANKS if step < after else RANKS[:1]
            part.grad = torch.stack([gradient(part.detach(), rank, step) for rank in now]).mean(0)
        inner.step()
    return [part.detach().numpy() for part in parts]


class Cluster:
    """Two machines with a shard each, and the workers of one job."""

    def __init__(self, folder: Path, stack: ExitStack, lease_s: float = 60) -> None:
        self._stack = stack
        self.addresses = addresses_of_two()
        self.machines = [Machine(folder, it, self.addresses, lease_s=lease_s) for it in range(2)]
        self._running: list[Popen[str]] = []
        for machine in self.machines:
            self._running.append(stack.enter_context(machine.running()))

    def start(
        self, stops: dict[int, list[Stop]], data_plane: str = "auto", *, clips: bool = False
    ) -> list[Worker]:
        names = {"WORLD_SIZE": "2", "PACELINE_JOB": "night", "PACELINE_TIMEOUT_S": "120"}
        names |= {"PACELINE_SERVERS": ",".join(self.addresses), "PACELINE_DATA_PLANE": data_plane}
        workers = []
        for rank in RANKS:
            env = {**names, "RANK": str(rank)}
            workers.append(Worker(train, rank, (stops.get(rank, []), clips), env))
            self._stack.callback(workers[-1].close)
        return workers

    def lose(self, *indices: int) -> None:
        """Loses machines with their disks, and starts empty shards at their addresses."""
        for index in indices:
            self.machines[index].lose(self._running[index])
        for index in indices:
            self._running[index] = self._stack.enter_context(self.machines[index].running())


def same(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


MOMENTS: dict[str, dict[int, list[Stop]]] = {
    "before a push": {0: [("push", AT, 1)], 1: [("push", AT, 1)]},
    "while pushes leave": {0: [("push", AT, 3)], 1: [("push", AT, 2)]},
    "between push and pull": {0: [("run", AT, 1)], 1: [("run", AT, 1)]},
    "one has not read the answers": {1: [("run", AT, 1)]},
    "one has not pushed all": {1: [("push", AT, 3)]},
    "one is a step ahead": {0: [("push", AT + 1, 2)], 1: [("run", AT, 1)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("data_plane", ["local", "tcp", "grpc"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_shard_is_filled_by_the_workers_and_no_bit_differs(
    moment: str, data_plane: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster, stops = Cluster(tmp_path, stack), MOMENTS[moment]
        workers = cluster.start(stops, data_plane)
        for rank in stops:
            workers[rank].hear()
        cluster.lose(len(moment) % 2)
        for rank in stops:
            workers[rank].tell()
        first, second = results_of(workers)
    assert same(first, second)
    assert same(first, train_alone())


@pytest.mark.slow
@pytest.mark.parametrize("again", ["fill", "send_again"])
def test_the_shard_is_lost_again_while_it_is_filled(again: str, tmp_path: Path) -> None:
    """Before the second worker has brought its slices, and when all have brought theirs."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        workers = cluster.start({0: [("run", AT, 1), (again, 0, 1)], 1: [("run", AT, 1)]})
        for worker in workers:
            worker.hear()
        cluster.lose(1)
        for worker in workers:
            worker.tell()
        assert workers[0].hear() == again
        cluster.lose(1)
        workers[0].tell()
        first, second = results_of(workers)
    assert same(first, second)
    assert same(first, train_alone())


@pytest.mark.slow
def test_all_shards_are_lost_at_once_and_the_first_while_others_agree(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        workers = cluster.start({1: [("agree_at", AT, 1), ("push", AT + 3, 2)]}, clips=True)
        for shards in ((0,), (1, 0)):
            workers[1].hear()
            cluster.lose(*shards)
            workers[1].tell()
        first, second = results_of(workers)
    assert same(first, second)
    assert same(first, train_alone())


@pytest.mark.slow
def test_a_worker_that_is_lost_as_well_takes_its_part_of_the_step_with_it(tmp_path: Path) -> None:
    """No other step is touched: each element is that of a run without it from then or the next."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, lease_s=4)
        workers = cluster.start({0: [("run", AT, 1)], 1: [("run", AT, 1)]})
        for worker in workers:
            worker.hear()
        workers[1].kill()
        cluster.lose(1)
        workers[0].tell()
        weights = workers[0].result()
    for found, without, counted in zip(weights, train_alone(AT), train_alone(AT + 1), strict=True):
        assert ((found == without) | (found == counted)).all()
        assert (found == without).any()
