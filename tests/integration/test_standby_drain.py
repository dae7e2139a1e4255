"""A shard moves to its standby (`psserver drain` without an address), with faults in the middle.

While the standby's process is stopped, the old one has ended its answers and waits for it: there
each of the two is killed, or lost.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from pscore.net.credentials import ANYONE
from psserver.exits import CommandError, Exit
from psserver.remote.drain import move
from tests.integration.command import Command, eventually
from tests.integration.test_drain import (
    Results,
    Scene,
    kill_child,
    undisturbed,
)
from tests.integration.test_standby import follows, lose, register, stand
from tests.integration.test_standby_faults import PAUSE, disk, finish, remount

__all__ = ["register", "undisturbed"]  # The fixtures.


@pytest.fixture
def scene(tmp_path: Path, register: Path) -> Iterator[Scene]:
    """Processes, the second shard with a standby; the workers wait after `PAUSE`."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=PAUSE)
        scene.reach(10)
        stand(scene, str(register))
        yield scene


@contextmanager
def stopped(supervisor: Popen[str]) -> Iterator[None]:
    """A shard's process that does nothing meanwhile."""
    (child,) = psutil.Process(supervisor.pid).children()
    child.suspend()
    try:
        yield
    finally:
        if child.is_running():
            child.resume()


def drain(scene: Scene, command: Command) -> Popen[str]:
    """Starts to move the second shard to its standby; returns once it answers nobody."""
    spawned = command.spawn("drain", "--servers", scene.second.address)
    process = scene.stack.enter_context(spawned)
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "frozen\n":
        assert line, "the shard did not begin to move"
    return process


@pytest.mark.slow
def test_a_shard_moves_to_its_standby_and_the_register_says_so(
    tmp_path: Path, register: Path, scene: Scene, undisturbed: Results
) -> None:
    command = Command(tmp_path)
    for _ in range(2):  # Also once more when it is there.
        said = command.run("drain", "--servers", scene.second.address).stdout
        assert f"shard moved to {scene.empty.address}" in said
    assert finish(scene) == undisturbed
    assert "it was moved" in (register / "shard-1-of-2.3.claim").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_is_interrupted_in_the_last_step_and_given_again(
    number: signal.Signals, tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    scene.reach(PAUSE)
    command = Command(tmp_path, fresh=True)
    with stopped(scene.target):
        process = drain(scene, command)
        process.send_signal(number)
        assert process.stderr is not None
        assert "give this command again" in process.stderr.read()
        assert process.wait() == Exit.INTERRUPTED
    said = command.run("drain", "--servers", scene.second.address).stdout
    assert f"shard moved to {scene.empty.address}" in said
    assert finish(scene) == undisturbed


def test_a_shard_without_a_standby_is_not_moved(tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        with pytest.raises(CommandError, match="has no standby: name the process") as caught:
            move(scene.second.address, "", 0, ANYONE, print)
        assert caught.value.code is Exit.UNHEALTHY


Fault = Callable[[Scene], None]
FAULTS: dict[str, Fault] = {
    "its process is killed": lambda scene: kill_child(scene.source),
    "its machine is lost": lambda scene: lose(scene.source),
    "the standby is killed": lambda scene: kill_child(scene.target),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_loses_nothing(
    fault: str, tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    scene.reach(PAUSE)
    with stopped(scene.target):
        process = drain(scene, Command(tmp_path))
        FAULTS[fault](scene)
        process.wait()
    assert finish(scene) == undisturbed
    if fault == "the standby is killed":
        eventually(lambda: follows(scene))  # It is the standby again.


@pytest.mark.slow
def test_the_register_is_away_and_the_workers_go_on_meanwhile(
    tmp_path: Path, register: Path, undisturbed: Results
) -> None:
    with disk(register), ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=PAUSE)
        scene.reach(10)
        stand(scene, str(register))
        remount(register, "ro")
        command = Command(tmp_path)
        process = stack.enter_context(command.spawn("drain", "--servers", scene.second.address))
        assert finish(scene) == undisturbed
        assert process.poll() is None
        remount(register, "rw")
        assert process.wait() == 0
