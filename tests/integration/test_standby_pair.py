"""Two places of a shard (`--standby-at`, `--standby-of`): one has it, the other is its standby."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest

from psserver.exits import CommandError
from tests.integration.cluster import Worker
from tests.integration.command import Command, eventually, free_ports
from tests.integration.test_drain import (
    STEPS,
    Place,
    Results,
    kill_child,
    status_of,
    train,
    undisturbed,
)
from tests.integration.test_standby import lose, register

__all__ = ["register", "undisturbed"]  # The fixtures.
AT = 30  # Workers wait after this step.


class Pair:
    """Two shards; the second has two places that know each other. Two workers wait after `AT`."""

    def __init__(self, folder: Path, register: Path, stack: ExitStack) -> None:
        ports = free_ports(3)
        self.folder, self._register, self.stack = folder, register, stack
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.first = Place(folder, 0, ports[0], "a")
        self.places: dict[int, Place] = {}
        stack.enter_context(self.first.running())
        self.running = [self.start(1, "b"), self.start(2, "c")]
        self.command = Command(folder)

    def start(self, place: int, name: str) -> Popen[str]:
        """Starts the process of a place of the second shard, in an empty folder of that name."""
        own, other = self.addresses[place], self.addresses[3 - place]
        words = ["--standby-at" if place == 1 else "--standby-of", other, "--own-address", own]
        words += ["--standby-register", str(self._register), "--failover-s", "1"]
        port = int(own.rpartition(":")[2])
        self.places[place] = Place(self.folder, 1, port, name, *words)
        return self.stack.enter_context(self.places[place].running())

    def train(self, job: str = "night", pause: int = AT) -> list[Worker]:
        """Starts two workers, which know the first place of each shard."""
        names = {"WORLD_SIZE": "2", "PACELINE_JOB": job, "PACELINE_TIMEOUT_S": "60"}
        names["PACELINE_SERVERS"] = ",".join(self.addresses[:2])
        workers = [
            Worker(train, rank, (STEPS, pause), {**names, "RANK": str(rank)}) for rank in range(2)
        ]
        for worker in workers:
            self.stack.callback(worker.close)
        return workers

    def stands_by(self, place: int) -> bool:
        """Returns whether the shard is at the other place, with this one as its standby."""
        try:
            there = status_of(self.addresses[3 - place])
        except CommandError:
            return False
        return there.moving.startswith(f"followed, to {self.addresses[place]}")


@pytest.fixture
def pair(tmp_path: Path, register: Path) -> Iterator[Pair]:
    """A second shard whose second place is its standby before there is a job."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, register, stack)
        eventually(lambda: pair.stands_by(2))
        yield pair


def reach(workers: list[Worker], step: int) -> None:
    for worker in workers:
        while worker.hear() < step:
            pass


def results(workers: list[Worker]) -> Results:
    for worker in workers:
        worker.tell()
    return [worker.result() for worker in workers]


def hold(pair: Pair, place: int) -> None:
    """Gives the shard to one of its places; the other one is its standby then."""
    if place == 2:
        pair.command.run("drain", "--servers", pair.addresses[1])
        eventually(lambda: pair.stands_by(1))


@pytest.mark.slow
def test_the_shard_moves_to_its_second_place_and_back(pair: Pair, undisturbed: Results) -> None:
    workers = pair.train()
    reach(workers, 10)
    pair.command.run("drain", "--servers", pair.addresses[1])
    pair.running[0].terminate()  # As a pod whose node is drained.
    pair.running[0].wait()
    reach(workers, AT)
    pair.stack.enter_context(pair.places[1].running())
    eventually(lambda: pair.stands_by(1))
    pair.command.run("drain", "--servers", pair.addresses[2])
    eventually(lambda: pair.stands_by(2))  # Without a new process.
    assert results(workers) == undisturbed


@pytest.mark.slow
def test_the_shard_moves_back_to_the_process_from_which_it_has_come(
    pair: Pair, undisturbed: Results
) -> None:
    """That had closed its data sockets, and no worker could make another step."""
    workers = pair.train()
    reach(workers, AT)
    pair.command.run("drain", "--servers", pair.addresses[1])
    eventually(lambda: pair.stands_by(1))
    pair.command.run("drain", "--servers", pair.addresses[2])
    eventually(lambda: pair.stands_by(2))
    assert results(workers) == undisturbed


@pytest.mark.slow
def test_the_first_place_is_lost_and_an_empty_one_leads_to_the_second(
    pair: Pair, undisturbed: Results
) -> None:
    workers = pair.train()
    reach(workers, AT)
    lose(pair.running[0])
    eventually(lambda: "was silent" in status_of(pair.addresses[2]).moving)
    pair.start(1, "again")
    eventually(lambda: pair.stands_by(1))
    others = pair.train("other", pause=0)  # They know the first place alone.
    assert [worker.result() for worker in others] == undisturbed
    lose(pair.running[1])
    assert results(workers) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("holder", "order"), [(1, (2, 1)), (2, (1, 2))])
def test_both_places_are_stopped_at_once_and_come_back_one_after_the_other(
    holder: int, order: tuple[int, int], pair: Pair, undisturbed: Results
) -> None:
    workers = pair.train()
    reach(workers, 10)
    hold(pair, holder)
    for process in pair.running:
        process.terminate()
    for process in pair.running:
        process.wait()
    for place in order:
        pair.stack.enter_context(pair.places[place].running())
    assert results(workers) == undisturbed


def roll(pair: Pair, place: int) -> str:
    """Ends a place and starts it again, as a pod with another image; returns what drain said."""
    command = Command(pair.folder / f"roll{place}")
    said = command.run("drain", "--wait-s", 150, "--servers", pair.addresses[place]).stdout
    process = pair.running[place - 1]
    process.terminate()
    process.wait()
    pair.running[place - 1] = pair.stack.enter_context(pair.places[place].running())
    return said


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the one that waits", "the one that is filled"])
def test_a_place_is_killed_while_both_are_replaced(
    victim: str, pair: Pair, undisturbed: Results
) -> None:
    workers, former = pair.train(), pair.running[1]
    reach(workers, 10)
    with ThreadPoolExecutor() as pool:
        said = [pool.submit(roll, pair, place) for place in (1, 2)]
        if victim == "the one that waits":
            eventually(lambda: former.poll() is not None)
            kill_child(pair.running[0])
        else:
            eventually(lambda: pair.running[1] is not former)
            kill_child(pair.running[1])
    assert f"shard moved to {pair.addresses[2]}" in said[0].result()
    assert results(workers) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("holder", [1, 2])
def test_both_places_are_replaced_at_once_and_one_of_them_always_has_the_shard(
    holder: int, pair: Pair, undisturbed: Results
) -> None:
    workers = pair.train()
    reach(workers, 10)
    hold(pair, holder)
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(partial(roll, pair), (1, 2)))
    assert f"shard moved to {pair.addresses[3 - holder]}" in said[holder - 1]
    eventually(lambda: pair.stands_by(holder))
    assert results(workers) == undisturbed
