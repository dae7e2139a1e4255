"""A shard moves to another process while workers train, and processes are killed meanwhile."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.control_pb2 import StatusReply
from psserver.exits import CommandError
from psserver.remote import ask
from psserver.remote.drain import move
from tests.integration.cluster import Station, Worker, results_of
from tests.integration.command import Command, eventually, free_ports, gone, require_started

DEADLINE_S = 200.0
STEPS = 60
Results = list[tuple[int, list[float]]]  # Of each worker: its clock, and the weights.


def train(
    station: Station, last: int, pause: int = 0, numel: int = 1 << 17
) -> tuple[int, list[float]]:
    """Trains on drawn gradients in `ssgd` with momentum; says each step, and waits after one.

    Args:
        numel: The elements of each of four parameters.

    Returns:
        Its clock, and the weights.
    """
    drawn = torch.Generator().manual_seed(int(os.environ["RANK"]))
    parts = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(4)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    inner = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(inner, named)
    while optimizer.clock < last:
        for part in parts:
            part.grad = torch.randn(part.shape, generator=drawn)
        optimizer.step()
        station.tell(optimizer.clock)
        if optimizer.clock == pause:
            station.hear()
    with optimizer.global_weights():
        values = torch.cat([part.detach() for part in parts])
    found = values[:: 1 << 10].tolist()
    optimizer.close()
    return optimizer.clock, found


class Place:
    """A machine with a process of one of two shards."""

    def __init__(self, folder: Path, index: int, port: int, name: str, *more: object) -> None:
        self._command = Command(folder / name)
        (folder / name).mkdir()
        self.address = f"127.0.0.1:{port}"
        options = ["--shards", 2, "--shard-index", index, "--cluster", "night", "--lease-s", 20]
        ports = ["--port", port, "--metrics-port", *free_ports(1), "--log-level", "warning"]
        self._line = [*options, *ports, "--state-dir", folder / name / "state", *more]

    @contextmanager
    def running(self) -> Iterator[Popen[str]]:
        """Starts the process; yields its supervisor."""
        with self._command.spawn("start", *self._line) as process:
            require_started(process)
            yield process


def kill_child(supervisor: Popen[str]) -> None:
    """Kills the shard's process; its supervisor starts another one."""
    for child in psutil.Process(supervisor.pid).children():
        child.send_signal(signal.SIGKILL)
        eventually(lambda child=child: gone(child.pid))  # type: ignore[misc]


class Scene:
    """Two shards, an empty process for the second, and two workers."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        pause: int = 0,
        numel: int = 1 << 17,
        more: Sequence[object] = (),
        work: Callable[[Station], Any] | None = None,
    ) -> None:
        """Starts them.

        Args:
            pause: The step after which the workers wait; 0: none.
            numel: The elements of each parameter.
            more: Further options of all three processes.
            work: Done by the workers; None: `train`.
        """
        ports = free_ports(3)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        saving = ["--checkpoint-s", 1, "--shard-addresses", addresses]
        self.first = Place(folder, 0, ports[0], "a", *(saving if pause else ()), *more)
        self.second = Place(folder, 1, ports[1], "b", *more)
        self.empty = Place(folder, 1, ports[2], "c", *more)
        self.stack = stack
        self.starts = [stack.enter_context(self.first.running())]
        self.source = stack.enter_context(self.second.running())
        self.target = stack.enter_context(self.empty.running())
        args = (STEPS, pause, numel) if work is None else ()
        self.workers = self.begin("night", work or train, *args)

    def begin(self, job: str, work: Callable[..., Any], *args: object) -> list[Worker]:
        """Starts two workers of a job, which know the shards' first addresses."""
        names = {"WORLD_SIZE": "2", "PACELINE_JOB": job, "PACELINE_TIMEOUT_S": "60"}
        names["PACELINE_SERVERS"] = f"{self.first.address},{self.second.address}"
        workers = [Worker(work, rank, args, {**names, "RANK": str(rank)}) for rank in range(2)]
        for worker in workers:
            self.stack.callback(worker.close)
        return workers

    def reach(self, step: int) -> None:
        for worker in self.workers:
            while worker.hear(DEADLINE_S) < step:
                pass

    def drain(self, mbit: int = 0, tell: Callable[[str], None] = print) -> None:
        reply = move(self.second.address, self.empty.address, mbit, ANYONE, tell)
        assert reply.pause_s > 0

    def results(self) -> Results:
        return results_of(self.workers)


