"""Faults while a shard moves or gets a standby: of processes, of the register, of the command."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.standby_pb2 import MoveRequest
from psserver.exits import CommandError, Exit
from psserver.remote.checkpoint_files import newest
from psserver.remote.drain import move, promote
from tests.integration.cluster import results_of
from tests.integration.command import Command, eventually, taken_port
from tests.integration.test_drain import (
    STEPS,
    Place,
    Results,
    Scene,
    is_well,
    kill_child,
    status_of,
    undisturbed,
)
from tests.integration.test_standby import follows, lose, promoted, register, stand

__all__ = ["register", "undisturbed"]  # The fixtures.

PAUSE = 30  # Workers wait after this step.
SLOW_MBIT = 4


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Processes whose workers have made ten steps, and wait after `PAUSE`."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=PAUSE)
        scene.reach(10)
        yield scene


def finish(scene: Scene) -> Results:
    """Returns the workers' results, once they have gone on to the end."""
    for worker in scene.workers:
        worker.tell()
    return results_of(scene.workers)


def saved(folder: Path) -> int:
    """Returns the number of the newest checkpoint; 0: there is none."""
    found = newest(folder / "a" / "state" / "checkpoints").get("night", ())
    return max((one.sequence for one in found), default=0)


@pytest.mark.slow
def test_a_standby_is_lost_while_it_is_filled_and_the_shard_gets_it_later(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    def kill(phase: str) -> None:
        if phase == "copying":
            eventually(lambda: any(tmp_path.glob("c/state/journal/incoming-*/*/arena")))
            kill_child(scene.target)

    here, there = scene.second.address, scene.empty.address
    wanted = MoveRequest(same_host=True)
    with pytest.raises(CommandError, match=f"the shard stays at {here}: {there}"):
        move(here, there, SLOW_MBIT, ANYONE, kill, standby=wanted)
    eventually(lambda: follows(scene))
    lose(scene.source)
    eventually(lambda: promoted(there))
    assert finish(scene) == undisturbed


@pytest.mark.slow
def test_a_machine_is_lost_while_its_standby_is_filled_and_that_does_not_take_over(
    tmp_path: Path, register: Path, scene: Scene, undisturbed: Results
) -> None:
    def kill(phase: str) -> None:
        if phase == "copying":
            eventually(lambda: any(tmp_path.glob("c/state/journal/incoming-*/*/arena")))
            lose(scene.source)

    here, there = scene.second.address, scene.empty.address
    wanted = MoveRequest(same_host=True, register=str(register), failover_s=0.2)
    with pytest.raises(CommandError, match="nothing answers") as caught:
        move(here, there, SLOW_MBIT, ANYONE, kill, standby=wanted)
    assert caught.value.code is Exit.NO_ANSWER
    with pytest.raises(CommandError, match=f"{there}: .* no standby that has everything"):
        promote(there, ANYONE)
    scene.stack.enter_context(scene.second.running())
    assert finish(scene) == undisturbed
    claims = [json.loads(path.read_text()) for path in register.glob("*.claim")]
    assert [claim["heir"] for claim in claims] == [""]


@pytest.mark.slow
def test_both_machines_are_lost_and_the_newest_checkpoint_is_restored_on_empty_ones(
    tmp_path: Path, register: Path, scene: Scene
) -> None:
    stand(scene, str(register))
    scene.reach(PAUSE)
    eventually(lambda: saved(tmp_path))
    os.kill(scene.target.pid, signal.SIGSTOP)  # Its supervisor, so that both end at once.
    lose(scene.target)
    lose(scene.source)
    for name, address in (("back", scene.second.address), ("too", scene.empty.address)):
        assert not status_of(scene.first.address).num_mended
        port = int(address.rpartition(":")[2])
        scene.stack.enter_context(Place(tmp_path, 1, port, name).running())
    eventually(lambda: status_of(scene.first.address).num_mended)
    for worker in scene.workers:
        worker.tell()  # They come to the step again after which they wait.
    assert [clock for clock, _ in finish(scene)] == [STEPS, STEPS]


@pytest.mark.slow
def test_the_command_is_interrupted_and_given_again_while_the_shard_moves(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    command = Command(tmp_path, fresh=True)
    words = ["drain", scene.empty.address, "--servers", scene.second.address]
    words += ["--mbit", str(SLOW_MBIT)]
    with command.spawn(*words) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "copying\n"
        process.send_signal(signal.SIGINT)
        assert "give this command again" in process.stderr.read()
        assert process.wait() == Exit.INTERRUPTED
    for _ in range(2):  # Also once more when it is there.
        assert "shard moved to" in command.run(*words).stdout
    assert finish(scene) == undisturbed


@pytest.mark.slow
def test_the_first_shard_moves_while_checkpoints_are_taken_by_a_command_and_on_schedule(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    with taken_port() as taken:
        port = taken.getsockname()[1]
    place = Place(tmp_path, 0, port, "d")
    scene.stack.enter_context(place.running())
    servers = f"{scene.first.address},{scene.second.address}"
    words = ["checkpoint", tmp_path / "by-hand", "--servers", servers]
    command = Command(tmp_path)
    with command.spawn(*words) as by_hand:
        move(scene.first.address, place.address, 0, ANYONE, print)
        assert by_hand.wait() == 0
    former = saved(tmp_path)
    results = finish(scene)
    assert results == undisturbed
    eventually(lambda: saved(tmp_path) > former)
    command.run(*words)


@pytest.mark.slow
def test_a_place_that_cannot_take_a_shard_is_refused_and_the_shard_stays(
    scene: Scene, undisturbed: Results
) -> None:
    here = scene.second.address
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CommandError, match=f"the shard stays at {here}: {address}"):
            move(here, address, 0, ANYONE, print)
    with pytest.raises(CommandError, match="has the shard itself: name an empty one"):
        move(here, here, 0, ANYONE, print)
    with pytest.raises(CommandError, match="names several") as caught:
        move(here, f"{here},{address}", 0, ANYONE, print)
    assert caught.value.code is Exit.UNHEALTHY
    assert finish(scene) == undisturbed


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Mounts a small file system there."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "paceline", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills the file system; returns the file that does."""
    path = folder / "full"
    with pytest.raises(OSError, match="No space"):
        path.write_bytes(bytes(1 << 20))
    return path


@pytest.mark.slow
def test_a_register_that_is_full_or_read_only_is_named_and_used_once_it_is_well(
    register: Path, scene: Scene, undisturbed: Results
) -> None:
    with disk(register):
        remount(register, "ro")
        with pytest.raises(CommandError, match=rf"the register at {register}: .*Read-only"):
            stand(scene, str(register))
        remount(register, "rw")
        full = fill(register)
        with pytest.raises(CommandError, match=rf"the register at {register}: .*No space"):
            stand(scene, str(register))
        eventually(lambda: os.listdir(register) == ["full"])  # But while the shard tries again.
        full.unlink()
        eventually(lambda: follows(scene))  # The shard has tried again by itself.
        full = fill(register)
        lose(scene.source)
        eventually(lambda: is_well(scene.empty.address))
        full.unlink()
        assert finish(scene) == undisturbed
        assert "epoch 3:" in status_of(scene.empty.address).moving
