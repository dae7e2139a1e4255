"""A shard with a standby: each of the two processes is killed, and nothing answered is lost."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from pscore.net.credentials import ANYONE
from psserver.exits import CommandError
from psserver.remote.drain import move, promote
from tests.integration.command import eventually
from tests.integration.test_drain import Scene, is_well, kill_child, status_of, undisturbed

__all__ = ["undisturbed"]  # The fixture.


def stand(scene: Scene) -> None:
    move(scene.second.address, scene.empty.address, 0, ANYONE, print, stays=True)


def promoted(address: str) -> bool:
    """Returns whether a standby serves; it refuses while its shard's process lives."""
    try:
        return promote(address, ANYONE) == ["night"]
    except CommandError:
        return False


@pytest.mark.slow
def test_a_machine_is_lost_and_its_standby_is_promoted_bits_stay(
    tmp_path: Path, undisturbed: list[tuple[int, list[float]]]
) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.reach(10)
        stand(scene)
        with pytest.raises(CommandError, match="still sends"):
            promote(scene.empty.address, ANYONE)
        scene.reach(20)
        scene.source.kill()  # Its shard ends with it: nothing starts another one.
        eventually(lambda: promoted(scene.empty.address))
        assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_standby_is_killed_and_the_shard_goes_on_and_gets_it_back(
    tmp_path: Path, undisturbed: list[tuple[int, list[float]]]
) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.reach(10)
        stand(scene)
        kill_child(scene.target)
        scene.reach(20)
        eventually(lambda: "followed" in status_of(scene.second.address).moving)
        move(scene.second.address, scene.empty.address, 0, ANYONE, print)  # To the standby.
        assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_shard_with_a_standby_is_killed_and_comes_back_or_finds_it_promoted(
    tmp_path: Path, undisturbed: list[tuple[int, list[float]]]
) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.reach(10)
        stand(scene)
        kill_child(scene.source)
        scene.reach(20)
        eventually(lambda: "followed" in status_of(scene.second.address).moving)
        scene.reach(30)
        assert scene.results() == undisturbed
        assert is_well(scene.empty.address)
