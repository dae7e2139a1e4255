"""Jobs that begin and end while their shards move, and shards that move at the same time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from pscore.net.credentials import ANYONE
from psserver.exits import CommandError
from psserver.remote.drain import move
from tests.integration.cluster import Worker
from tests.integration.command import Command, eventually, free_ports
from tests.integration.test_drain import (
    STEPS,
    Place,
    Results,
    Scene,
    is_well,
    kill_child,
    status_of,
    train,
    undisturbed,
)
from tests.integration.test_standby_faults import PAUSE, finish, scene

__all__ = ["scene", "undisturbed"]  # The fixtures.


def jobs_at(address: str) -> dict[str, str]:
    """Returns the states of a shard's jobs by name."""
    return {job.job: job.state for job in status_of(address).jobs}


@pytest.mark.slow
@pytest.mark.parametrize("is_forgotten", [False, True], ids=["kept", "forgotten"])
def test_a_job_ends_and_another_begins_while_a_shard_is_copied(
    is_forgotten: bool, tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    others: list[Worker] = []

    def meanwhile(phase: str) -> None:
        if phase != "copying":
            return
        others.extend(scene.begin("other", train, STEPS, PAUSE))
        assert others[0].hear()
        assert finish(scene) == undisturbed
        if is_forgotten:
            servers = f"{scene.first.address},{scene.second.address}"
            Command(tmp_path).run("forget", "night", "--servers", servers)
        assert "copying" in status_of(scene.second.address).moving

    scene.drain(1, meanwhile)
    wanted = {"other": "live"} if is_forgotten else {"night": "ended", "other": "live"}
    assert jobs_at(scene.empty.address) == wanted
    kill_child(scene.target)
    eventually(lambda: is_well(scene.empty.address))
    assert jobs_at(scene.empty.address) == wanted
    for worker in others:
        worker.tell()
    assert [worker.result() for worker in others] == undisturbed


@pytest.mark.slow
def test_a_job_that_has_ended_elsewhere_does_not_come_back_with_the_shard(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    scene.drain()
    assert finish(scene) == undisturbed
    servers = f"{scene.first.address},{scene.second.address}"
    Command(tmp_path).run("forget", "night", "--servers", servers)
    kill_child(scene.source)  # It comes back without jobs, so that it may have the shard again.
    eventually(lambda: is_well(scene.second.address))
    move(scene.empty.address, scene.second.address, 0, ANYONE, print)
    assert jobs_at(scene.second.address) == {}


@pytest.fixture
def third(tmp_path: Path, scene: Scene) -> Iterator[Place]:
    """An empty process for the first shard."""
    with ExitStack() as stack:
        place = Place(tmp_path, 0, free_ports(1)[0], "d")
        stack.enter_context(place.running())
        yield place


@pytest.mark.slow
def test_two_shards_move_at_the_same_time_and_each_order_may_be_given_twice(
    third: Place, scene: Scene, undisturbed: Results
) -> None:
    moves = [(scene.first, third), (scene.second, scene.empty)]
    with ThreadPoolExecutor(4) as pool:
        orders = [
            pool.submit(move, here.address, there.address, 8, ANYONE, print)
            for here, there in moves * 2
        ]
        for order in orders:
            assert order.result().pause_s > 0
    with pytest.raises(CommandError, match="cannot be moved now: it is moved"):
        move(scene.second.address, third.address, 0, ANYONE, print)
    assert finish(scene) == undisturbed
    assert [jobs_at(there.address) for _, there in moves] == [{"night": "ended"}] * 2
