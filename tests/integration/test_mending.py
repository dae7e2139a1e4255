"""A shard that comes back without its state folder: all go back to the newest checkpoint."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import psworker
from pscore.pb.ps.v1.control_pb2 import StatusReply
from psserver.mending.losses import torn
from psserver.remote import ask
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.command import Command, eventually, free_ports
from tests.integration.machines import Machine, addresses_of_two

DEADLINE_S = 200.0


def count(station: Station, numel: int) -> tuple[int, set[float]]:
    """Subtracts 1 from each weight at each step, and says each step, until told to end.

    Args:
        numel: The elements of each of two parameters.

    Returns:
        Its clock, and the weights' values.
    """
    parts = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(2)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(torch.optim.SGD(parts, lr=1.0), named)
    while not is_told(station):
        for part in parts:
            part.grad = torch.ones_like(part)
        optimizer.step()
        station.tell(optimizer.clock)
        time.sleep(0.01)
    optimizer.close()
    values = {value for part in parts for value in part.detach().tolist()}
    return optimizer.clock, values


def is_told(station: Station) -> bool:
    """Returns whether the test has told this worker to end, or another process of its group."""
    told = torch.tensor(float(station.is_told()))
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(told)
    return bool(told)


def count_in_group(station: Station, numel: int) -> tuple[int, set[float]]:
    """Does what `count` does, as one of two processes that are one worker."""
    torch.distributed.init_process_group("gloo")
    return count(station, numel)


def reach(workers: list[Worker], step: int) -> None:
    for worker in workers:
        while worker.hear(DEADLINE_S) < step:
            pass


def mended(addresses: list[str]) -> list[StatusReply]:
    """Returns the status of all shards once the last has been mended; nothing until then."""
    found = [one for one in ask.answers(addresses) if isinstance(one, StatusReply)]
    return found if len(found) == len(addresses) and found[-1].num_mended else []


def with_jobs(addresses: list[str]) -> list[StatusReply]:
    """Returns the status of all shards if each has the job; else nothing."""
    found = [one for one in ask.answers(addresses) if isinstance(one, StatusReply)]
    return found if [len(one.jobs) for one in found] == [1] * len(addresses) else []


def start_workers(
    addresses: list[str], stack: ExitStack, numel: int = 1 << 18, *, in_group: bool = False
) -> list[Worker]:
    names = {"WORLD_SIZE": "2", "PACELINE_JOB": "night", "PACELINE_TIMEOUT_S": "120"}
    names["PACELINE_SERVERS"] = ",".join(addresses)
    if in_group:
        names |= {"PACELINE_GROUP": "0", "PACELINE_NUM_GROUPS": "1"}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    work = count_in_group if in_group else count
    workers = [
        Worker(work, rank, (numel,), {**names, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    for worker in workers:
        stack.callback(worker.close)
    return workers


@pytest.mark.slow
def test_a_shard_that_comes_back_empty_is_restored_and_the_workers_go_on(tmp_path: Path) -> None:
    addresses = addresses_of_two()
    first, second = (Machine(tmp_path, index, addresses) for index in range(2))
    with ExitStack() as stack:
        stack.enter_context(first.running())
        lost = stack.enter_context(second.running())
        workers = start_workers(addresses, stack)
        reach(workers, 20)
        # The second is written when the one who mends has seen the job for a while.
        eventually(lambda: any((first.state / "checkpoints").glob("night-*2")))
        second.lose(lost)
        assert not any(worker.is_over() for worker in workers)  # Drops what they have told so far.
        stack.enter_context(second.running())
        statuses = eventually(lambda: mended(addresses))
        assert [status.num_mended for status in statuses] == [1, 1]
        reach(workers, 2 * max(worker.hear(DEADLINE_S) for worker in workers))
        for worker in workers:
            worker.tell()
        for clock, values in results_of(workers):
            assert values == {-clock}  # No shard is ahead of the other, or of the workers.


@pytest.mark.slow
@pytest.mark.parametrize(("how", "in_group"), [("crash", False), ("lose", False), ("lose", True)])
def test_a_shard_without_a_slice_comes_back_and_the_job_is_not_set_back(
    how: str, in_group: bool, tmp_path: Path
) -> None:
    """Of a small model; a crash leaves a journal that another boot does not believe."""
    addresses = addresses_of_two()
    first, second = (Machine(tmp_path, index, addresses) for index in range(2))
    with ExitStack() as stack:
        stack.enter_context(first.running())
        there = stack.enter_context(second.running())
        workers = start_workers(addresses, stack, numel=10, in_group=in_group)
        reach(workers, 20)
        eventually(lambda: any((first.state / "checkpoints").glob("night-*")))

        def back() -> list[StatusReply]:
            """Returns what `with_jobs` does; drops what workers tell, who wait for room else."""
            assert not any([worker.is_over() for worker in workers])
            return with_jobs(addresses)

        getattr(second, how)(there)
        back()
        stack.enter_context(second.running())
        found = eventually(back)
        reach(workers, 2 * max(worker.hear(DEADLINE_S) for worker in workers))
        found += with_jobs(addresses)
        assert [(one.num_mended, len(one.lost)) for one in found] == [(0, 0)] * 4
        for worker in workers:
            worker.tell()
        for clock, values in results_of(workers):
            assert values == {-clock}


@pytest.mark.slow
def test_the_machine_with_all_checkpoints_is_lost_and_a_second_place_has_them(
    tmp_path: Path,
) -> None:
    addresses, copies = addresses_of_two(), tmp_path / "elsewhere"
    first, second = (Machine(tmp_path, index, addresses, copies) for index in range(2))
    with ExitStack() as stack:
        lost = stack.enter_context(first.running())
        stack.enter_context(second.running())
        workers = start_workers(addresses, stack)
        reach(workers, 20)
        eventually(lambda: any(copies.glob("night-*")))
        eventually(lambda: copies_of(addresses[0]) == (str(copies), ""))
        first.lose(lost)
        assert not any(worker.is_over() for worker in workers)  # Drops what they have told so far.
        stack.enter_context(first.running())
        statuses = eventually(lambda: mended(addresses))
        assert statuses[-1].num_mended == 1
        reach(workers, 2 * max(worker.hear(DEADLINE_S) for worker in workers))
        for worker in workers:
            worker.tell()
        for clock, values in results_of(workers):
            assert values == {-clock}  # No shard is ahead of the other, or of the workers.


@pytest.mark.slow
def test_a_shard_that_lost_its_folder_while_all_were_down_is_restored_by_the_command(
    tmp_path: Path,
) -> None:
    """As after `docker compose down` and the loss of a volume; the workers are there and wait."""
    addresses = addresses_of_two()
    first, second = (Machine(tmp_path, index, addresses) for index in range(2))
    with ExitStack() as stack:
        there = [stack.enter_context(machine.running()) for machine in (first, second)]
        workers = start_workers(addresses, stack)
        reach(workers, 20)
        eventually(lambda: any((first.state / "checkpoints").glob("night-*")))
        there[0].terminate()
        there[0].wait()
        second.lose(there[1])
        for machine in (first, second):
            stack.enter_context(machine.running())
        eventually(lambda: is_torn(addresses))
        assert not any(worker.is_over() for worker in workers)  # Drops what they have told so far.
        words = ("--job", "night", "--servers", ",".join(addresses))
        command, folder = Command(tmp_path), first.state / "checkpoints"
        refused = command.run("restore", folder, "--servers", addresses[0], code=2)
        assert "is shard 0 of 2, and the list of servers has it as shard 0 of 1" in refused.stderr
        command.run("restore", folder, *words)
        reach(workers, 2 * max(worker.hear(DEADLINE_S) for worker in workers))
        for worker in workers:
            worker.tell()
        for clock, values in results_of(workers):
            assert values == {-clock}  # No shard is ahead of the other, or of the workers.


def is_torn(addresses: list[str]) -> bool:
    """Returns whether one of two shards has the weights, and the workers have found the other."""
    found = [one for one in ask.answers(addresses) if isinstance(one, StatusReply)]
    return [bool(torn(found)), *(len(one.jobs) for one in found)] == [True, 1, 1]


def copies_of(address: str) -> tuple[str, str]:
    """Returns the second place that a shard reports, and its problem."""
    (status,) = ask.answers([address])
    assert isinstance(status, StatusReply)
    return status.copies.place, status.copies.problem
