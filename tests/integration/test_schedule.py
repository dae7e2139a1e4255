"""Scheduled checkpoints: training continues from the newest one after everything has died."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import psworker
from pscore.net import wire
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from psserver.mending.mender import SUCCESSORS
from psserver.remote import checkpoint_files as files
from tests.integration.cluster import Station, Worker, WorkerError
from tests.integration.command import (
    Command,
    eventually,
    free_ports,
    gone,
    lasting_ports,
    live_shards,
    read_run,
)

DEADLINE_S = 200.0
JOB = "survivor"
Weights = dict[str, np.ndarray]


class Start:
    """Shards under their supervisor, with a state directory."""

    def __init__(self, command: Command, state: Path, log: Path) -> None:
        self.command, self.state, self.log = command, state, log
        self.run = read_run(state)
        self.addresses = list(self.run["addresses"])

    @property
    def folder(self) -> Path:
        return self.state / "checkpoints"

    def pids(self) -> list[int]:
        return live_shards(self.state)

    def schedule(self) -> psutil.Process:
        """Returns the process that takes the checkpoints."""

        def found() -> list[psutil.Process]:
            children = psutil.Process(self.run["pid"]).children()
            return [child for child in children if "schedule" in child.cmdline()[:5]]

        return eventually(found)[0]

    @contextlib.contextmanager
    def without_checkpoints(self) -> Iterator[None]:
        """Stops that process for a time."""
        schedule = self.schedule()
        schedule.suspend()
        try:
            yield
        finally:
            schedule.resume()

    def newest(self, beyond: int = 0) -> files.Found:
        """Waits for a checkpoint whose number is larger than `beyond`."""
        found = eventually(
            lambda: [one for one in files.scan(self.folder) if one.sequence > beyond], DEADLINE_S
        )
        return found[0]

    def said(self, text: str) -> str:
        """Waits for a line of the log that has `text`."""

        def lines() -> list[str]:
            return [line for line in self.log.read_text().splitlines() if text in line]

        return eventually(lines)[0]

    def worker(self, *options: object, job: str = JOB) -> Worker:
        return Worker(
            train,
            0,
            options,
            {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "PACELINE_SERVERS": ",".join(self.addresses),
                "PACELINE_JOB": job,
            },
        )

    def power_cut(self) -> None:
        """Kills every process, and leaves no journal, as after the boot of a machine."""
        supervisor = psutil.Process(self.run["pid"])
        processes = [supervisor, *supervisor.children()]
        for process in processes:  # First the one that would start the others again.
            process.kill()
        for process in processes:
            eventually(lambda process=process: gone(process.pid))  # type: ignore[misc]
        shutil.rmtree(self.state / "journal", ignore_errors=True)
        for path in self.state.glob("*/run.json"):  # Another start may have other ports.
            path.unlink()


@contextlib.contextmanager
def start(tmp_path: Path, *options: object, state: str = "state") -> Iterator[Start]:
    """Starts two shards with a checkpoint now and then, or as `options` say."""
    command = Command(tmp_path)
    ports = (*lasting_ports(3), "--state-dir", tmp_path / state)  # Options come behind them.
    log = tmp_path / f"{state}.log"
    with log.open("a") as file, command.spawn("start", *ports, *options, stderr=file) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("PACELINE_SERVERS="), log.read_text()
        yield Start(command, tmp_path / state, log)


@contextlib.contextmanager
def part(
    tmp_path: Path, index: int, ports: Sequence[int], cluster: str, *options: object
) -> Iterator[Start]:
    """Starts one shard of two, as on a machine of its own."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    which = ("--shards", 2, "--shard-index", index, "--cluster", cluster)
    where = ("--port", ports[index], "--shard-addresses", addresses)
    with start(tmp_path, *which, *where, *options, state=f"machine-{index}") as started:
        started.addresses = addresses.split(",")
        yield started


