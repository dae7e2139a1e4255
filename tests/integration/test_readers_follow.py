"""Readers of published weights follow a shard that moves, or is taken over by its standby."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import psworker
from pscore.publish.codec import round_to_bf16
from psserver.remote import ask
from tests.integration.test_drain import STEPS, Place, Scene
from tests.integration.test_standby import lose, stand

WAIT_S = 120.0
PAUSE = 30


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Processes that publish each update; workers that wait after a step."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=PAUSE, more=["--publish", "night:every=1"])
        scene.reach(PAUSE)
        yield scene


@pytest.fixture
def subscriber(scene: Scene) -> Iterator[psworker.Subscriber]:
    """A reader that has the version of that step."""
    servers = f"{scene.first.address},{scene.second.address}"
    with psworker.Subscriber(servers, job="night", dtype="bf16") as subscriber:
        weights = subscriber.wait(timeout_s=WAIT_S)
        while weights.step < PAUSE:
            weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
        yield subscriber


def require_the_rest(scene: Scene, subscriber: psworker.Subscriber) -> None:
    """Sends the workers on, and requires versions of one lineage, the last one that of the end."""
    lineage, number = subscriber.wait().version
    for worker in scene.workers:
        worker.tell()
    (clock, expected), _ = scene.results()
    assert clock == STEPS
    weights = subscriber.wait(timeout_s=WAIT_S)
    while weights.step < STEPS:
        assert weights.version.lineage == lineage
        assert weights.version.number >= number
        number = weights.version.number
        weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
    assert weights.version.lineage == lineage
    found = np.concatenate([weights.arrays[str(number)].reshape(-1) for number in range(4)])
    wanted = round_to_bf16(np.array(expected, np.float32))
    np.testing.assert_array_equal(found[:: 1 << 10], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("asks", [False, True])
def test_a_shard_moves_and_its_old_process_is_stopped_readers_go_on(
    asks: bool, scene: Scene, subscriber: psworker.Subscriber
) -> None:
    """Also a reader that asks nothing between the move and the end."""
    scene.drain()
    if asks:
        subscriber.wait(timeout_s=WAIT_S)
    ask.drain([scene.second.address], 1.0)
    assert scene.source.wait(60) == 0
    require_the_rest(scene, subscriber)


@pytest.mark.slow
@pytest.mark.parametrize(("asks", "is_back"), [(False, False), (True, False), (True, True)])
def test_a_machine_is_lost_and_readers_go_on_with_its_standby(
    asks: bool, is_back: bool, tmp_path: Path, scene: Scene, subscriber: psworker.Subscriber
) -> None:
    (tmp_path / "register").mkdir()
    stand(scene, str(tmp_path / "register"))
    if asks:
        subscriber.wait(timeout_s=WAIT_S)
    lose(scene.source)
    if is_back:
        port = int(scene.second.address.rpartition(":")[2])
        scene.stack.enter_context(Place(tmp_path, 1, port, "back").running())
    require_the_rest(scene, subscriber)
