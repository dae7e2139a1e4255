"""Jobs whose processes have all died continue with the same commands; ended ones do not."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import psworker
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.durability.sealed import read_json, write_json
from psserver.remote.checkpoint_files import newest
from tests.integration.cluster import Station, Worker
from tests.integration.command import Command, eventually, gone
from tests.integration.worker import Worker as ByHand

DEADLINE_S = 200.0
STEPS = 6


def train(station: Station) -> list[int]:
    """Makes steps, says which have been made, and waits to be told to end; returns the last."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = psworker.DistributedOptimizer(plain, model.named_parameters())
    begun = optimizer.clock
    while optimizer.clock < begun + STEPS:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    station.tell((begun, optimizer.clock))
    station.hear()
    return [begun, optimizer.clock]


class Cluster:
    """Shards under their supervisor, which can all be killed at once."""

    def __init__(self, command: Command, *options: object, num_shards: int = 2) -> None:
        self.command = command
        self.num_shards = num_shards
        self.options = options

    @contextmanager
    def start(self) -> Iterator[None]:
        ports = ("--port", 0, "--metrics-port", 0, "--detach")
        self.command.run("start", "--shards", self.num_shards, *ports, *self.options)
        self.run = self.command.run_file()
        try:
            yield
        finally:
            if not gone(self.run["pid"]):
                os.kill(self.run["pid"], signal.SIGTERM)
            eventually(lambda: gone(self.run["pid"]))

    def kill(self) -> None:
        """Kills supervisor and shards at once, as a power cut does."""
        pids = [self.run["pid"], *(shard["pid"] for shard in self.run["shards"])]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            eventually(lambda pid=pid: gone(pid))  # type: ignore[misc]
        for path in self.command.folder.rglob("run.json"):
            path.unlink()

    @contextmanager
    def workers(self, count: int) -> Iterator[list[Worker]]:
        servers = ",".join(self.run["addresses"])
        names = {"WORLD_SIZE": str(count), "PACELINE_SERVERS": servers, "PACELINE_JOB": "night"}
        workers = [Worker(train, rank, (), {**names, "RANK": str(rank)}) for rank in range(count)]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()

    def log(self) -> str:
        return "".join(path.read_text() for path in self.command.folder.rglob("shard-*.log"))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(Command(tmp_path))


def hear(workers: list[Worker]) -> list[Any]:
    return [worker.hear(DEADLINE_S) for worker in workers]