def train(station: Station, mode: str = "ssgd", compressor: str = "none") -> list[float]:
    """Trains; says after each step how many there were, and its weights; ends when told to."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        mode=mode,
        compression=compressor,
        pull_compression=compressor,
        compress_min_nbytes=1024,
    )
    inputs = torch.randn(32, 64)
    losses = []
    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        station.tell((optimizer.clock, weights))
        if station.hear() == "end":
            psworker.shutdown()
            return losses


def run_until(worker: Worker, clock: int) -> dict[int, Weights]:
    """Trains a worker up to a step, and stops it there; returns the weights by step."""
    seen: dict[int, Weights] = {}
    while True:
        now, weights = worker.hear(DEADLINE_S)
        seen[now] = weights
        if now >= clock:
            return seen
        worker.tell("continue")


def ended(worker: Worker) -> list[float]:
    worker.tell("end")
    losses: list[float] = worker.result(DEADLINE_S)
    worker.close()
    return losses


def version_of(found: files.Found) -> int:
    (table,) = found.manifest["tables"]
    return int(table["version"])


@pytest.mark.slow
def test_after_a_power_cut_training_continues_from_the_newest(tmp_path: Path) -> None:
    """All shards are of one step; a damaged one is passed over, and a checkpointer that died."""
    with start(tmp_path, "--shards", 2, "--checkpoint-s", 0.3) as first:
        worker = first.worker()
        seen = run_until(worker, 3)
        earlier = first.newest()
        first.schedule().kill()
        first.said("the process that writes checkpoints died; it is started again")
        worker.tell("continue")
        seen |= run_until(worker, 8)
        found = first.newest(earlier.sequence)
        while version_of(found) < 8:
            found = first.newest(found.sequence)
        first.power_cut()
        worker.kill()
        worker.close()
    saved = load_file(found.path / "model.safetensors")
    assert all(np.array_equal(saved[name].numpy(), seen[8][name]) for name in saved)
    damaged = tmp_path / "state" / "checkpoints" / f"{JOB}-99999999"
    shutil.copytree(found.path, damaged)
    (damaged / "manifest.json").write_text("{}")
    with start(tmp_path, "--shards", 3, "--checkpoint-s", 3600) as second:
        line = second.said("job recovered from its newest checkpoint")
        assert "step 8" in line
        assert str(found.path) in line
        second.said("checkpoint cannot be used")
        worker = second.worker()
        clock, _ = worker.hear(DEADLINE_S)
        assert clock == 9
        worker.tell("continue")
        run_until(worker, 11)
        # The last one is taken at an orderly end: of a step that no scheduled one was of.
        os.kill(second.run["pid"], signal.SIGTERM)
        eventually(lambda: gone(second.run["pid"]))
    last = files.scan(second.folder)[0]
    assert (last.sequence, version_of(last)) == (100000000, 11)
    worker.kill()
    worker.close()


@pytest.mark.slow
def test_a_job_that_does_not_answer_delays_no_checkpoint_of_another(tmp_path: Path) -> None:
    options = ("--checkpoint-s", 1, "--lease-s", 3000)
    with (
        start(tmp_path, *options) as shards,
        contextlib.closing(shards.worker("ssgd", "2bit", job="stopped")) as stopped,
        contextlib.closing(shards.worker()) as worker,
    ):
        run_until(stopped, 2)
        stopped.kill(signal.SIGSTOP)  # It would wait for the test, but its residual is missing now.
        beyond = 8  # More than there would be if each waited for the stopped one for a minute.
        while (
            max((c.sequence for c in files.newest(shards.folder).get(JOB, [])), default=0) < beyond
        ):
            worker.hear(DEADLINE_S)
            worker.tell("continue")
        ended(worker)


@pytest.mark.slow
def test_without_journals_a_killed_shard_comes_back_with_the_newest(tmp_path: Path) -> None:
    """With compressed pulls the shard has forgotten the estimate, and begins with the whole."""
    options = ("--shards", 2, "--checkpoint-s", 0.3, "--durability", "memory")
    with start(tmp_path, *options) as shards:
        worker = shards.worker("ssgd", "int8")
        run_until(worker, 20)
        found = shards.newest()
        while version_of(found) < 20:
            found = shards.newest(found.sequence)
        victim = shards.pids()[0]
        os.kill(victim, signal.SIGKILL)
        worker.tell("continue")
        run_until(worker, 40)
        assert victim not in shards.pids()
        losses = ended(worker)
        assert losses[-1] < losses[15] * 1.5 < losses[0]
        # The end of the job is saved as well, and such a job is not loaded again.
        eventually(lambda: files.scan(shards.folder)[0].manifest["finished"])
        os.kill(shards.pids()[1], signal.SIGKILL)
        shards.said("job had ended; it is not loaded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "steps", "what"), [("ssgd", 1, "step"), ("local(steps=3)", 3, "push")]
)
def test_a_worker_says_how_far_its_job_goes_back(
    tmp_path: Path, mode: str, steps: int, what: str
) -> None:
    """All shards are killed, and their memory is lost; the worker lives."""
    options = ("--shards", 2, "--checkpoint-s", 0.3, "--durability", "memory")
    with start(tmp_path, *options) as shards:
        worker = shards.worker(mode)
        run_until(worker, 5)
        found = shards.newest()
        while version_of(found) < 5:
            found = shards.newest(found.sequence)
        with shards.without_checkpoints():
            worker.tell("continue")
            run_until(worker, 20)
            for pid in shards.pids():
                os.kill(pid, signal.SIGKILL)
            worker.tell("continue")
            now, _ = worker.hear(DEADLINE_S)
            while now >= 20:  # The step under way may end before the worker notices.
                worker.tell("continue")
                now, _ = worker.hear(DEADLINE_S)
            said = worker.written()
        ended(worker)
    assert re.search(rf"worker 0 rejoins, {what} \d+ (does not count|counts in)", said)
    (back,) = re.findall(r"worker 0 goes back from step (\d+) to step (\d+), ", said)
    assert int(back[0]) >= 20 * steps > int(back[1]) == 5 * steps


@pytest.mark.slow
def test_weights_that_were_not_saved_are_not_begun_again_in_silence(tmp_path: Path) -> None:
    options = ("--shards", 2, "--checkpoint-s", 3600, "--durability", "memory")
    with start(tmp_path, *options) as shards:
        worker = shards.worker()
        run_until(worker, 3)
        os.kill(shards.pids()[0], signal.SIGKILL)
        worker.tell("continue")
        with pytest.raises(WorkerError, match=r"StateLostError: .* without the weights"):
            run_until(worker, 30)
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["supervisors", "all processes", "command"])
def test_shards_that_are_stopped_at_once_take_a_last_checkpoint(tmp_path: Path, way: str) -> None:
    """As an engine stops containers, systemd a unit, and a person a cluster."""
    ports, grace = free_ports(2), ("--grace-s", 300)
    with (
        part(tmp_path, 1, ports, "c", *grace) as other,
        part(tmp_path, 0, ports, "c", *grace, "--checkpoint-s", 3600) as first,
    ):
        worker = first.worker()
        run_until(worker, 5)
        eventually((first.folder / ".schedule").exists)  # The process for checkpoints has begun.
        supervisors = [psutil.Process(machine.run["pid"]) for machine in (other, first)]
        children = {each: each.children() for each in supervisors}
        if way == "command":
            first.command.run("stop", "--servers", ",".join(first.addresses))
        else:
            for each in supervisors:
                for process in [*(children[each] if way == "all processes" else ()), each]:
                    process.terminate()
        for each in supervisors:
            for process in (each, *children[each]):
                eventually(lambda process=process: gone(process.pid))  # type: ignore[misc]
        (found,) = files.scan(first.folder)
        assert version_of(found) == 5
        left = {path.name for path in first.folder.iterdir()} - {SUCCESSORS}  # From its first look.
        assert left == {".lock", ".schedule", found.path.name}  # Nothing that is half written.
        worker.kill()
        worker.close()


@pytest.mark.slow
def test_shards_of_several_machines_start_from_the_checkpoints_of_shard_0(tmp_path: Path) -> None:
    """Each has a folder of its own; workers wait until shard 1 has its part again."""
    ports = free_ports(2)
    with (
        part(tmp_path, 1, ports, "c") as other,
        part(tmp_path, 0, ports, "c", "--checkpoint-s", 0.3) as first,
    ):
        worker = first.worker()
        run_until(worker, 4)
        found = first.newest()
        while version_of(found) < 4:
            found = first.newest(found.sequence)
        for machine in (first, other):
            machine.power_cut()
        worker.kill()
        worker.close()
    assert not other.folder.exists()
    with part(tmp_path, 0, ports, "d", "--checkpoint-s", 3600) as first:
        first.said("job recovered from its newest checkpoint")
        first.said("workers wait until all shards have the checkpoints")
        with grpc.insecure_channel(first.addresses[0]) as channel:
            request = pb.JoinRequest(job=JOB, num_workers=1, protocol=wire.PROTOCOL)
            with pytest.raises(grpc.RpcError) as refusal:
                control_pb2_grpc.ControlStub(channel).Join(request, timeout=DEADLINE_S)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE  # A worker asks again.
        with part(tmp_path, 1, ports, "d"):
            worker = first.worker()
            clock, _ = worker.hear(DEADLINE_S)
            assert clock == 5
            first.said("checkpoint sent to the other shards")
            ended(worker)
