"""A shard that comes back empty is filled by the workers, where they run the optimizer.

Real processes are killed, and the folder of a machine is deleted, in the moments that matter. The
weights are then those of a run without a fault, bit for bit.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.pb.ps.v1.control_pb2 import StatusReply
from psserver.remote import ask
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.exchange.refills import Refills
from psworker.connection.membership.session import Session
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.machines import Machine, addresses_of_two

STEPS, AT = 14, 6
NUMEL = 3 << 19  # Of each tensor: several slices on each shard.
RANKS = (0, 1)
Stop = tuple[str, int, int]  # A method, a step, and which call from then on.
OWNERS = {"meet_or_pass": Session, "fill": Refills, "send_again": Refills}  # Else `Exchange`.
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

    def set_between_answers(self, number: int) -> None:
        """Does so before one of the answers is waited for; all have been requested."""
        original, station, places = Exchange.run, self._station, itertools.count()

        def pausing(waits: Iterable[int]) -> Iterator[int]:
            for index in waits:
                if next(places) == number:
                    station.tell("answers")
                    station.hear()
                yield index

        def run(self: Exchange, waits: Iterable[int]) -> None:
            original(self, pausing(waits))

        Exchange.run = run  # type: ignore[method-assign]


def set_stops(station: Station, stops: list[Stop], step: int) -> None:
    """Makes the calls of a step wait for the test."""
    for name, at, number in stops:
        if at == step and name == "answers":
            Stops(station).set_between_answers(number)
        elif at == step:
            Stops(station).set(name, number)


def gradient(weight: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Returns a gradient that depends on the weights, so that no lost step can be hidden."""
    noise = torch.Generator().manual_seed(100 * step + rank)
    return 0.1 * weight + torch.randn(weight.shape, generator=noise)


def train(station: Station, stops: list[Stop], meets: bool = False) -> Weights:
    """Trains all steps; some calls wait for the test."""
    torch.set_num_threads(1)
    parts = [torch.nn.Parameter(torch.full((NUMEL,), 1.0 + number)) for number in range(2)]
    inner = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(inner, named, optimizer_on="worker")
    for step in range(STEPS):
        for part in parts:
            part.grad = gradient(part.detach(), station.rank, step)
        set_stops(station, stops, step)
        if meets:
            psworker.barrier()
        optimizer.step()
    optimizer.close()
    return [part.detach().numpy().copy() for part in parts]


def train_rounds(station: Station, mode: str, stops: list[Stop]) -> Weights:
    """Trains in a mode with rounds of two steps; returns the shards' weights at the end."""
    torch.set_num_threads(1)
    parts = [torch.nn.Parameter(torch.full((NUMEL,), 1.0 + number)) for number in range(2)]
    inner = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(inner, named, mode=mode, optimizer_on="worker")
    for step in range(STEPS):
        for part in parts:
            part.grad = gradient(part.detach(), station.rank, step)
        set_stops(station, stops, step)
        optimizer.step()
    optimizer.close()
    return [part.detach().numpy().copy() for part in parts]


