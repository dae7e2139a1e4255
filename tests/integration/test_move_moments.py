"""A process killed at chosen moments of a move or a promotion, and commands interrupted in it.

Nothing is lost, and a second attempt succeeds.
"""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pscore.net.credentials import ANYONE
from psserver.exits import CommandError, Exit
from psserver.remote.drain import promote
from tests.etcd import running_etcd
from tests.integration import test_drain
from tests.integration.command import Command, eventually
from tests.integration.moments import Dying
from tests.integration.test_drain import Results, Scene, status_of, undisturbed
from tests.integration.test_standby import lose, promoted, register, stand
from tests.integration.test_standby_faults import PAUSE, finish

__all__ = ["register", "undisturbed"]  # The fixtures.


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Processes that may die at moments; workers that wait after `PAUSE`."""
    monkeypatch.setattr(test_drain, "Command", Dying)
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, pause=PAUSE)
        scene.reach(10)
        yield scene


def moved(scene: Scene) -> bool:
    """Moves the shard; returns whether it is there."""
    with contextlib.suppress(CommandError, AssertionError):  # No pause: it is there already.
        scene.drain()
    try:
        return status_of(scene.second.address).shard.moved_to == scene.empty.address
    except CommandError:
        return False


OLD = ["all is copied", "answers have ended", "other is prepared", "shard is given"]
OLD += ["other has begun"]
NEW = ["all is here", "all is compared", "shard is to begin", "shard has begun"]
NEW += ["journals are moved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "moment"), [("b", it) for it in OLD] + [("c", it) for it in NEW]
)
def test_a_process_is_killed_at_a_moment_of_a_move(
    folder: str, moment: str, tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    command = Dying(tmp_path / folder)
    command.arm((moment, 1))
    eventually(lambda: moved(scene))
    assert command.is_over
    assert finish(scene) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("has_register", [False, True])
@pytest.mark.parametrize("moment", ["all is copied", "standby is noted"])
def test_a_shard_is_killed_while_it_gets_a_standby(
    moment: str,
    has_register: bool,
    tmp_path: Path,
    register: Path,
    scene: Scene,
    undisturbed: Results,
) -> None:
    place, command = str(register) if has_register else "", Dying(tmp_path / "b")
    command.arm((moment, 1))
    with pytest.raises(CommandError):
        stand(scene, place)
    assert command.is_over

    def stands() -> bool:
        try:
            stand(scene, place)
        except CommandError:
            return False
        return True

    eventually(stands)
    assert finish(scene) == undisturbed


KEPT = ["standby has kept it", "claim was made"]  # Before, its death is not survived.
TAKEN = ["shard is to begin", "shard has begun", "journals are moved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_register", "moment"),
    [(True, it) for it in [*KEPT, *TAKEN]] + [(False, it) for it in [KEPT[0], *TAKEN]],
)
def test_a_standby_is_killed_while_it_takes_over(
    has_register: bool,
    moment: str,
    tmp_path: Path,
    register: Path,
    scene: Scene,
    undisturbed: Results,
) -> None:
    stand(scene, str(register) if has_register else "")
    command = Dying(tmp_path / "c")
    command.arm((moment, 1))
    lose(scene.source)
    if not has_register:
        eventually(lambda: promoted(scene.empty.address))
    assert finish(scene) == undisturbed
    assert command.is_over


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["followed", "given"])
def test_the_command_is_interrupted_in_a_phase_and_given_again(
    phase: str, tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    held = psutil.Process(scene.target.pid if phase == "given" else scene.workers[0].pid)
    held.suspend()  # The supervisor of the new process, or a worker that is to know its address.
    if phase == "given":
        Dying(tmp_path / "c").arm(("shard is to begin", 1))
    words = ["drain", scene.empty.address, "--servers", scene.second.address]
    command = Command(tmp_path, fresh=True)
    with command.spawn(*words) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != f"{phase}\n":
            assert line, "the shard did not begin to move"
        process.send_signal(signal.SIGINT)
        assert "give this command again" in process.stderr.read()
        assert process.wait() == Exit.INTERRUPTED
    held.resume()
    assert "shard moved to" in command.run(*words).stdout
    assert finish(scene) == undisturbed


@pytest.mark.slow
def test_the_register_is_stopped_and_the_standby_takes_over_once_it_goes_on(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    with running_etcd(tmp_path / "etcd") as url:
        (etcd,) = (it for it in psutil.Process().children() if it.name() == "etcd")
        stand(scene, f"{url}/night")
        etcd.suspend()
        scene.reach(PAUSE)  # Shard and standby reach each other.
        lose(scene.source)
        with pytest.raises(CommandError):
            promote(scene.empty.address, ANYONE)
        etcd.resume()
        assert finish(scene) == undisturbed
