"""A shard with a standby: each of the two processes is killed, and nothing answered is lost."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.standby_pb2 import MoveRequest
from psserver.exits import CommandError
from psserver.remote.checkpoint_files import newest
from psserver.remote.drain import move, promote
from tests.etcd import running_etcd
from tests.integration.command import Command, eventually, gone
from tests.integration.test_drain import (
    Place,
    Results,
    Scene,
    is_well,
    kill_child,
    scene,
    status_of,
    undisturbed,
)

__all__ = ["scene", "undisturbed"]  # The fixtures.


def stand(scene: Scene, register: str = "") -> list[str]:
    """Makes the empty process the standby of the second shard; returns what that said."""
    said: list[str] = []
    here, there = scene.second.address, scene.empty.address
    wanted = MoveRequest(same_host=True, register=register, failover_s=1.0 if register else 0.0)
    move(here, there, 0, ANYONE, said.append, standby=wanted)
    return said


def lose(supervisor: Popen[str]) -> None:
    """Kills a shard's process and its supervisor at once, as the loss of a machine does."""
    children = psutil.Process(supervisor.pid).children()
    supervisor.send_signal(signal.SIGSTOP)
    for child in children:
        child.kill()
    supervisor.kill()
    for child in children:  # Another process may take its port then.
        eventually(lambda child=child: gone(child.pid))  # type: ignore[misc]


def follows(scene: Scene) -> bool:
    """Returns whether the second shard serves, and has a standby."""
    return is_well(scene.second.address) and "followed" in status_of(scene.second.address).moving


def promoted(address: str) -> bool:
    """Returns whether a standby serves; it refuses while its shard's process lives."""
    try:
        return promote(address, ANYONE) == ["night"]
    except CommandError:
        return False


@pytest.fixture
def register(tmp_path: Path) -> Path:
    """An empty folder, in which shard and standby make claims."""
    (tmp_path / "register").mkdir()
    return tmp_path / "register"


@pytest.mark.slow
def test_a_machine_is_lost_and_its_standby_is_promoted_bits_stay(
    scene: Scene, undisturbed: Results
) -> None:
    with pytest.raises(CommandError, match="on the shard's host"):
        move(scene.second.address, scene.empty.address, 0, ANYONE, print, standby=MoveRequest())
    assert re.match(r"the standby needs \d+\.\d MB of memory, and .* Mbit/s", stand(scene)[0])
    with pytest.raises(CommandError, match="still sends"):
        promote(scene.empty.address, ANYONE)
    scene.reach(20)
    lose(scene.source)
    eventually(lambda: promoted(scene.empty.address))
    assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_standby_is_killed_and_the_shard_goes_on_and_gets_it_back(
    scene: Scene, undisturbed: Results
) -> None:
    stand(scene)
    kill_child(scene.target)
    eventually(lambda: "followed" not in status_of(scene.second.address).moving)
    scene.reach(20)
    eventually(lambda: follows(scene))
    move(scene.second.address, scene.empty.address, 0, ANYONE, print)  # To the standby.
    assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_shard_with_a_standby_is_killed_and_comes_back_or_finds_it_promoted(
    scene: Scene, undisturbed: Results
) -> None:
    stand(scene)
    kill_child(scene.source)
    scene.reach(20)
    eventually(lambda: follows(scene))
    scene.reach(30)
    assert scene.results() == undisturbed
    assert is_well(scene.empty.address)