def train_with_buffers(station: Station) -> list[np.ndarray]:
    """Trains a model with BatchNorm; returns the shared buffers as both see them, and weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300_000), torch.nn.BatchNorm1d(300_000))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(
        inner, model.named_parameters(), optimizer_on="worker", model=model
    )
    for step in range(STEPS):
        if step == AT:
            station.tell()
            station.hear()
        data = torch.Generator().manual_seed(2 * step + station.rank)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(4, 8, generator=data)).square().mean())
        optimizer.step()
    psworker.barrier()
    with optimizer.global_weights():
        return [tensor.detach().numpy().copy() for tensor in model.state_dict().values()]


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
        self, stops: dict[int, list[Stop]], data_plane: str = "auto", *, meets: bool = False
    ) -> list[Worker]:
        args = [(stops.get(rank, []), meets) for rank in RANKS]
        return self.start_all(train, "night", args, data_plane)

    def start_all(
        self,
        function: Callable[..., Any],
        job: str,
        args: Sequence[tuple[Any, ...]] = ((), ()),
        data_plane: str = "auto",
    ) -> list[Worker]:
        names = {"WORLD_SIZE": "2", "PACELINE_JOB": job, "PACELINE_TIMEOUT_S": "120"}
        names |= {"PACELINE_SERVERS": ",".join(self.addresses), "PACELINE_DATA_PLANE": data_plane}
        workers = []
        for rank in RANKS:
            workers.append(Worker(function, rank, args[rank], {**names, "RANK": str(rank)}))
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
    "between push and pull": {0: [("answers", AT, 1)], 1: [("answers", AT, 2)]},
    "one has read one answer": {1: [("answers", AT, 1)]},
    "one has not pushed all": {1: [("push", AT, 3)]},
    "one is a step ahead": {0: [("push", AT + 1, 2)], 1: [("answers", AT, 1)]},
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
        workers = cluster.start({0: [("answers", AT, 1), (again, 0, 1)], 1: [("answers", AT, 1)]})
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
def test_the_first_shard_is_lost_at_a_barrier_and_then_all_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        workers = cluster.start({1: [("meet_or_pass", AT, 1), ("push", AT + 3, 2)]}, meets=True)
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
        cluster = Cluster(tmp_path, stack, lease_s=10)  # A healthy worker keeps it.
        workers = cluster.start({0: [("push", AT, 1)], 1: [("answers", AT, 0)]}, "tcp")
        for worker in workers:
            worker.hear()
        workers[1].kill()
        cluster.lose(1)
        workers[0].tell()
        weights = workers[0].result()
    for found, without, counted in zip(weights, train_alone(AT), train_alone(AT + 1), strict=True):
        assert ((found == without) | (found == counted)).all()
        assert (found == without).any()


@pytest.mark.slow
def test_buffers_that_workers_share_are_brought_too(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        undisturbed, disturbed = [
            cluster.start_all(train_with_buffers, job) for job in ("calm", "night")
        ]
        for worker in (*undisturbed, *disturbed):
            worker.hear()
        for worker in undisturbed:
            worker.tell()
        expected = results_of(undisturbed)
        cluster.lose(0)
        for worker in disturbed:
            worker.tell()
        found = results_of(disturbed)
    assert all(same(found[rank], expected[rank]) for rank in RANKS)
    assert same(found[0], found[1])


ENDS = 7  # A step that ends a round of two.
IN_ROUNDS: dict[str, dict[int, list[Stop]]] = {
    "before the moves": {0: [("push", ENDS, 1)], 1: [("push", ENDS, 1)]},
    "while moves leave": {0: [("push", ENDS, 2)], 1: [("push", ENDS, 1)]},
    "between moves and answers": {0: [("answers", ENDS, 1)], 1: [("answers", ENDS, 1)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", IN_ROUNDS)
@pytest.mark.parametrize(
    "mode", ["diloco(steps=2)", "slowmo(steps=2)", "local(steps=2)", "diloco(steps=2, fragments=2)"]
)
def test_in_rounds_the_outer_state_is_brought_too(mode: str, moment: str, tmp_path: Path) -> None:
    """Scheduled checkpoints are taken, and none of them is restored."""
    with ExitStack() as stack:
        cluster, stops = Cluster(tmp_path, stack), IN_ROUNDS[moment]
        expected = results_of(cluster.start_all(train_rounds, "calm", [(mode, [])] * 2))
        args = [(mode, stops[rank]) for rank in RANKS]
        workers = cluster.start_all(train_rounds, "night", args)
        for worker in workers:
            worker.hear()
        cluster.lose(len(moment) % 2)
        for worker in workers:
            worker.tell()
        found = results_of(workers)
        statuses = ask.answers(cluster.addresses)
        assert [one.num_mended for one in statuses if isinstance(one, StatusReply)] == [0, 0]
    assert all(same(found[rank], expected[rank]) for rank in RANKS)
    assert same(found[0], found[1])
