"""`mode="auto"`: a job measures, and all its workers take the mode that advice names, once."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

import psworker
from pscore.errors import ConfigError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from pscore.timing.auto import read_switches
from tests.integration.cluster import Shards, Station, new_job, results_of

NUMEL, LR, MOMENTUM = 60_000, 0.05, 0.9
LEASE_S = 8.0  # A healthy worker keeps it under load; of a killed one 40 % are enough.
STEPS, WINDOW = 10, 3  # The job chooses before step 6.
RATE = 2e6  # Bytes per second of the slow link, each way, of all connections together.


class SlowLink:
    """A relay before a shard: it carries so many bytes per second each way."""

    def __init__(self, target: str, rate: float) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._rate = (host, int(port)), rate
        self._turns = [threading.Lock(), threading.Lock()]
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for ends, turn in zip(((near, far), (far, near)), self._turns, strict=True):
                    threading.Thread(target=self._carry, args=(*ends, turn), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, turn: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                with turn:
                    time.sleep(len(data) / self._rate)  # The link itself, and no wait for it.
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self._listening, *self._open):
            one.close()


@pytest.fixture
def slow() -> Iterator[tuple[Shards, dict[str, str]]]:
    """A shard, and the variables of workers that reach it over a slow link."""
    with Shards(1, lease_s=LEASE_S) as shards:
        link = SlowLink(shards.addresses[0], RATE)
        yield shards, {"PACELINE_SERVERS": link.address, "PACELINE_DATA_PLANE": "grpc"}
        link.close()


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng((rank, step)).standard_normal(NUMEL).astype(np.float32)


def make(mode: str, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM),
        named_parameters=[("weight", weight)],
        mode=mode,
        **options,
    )
    return weight, optimizer


def train(me: Station, mode: str, options: dict[str, Any], number: int = STEPS) -> Any:
    """Trains; tells that it has joined, then its last mode; ends when told to.

    Returns its weights, and the mode of each step.
    """
    weight, optimizer = make(mode, **options)
    me.tell("joined")
    modes = []
    while optimizer.steps < number:
        modes.append(optimizer.rule.name)
        optimizer.zero_grad()
        torch.autograd.backward(
            (weight * torch.from_numpy(gradient(me.rank, optimizer.steps))).sum()
        )
        optimizer.step()
    me.tell(str(optimizer.rule))
    me.hear()
    psworker.shutdown()
    return weight.detach().numpy().copy(), modes


def model(num_workers: int = 2) -> Any:
    """Returns the weights of synchronous SGD with momentum, in float64."""
    weights, velocity = np.zeros(NUMEL), np.zeros(NUMEL)
    for step in range(STEPS):
        mean = sum(gradient(rank, step).astype(np.float64) for rank in range(num_workers))
        velocity = MOMENTUM * velocity + mean / num_workers
        weights -= LR * velocity
    return weights


def status(shards: Shards, job: str) -> pb.JobStatus:
    with grpc.insecure_channel(shards.addresses[0]) as channel:
        reply = control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest(), timeout=200)
    return next(one for one in reply.jobs if one.job == job)


def heard(workers: list[Any]) -> list[str]:
    """Returns the modes that workers tell at their ends."""
    assert [worker.hear() for worker in workers] == ["joined"] * len(workers)
    return [worker.hear() for worker in workers]


def end(workers: list[Any]) -> list[Any]:
    for worker in workers:
        worker.tell()
    return results_of(workers)


AUTO = f"auto(steps={WINDOW})"


@pytest.mark.slow
def test_behind_a_slow_link_workers_add_up_gradients_themselves(
    slow: tuple[Shards, dict[str, str]],
) -> None:
    shards, env = slow
    job = new_job()
    with shards.workers(train, AUTO, {}, job=job, env=env) as workers:
        said = heard(workers)
        seen = status(shards, job)
        found = end(workers)
    assert said[0] == said[1]
    assert said[0].startswith("allreduce(")
    assert seen.chosen.startswith("auto takes allreduce at step 6: ")
    for weights, modes in found:
        assert modes == ["ssgd"] * 6 + ["allreduce"] * 4
        assert np.abs(weights - model()).max() < 1e-5


@pytest.mark.slow
def test_a_job_on_one_host_keeps_its_mode_and_a_worker_that_comes_later_too() -> None:
    """With compressed pushes workers cannot exchange models: a busy machine looks like a link."""
    job, to = new_job(), (train, AUTO, {"compression": "fp16"})
    with Shards(1, lease_s=LEASE_S) as shards, shards.workers(*to, job=job) as workers:
        assert heard(workers) == ["ssgd(backup=0)"] * 2
        assert status(shards, job).chosen.startswith("auto keeps ssgd at step 6: ")
        workers[1].kill()
        shards.wait_until_lost(job, 1)
        with shards.workers(*to, 2 * STEPS, ranks=[1], job=job) as others:
            assert others[0].hear() == "joined"  # Else the job would end, and start over.
            workers[0].tell()
            workers[0].result()
            assert others[0].hear() == "ssgd(backup=0)"
            end(others)


@pytest.mark.slow
def test_a_risk_allows_a_delay_and_a_worker_that_comes_later_takes_it(
    slow: tuple[Shards, dict[str, str]],
) -> None:
    """With compressed pushes workers cannot exchange models, so a delayed mode is left."""
    shards, env = slow
    job, mode = new_job(), f"auto(steps={WINDOW}, risk=any)"
    to = train, mode, {"compression": "fp16"}
    with shards.workers(*to, job=job, env=env) as workers:
        said = heard(workers)
        assert said[0] == said[1]
        assert said[0].startswith(("od(", "ssd("))
        assert status(shards, job).chosen.startswith(f"auto takes {said[0].partition('(')[0]}")
        workers[1].kill()
        shards.wait_until_lost(job, 1)
        with shards.workers(*to, 2 * STEPS, ranks=[1], job=job, env=env) as others:
            assert others[0].hear() == "joined"  # Else the job would end, and start over.
            workers[0].tell()
            workers[0].result()
            assert others[0].hear() == said[0]
            end(others)


def refused(me: Station) -> list[str]:
    said = []
    wrong = ("auto(steps=1)", "auto(risk=high)", "auto(speed=1)", "automatic")
    for mode in (*wrong, "auto(replay=nowhere)", "auto(replay=/dev/null)"):
        with pytest.raises(ConfigError) as problem:
            make(mode)
        said.append(str(problem.value))
    with pytest.raises(ConfigError, match="rows are trained beside it"):
        make("auto", rows=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    return said


def test_wrong_wishes_are_refused(shards: Shards) -> None:
    (said,) = shards.run(refused, num_workers=1)
    assert "auto.steps is 1, must be in 2.." in said[0]
    assert "auto.risk is 'high', must be one of any, low, none" in said[1]
    assert "mode 'auto' has no argument 'speed'" in said[2]
    assert "automatic" in said[3]
    assert "auto.replay: cannot read nowhere" in said[4]
    assert "/dev/null has no line such as 'auto takes od at step 50: ...'" in said[5]


@pytest.mark.slow
def test_a_job_that_has_changed_goes_on_measuring(slow: tuple[Shards, dict[str, str]]) -> None:
    shards, env = slow
    with shards.workers(train, AUTO, {}, 8 * WINDOW, job=new_job(), env=env) as workers:
        said = heard(workers)
        found = end(workers)
    assert said[0] == said[1]
    for _, modes in found:
        assert modes == ["ssgd"] * 6 + ["allreduce"] * 18


def with_a_slow_worker(me: Station, number: int) -> list[str]:
    """Trains, one worker with pauses; returns the modes of its steps."""
    weight, optimizer = make(f"auto(steps={WINDOW}, risk=any)")
    modes = []
    while optimizer.steps < number:
        modes.append(str(optimizer.rule))
        optimizer.zero_grad()
        torch.autograd.backward((weight * weight).sum())
        time.sleep(0.3 if me.rank == 2 else 0.01)
        optimizer.step()
    psworker.shutdown()
    return modes


@pytest.mark.slow
def test_workers_that_leave_a_slow_one_behind_meet_it_at_their_reports(shards: Shards) -> None:
    """Reports of steps 12 and 24 wait for it, though no step does."""
    found = shards.run(with_a_slow_worker, 30, num_workers=3)
    assert all("ssgd(backup=1)" in modes for modes in found)
    assert len(found[2]) < len(found[0])


def sets_a_mode(me: Station) -> str:
    weight, optimizer = make(AUTO)
    while optimizer.steps < 4 * WINDOW:
        if optimizer.steps == WINDOW + 1:
            optimizer.set_mode("asgd")
        optimizer.zero_grad()
        torch.autograd.backward((weight * weight).sum())
        optimizer.step()
    psworker.shutdown()
    return str(optimizer.rule)


@pytest.mark.slow
def test_a_mode_that_the_script_sets_stands(shards: Shards) -> None:
    assert shards.run(sets_a_mode, num_workers=2) == ["asgd"] * 2


def test_a_log_of_the_changes_makes_them_again_at_the_same_steps(
    shards: Shards, tmp_path: Path
) -> None:
    """Here links are fast, and nothing is measured."""
    log = tmp_path / "train.log"
    log.write_text(
        "[0] auto keeps ssgd at step 3: 9 ms a step, and no mode would clearly take less\n"
        "[0] auto takes od at step 6: 99 ms a step in ssgd, about 60 ms in it; 0 points\n"
        "[1] epoch 2\n"
        "[0] auto returns to ssgd(backup=0) at step 8: 99 ms a step in od, no less than before\n"
    )
    with shards.workers(train, f"auto(replay={log})", {}, job=new_job()) as workers:
        assert heard(workers) == ["ssgd(backup=0)"] * 2
        found = end(workers)
    for weights, modes in found:
        assert modes == ["ssgd"] * 6 + ["od"] * 2 + ["ssgd"] * 2
        assert (weights == found[0][0]).all()


def recorded(
    me: Station, mode: str, path: Path, compression: str = "none", number: int = 8 * WINDOW
) -> Any:
    """Trains as a script that keeps what it prints by default: warnings."""
    if me.rank == 0:
        logging.getLogger().addHandler(logging.FileHandler(path))
    return train(me, mode, {"compression": compression}, number)


@pytest.mark.slow
def test_a_recorded_job_makes_its_changes_again_where_nothing_would_cause_them(
    slow: tuple[Shards, dict[str, str]], tmp_path: Path
) -> None:
    shards, env = slow
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    ran = []
    for mode, log, variables in ((AUTO, first, env), (f"auto(replay={first})", second, {})):
        to = recorded, mode, log
        with shards.workers(*to, job=new_job(), env=variables) as workers:
            heard(workers)
            ran.append([modes for _, modes in end(workers)])
    assert ran[0] == ran[1]
    assert ran[0][0] == ["ssgd"] * 6 + ["allreduce"] * 18
    assert read_switches(first.read_text().splitlines()) == {6: "allreduce"}
    assert read_switches(second.read_text().splitlines()) == {6: "allreduce"}


@pytest.mark.slow
def test_the_log_of_a_first_worker_that_came_later_has_the_changes_before_it(
    slow: tuple[Shards, dict[str, str]], tmp_path: Path
) -> None:
    """The log of the one that was killed may be lost with its host."""
    shards, env = slow
    job, mode = new_job(), f"auto(steps={WINDOW}, risk=any)"
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with shards.workers(recorded, mode, first, "fp16", job=job, env=env) as workers:
        heard(workers)
        workers[0].kill()
        shards.wait_until_lost(job, 0)
        to = recorded, mode, second, "fp16", 16 * WINDOW
        with shards.workers(*to, ranks=[0], job=job, env=env) as others:
            assert others[0].hear() == "joined"  # Else the job would end, and start over.
            workers[1].tell()
            workers[1].result()
            others[0].hear()
            end(others)
    switches = read_switches(first.read_text().splitlines())
    assert 6 in switches
    known = read_switches(second.read_text().splitlines())
    assert known.items() & switches.items()