@pytest.mark.slow
@pytest.mark.parametrize("has_register", [False, True])
def test_a_standby_is_withdrawn_and_the_shard_wants_none_also_after_a_kill(
    has_register: bool, tmp_path: Path, register: Path, scene: Scene, undisturbed: Results
) -> None:
    place, command = str(register) if has_register else "", Command(tmp_path)
    words = ("standby", "--withdraw", "--servers", scene.second.address)
    stand(scene, place)
    assert "has no standby, and wants none" in command.run(*words).stdout
    ended = status_of(scene.second.address).moving
    assert ended == "no standby is wanted" + ("; epoch 3" if has_register else "")
    assert "no standby of this shard is wanted" in command.run(*words, code=1).stderr
    kill_child(scene.source)
    eventually(lambda: is_well(scene.second.address))
    assert not follows(scene)
    stand(scene, place)  # A person may change their mind.
    assert follows(scene)
    assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_machine_is_lost_and_its_standby_takes_over_without_a_person_bits_stay(
    register: Path, scene: Scene, undisturbed: Results
) -> None:
    stand(scene, str(register))
    scene.reach(20)
    lose(scene.source)
    assert scene.results() == undisturbed
    eventually(lambda: "was silent 1.0 s" in status_of(scene.empty.address).moving)


@pytest.mark.slow
def test_a_standby_takes_over_by_a_register_in_etcd_bits_stay(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    with running_etcd(tmp_path / "etcd") as url:
        stand(scene, f"{url}/night")
        scene.reach(20)
        lose(scene.source)
        assert scene.results() == undisturbed
        eventually(lambda: "was silent 1.0 s" in status_of(scene.empty.address).moving)


def schedule_of(scene: Scene) -> psutil.Process:
    """Returns the process that takes checkpoints, and restores what is lost."""

    def found() -> list[psutil.Process]:
        children = psutil.Process(scene.starts[0].pid).children()
        return [child for child in children if "schedule" in child.cmdline()[:5]]

    return eventually(found)[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["runs", "is stopped meanwhile", "is killed afterwards"])
def test_a_machine_that_comes_back_empty_does_not_set_back_a_job_that_its_standby_has(
    schedule: str, tmp_path: Path, register: Path, undisturbed: Results
) -> None:
    def saved() -> int:
        found = newest(tmp_path / "a" / "state" / "checkpoints").get("night", ())
        return max((one.sequence for one in found), default=0)

    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=30)
        scene.reach(10)
        eventually(saved)
        keeper = schedule_of(scene)
        if schedule == "is stopped meanwhile":
            keeper.suspend()
        stand(scene, str(register))
        scene.reach(30)
        lose(scene.source)
        here, port = scene.second.address, int(scene.second.address.rpartition(":")[2])
        stack.enter_context(Place(tmp_path, 1, port, "back").running())
        if schedule == "is killed afterwards":
            keeper.kill()
        else:
            keeper.resume()
        former = saved()
        for worker in scene.workers:
            worker.tell()
        assert scene.results() == undisturbed
        assert not status_of(here).jobs
        assert not status_of(scene.first.address).num_mended
        if schedule != "is stopped meanwhile":
            eventually(lambda: saved() > former)


@pytest.mark.slow
def test_a_shard_is_stopped_while_its_standby_takes_over_and_answers_nobody_afterwards(
    register: Path, scene: Scene, undisturbed: Results
) -> None:
    stand(scene, str(register))
    scene.reach(20)
    (child,) = psutil.Process(scene.source.pid).children()
    child.suspend()  # As a machine that is cut off: workers' connections stay.
    assert scene.results() == undisturbed
    eventually(lambda: "epoch 3:" in status_of(scene.empty.address).moving)
    child.resume()
    eventually(lambda: status_of(scene.second.address).shard.moved_to == scene.empty.address)


@pytest.mark.slow
def test_a_standby_is_killed_and_the_register_keeps_it_from_taking_over_later(
    register: Path, scene: Scene, undisturbed: Results
) -> None:
    stand(scene, str(register))
    (child,) = psutil.Process(scene.target.pid).children()
    child.suspend()  # The shard goes on alone once a call has hung for 10 s.
    eventually(lambda: (register / "shard-1-of-2.3.claim").exists())
    child.resume()
    eventually(lambda: (register / "shard-1-of-2.4.claim").exists())  # It is followed again.
    kill_child(scene.source)
    assert scene.results() == undisturbed