def finish(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.result(DEADLINE_S)


@pytest.mark.slow
def test_a_job_continues_after_all_workers_were_killed_and_starts_over_after_its_end(
    cluster: Cluster,
) -> None:
    with cluster.start():
        with cluster.workers(2) as workers:
            assert hear(workers) == [(0, STEPS)] * 2
            for worker in workers:
                worker.kill()
        with cluster.workers(2) as workers:
            assert hear(workers) == [(STEPS, 2 * STEPS)] * 2
            goes_on = f"job 'night' continues at step {STEPS}: all of its workers were lost"
            assert all(goes_on in worker.written() for worker in workers)
            assert goes_on in cluster.log()
            finish(workers)
        with by_hand(cluster) as other:  # Another model is allowed: the job has ended.
            other.join()
            other.define(cluster.num_shards)
            anew = (
                f"job 'night' starts over at step 0: the former one ended at step {2 * STEPS} "
                "(table 'model' of 2 tensors in ssgd"
            )
            assert anew in cluster.log()


def port(cluster: Cluster) -> tuple[object, ...]:
    return "--servers", ",".join(cluster.run["addresses"])


def jobs(cluster: Cluster) -> str:
    return cluster.command.run("jobs", *port(cluster)).stdout


def boot_anew(state: Path) -> None:
    """Makes the journals those of another boot of the machine."""
    for stamp in state.glob("journal/*/stamp.json"):
        write_json(stamp, {**read_json(stamp), "boot": "another"})


@pytest.mark.slow
def test_after_a_power_cut_the_same_commands_continue_from_what_is_on_the_disk(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    cluster = Cluster(Command(tmp_path), "--state-dir", state, "--checkpoint-s", 0.2)
    with cluster.start(), cluster.workers(1) as workers:
        assert hear(workers) == [(0, STEPS)]
        eventually(lambda: saved(state) == STEPS)
        for worker in workers:
            worker.kill()
        cluster.kill()
    boot_anew(state)
    with cluster.start(), cluster.workers(1) as workers:
        assert hear(workers) == [(STEPS, 2 * STEPS)]
        goes_on = f"job 'night' continues at step {STEPS}"
        assert all(goes_on in worker.written() for worker in workers)
        assert goes_on in cluster.log()
        finish(workers)


def test_after_an_orderly_end_another_boot_continues_without_a_checkpoint(tmp_path: Path) -> None:
    """As when a machine is restarted, or a shard's volume moves to another one."""
    state = tmp_path / "state"
    cluster = Cluster(Command(tmp_path), "--state-dir", state, "--checkpoint-s", 0)
    with cluster.start(), cluster.workers(1) as workers:
        assert hear(workers) == [(0, STEPS)]
        for worker in workers:
            worker.kill()
    boot_anew(state)
    with cluster.start():
        assert cluster.log().count("job continues where it was") == cluster.num_shards
        with cluster.workers(1) as workers:
            assert hear(workers) == [(STEPS, 2 * STEPS)]
            finish(workers)


def saved(state: Path) -> int:
    """Returns the step of the newest checkpoint; -1 if there is none."""
    found = newest(state / "checkpoints").get("night")
    return int(found[0].manifest["tables"][0]["version"]) if found else -1


@contextmanager
def by_hand(cluster: Cluster) -> Iterator[ByHand]:
    worker = ByHand(cluster.run["addresses"][0], job="night")
    try:
        yield worker
    finally:
        worker.close()


def make_a_step(worker: ByHand) -> None:
    worker.join()
    worker.define()
    worker.push_weights()
    worker.push_gradient()


@pytest.mark.slow
def test_jobs_are_listed_and_forgotten(tmp_path: Path) -> None:
    state = tmp_path / "state"
    cluster = Cluster(Command(tmp_path), "--state-dir", state, "--checkpoint-s", 0.2, num_shards=1)
    with cluster.start(), by_hand(cluster) as worker:
        make_a_step(worker)
        eventually(lambda: saved(state) == 1)
        leave = pb.LeaveRequest(job="night", worker=0, incarnation=7, failed=True)
        worker.control.Leave(leave, timeout=DEADLINE_S)
        assert re.search(r"night +interrupted +1 +0 of 1 ", jobs(cluster))
        forgot, its_checkpoints = cluster.command.run(
            "forget", "night", *port(cluster)
        ).stdout.splitlines()
        assert forgot.startswith("forgot job night (")
        assert "no jobs" in jobs(cluster)
        assert saved(state) == -1  # The next start does not find them, a person does.
        aside = state / "checkpoints" / "forgotten" / "1"
        assert its_checkpoints.startswith(f"its checkpoints are in {aside} now: psserver restore")
        assert list(newest(aside)) == ["night"]


def test_after_a_power_cut_a_job_of_which_nothing_is_on_the_disk_is_not_begun_in_silence(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    options = ("--state-dir", state, "--checkpoint-s", 0)
    cluster = Cluster(Command(tmp_path), *options, num_shards=1)
    with cluster.start(), by_hand(cluster) as worker:
        make_a_step(worker)
        cluster.kill()
    boot_anew(state)
    with cluster.start(), by_hand(cluster) as worker:
        with pytest.raises(grpc.RpcError) as refusal:
            worker.join()
        assert re.search(
            "job 'night' and cannot continue it.*machine has been restarted since.*psserver forget",
            str(refusal.value),
        )
        assert re.search(r"night +lost .*night is lost: the machine", jobs(cluster), re.DOTALL)
        cluster.command.run("forget", "night", *port(cluster))
        make_a_step(worker)