def status_of(address: str) -> StatusReply:
    (found,) = ask.answers([address])
    assert isinstance(found, StatusReply)
    return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Processes whose workers have made ten steps."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.reach(10)
        yield scene


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of a run without a move."""
    with ExitStack() as stack:
        return Scene(tmp_path_factory.mktemp("undisturbed"), stack).results()


@pytest.mark.slow
def test_a_shard_moves_and_its_old_process_is_stopped_meanwhile_bits_stay(
    scene: Scene, undisturbed: Results
) -> None:
    scene.drain()
    assert status_of(scene.second.address).shard.moved_to == scene.empty.address
    assert [job.job for job in status_of(scene.empty.address).jobs] == ["night"]
    ask.drain([scene.second.address], 1.0)
    assert scene.source.wait(DEADLINE_S) == 0
    assert scene.results() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_process_is_killed_while_the_journals_are_copied_and_the_shard_stays(
    victim: str, scene: Scene, undisturbed: Results
) -> None:
    killed = scene.source if victim == "source" else scene.target

    def kill(phase: str) -> None:
        assert phase == "copying"
        kill_child(killed)

    with pytest.raises(CommandError):
        scene.drain(1, kill)
    eventually(lambda: is_well(scene.second.address) and is_well(scene.empty.address))
    scene.drain()
    assert scene.results() == undisturbed


@pytest.mark.slow
def test_both_processes_are_killed_after_a_move_and_each_knows_its_place(
    scene: Scene, undisturbed: Results
) -> None:
    scene.drain()
    kill_child(scene.target)
    kill_child(scene.source)
    old, new = scene.second.address, scene.empty.address
    eventually(lambda: is_well(old) and status_of(old).shard.moved_to == new)
    assert scene.results() == undisturbed


def is_well(address: str) -> bool:
    """Returns whether a process answers, also for one that has moved."""
    try:
        status_of(address)
    except CommandError:
        return False
    return True


@pytest.mark.slow
def test_the_last_step_fails_and_the_shard_answers_its_workers_again(
    tmp_path: Path, scene: Scene, undisturbed: Results
) -> None:
    incoming = tmp_path / "c" / "state" / "journal" / "incoming-shard-1-of-2"

    def obstruct(phase: str) -> None:
        if phase == "copying":
            eventually(lambda: any(incoming.glob("*/arena")))
            (incoming / "prepared.json").mkdir()  # So the mark cannot be written.

    with pytest.raises(CommandError, match="has shard 1, this process has 0"):
        move(scene.second.address, scene.first.address, 0, ANYONE, print)
    with pytest.raises(CommandError, match="no room for the journals"):
        scene.drain(8, obstruct)
    assert "no room" in status_of(scene.second.address).moving
    scene.drain()
    assert scene.results() == undisturbed


@pytest.mark.slow
def test_a_shard_without_a_slice_of_the_job_moves_too_and_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, STEPS // 2, numel=10)
        scene.reach(STEPS // 2)
        assert not status_of(scene.second.address).jobs[0].memory_nbytes
        scene.drain()
        for kill in (None, kill_child):
            if kill is not None:
                kill(scene.target)
                eventually(lambda: is_well(scene.empty.address))
            assert [job.job for job in status_of(scene.empty.address).jobs] == ["night"]
        for worker in scene.workers:
            worker.tell()
        assert [clock for clock, _ in scene.results()] == [STEPS] * 2
