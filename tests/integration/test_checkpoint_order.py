"""Checkpoints in one folder: of an asynchronous job, of two jobs, four at once, damaged ones."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.command import WAIT_S, Command
from tests.integration.models import backward, batch, make_model, weights_of

Weights = dict[str, np.ndarray]


def train_alone(me: Station) -> None:
    """Trains without a step in common: one push each time it is told to; says the weights."""
    torch.set_num_threads(1)
    model = make_model()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = psworker.DistributedOptimizer(made, model.named_parameters(), mode="asgd")
    for step in range(100):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        with optimizer.global_weights():
            me.tell((optimizer.clock, {k: v.copy() for k, v in weights_of(model).items()}))
        if me.hear() == "end":
            break
    psworker.shutdown()


def run(command: Command, shards: Shards, *arguments: object, code: int = 0) -> Any:
    return command.run(*arguments, "--servers", ",".join(shards.addresses), code=code)


def taken(command: Command, shards: Shards, folder: Path, job: str, *more: object) -> Path:
    return Path(run(command, shards, "checkpoint", folder, "--job", job, *more).stdout.strip())


def holds(path: Path, weights: Weights) -> bool:
    saved = load_file(path / "model.safetensors")
    return all(np.array_equal(saved[name].numpy(), array) for name, array in weights.items())


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_the_newest_of_an_asynchronous_job_is_restored(shards: Shards, tmp_path: Path) -> None:
    """Each has a place of its own in the order; a damaged one is refused, and the next taken."""
    command, folder, job = Command(tmp_path), tmp_path / "checkpoints", new_job()
    paths, seen = [], []
    with shards.workers(train_alone, num_workers=1, job=job) as (worker,):
        for _ in range(3):
            _, weights = worker.hear()
            paths.append(taken(command, shards, folder, job))
            seen.append(weights)
            if len(paths) < 3:
                worker.tell("continue")
        worker.tell("end")
        worker.result()
    assert len(set(paths)) == 3
    assert all(holds(path, weights) for path, weights in zip(paths, seen, strict=True))
    exported = tmp_path / "model.safetensors"
    command.run("export", exported, "--from", folder)
    newest = load_file(exported)
    assert all(np.array_equal(newest[name].numpy(), seen[2][name]) for name in newest)

    flip(paths[2] / "model.safetensors")
    said = run(command, shards, "restore", paths[2], "--job", "other", code=5).stderr
    assert f"{paths[2]} cannot be used: model.safetensors" in said
    assert f"psserver restore {folder}" in said
    done = run(command, shards, "restore", folder, "--job", "other")
    assert f"{paths[2]} cannot be used" in done.stderr
    assert f"restored job other from {paths[1]}" in done.stdout
    with shards.workers(train_alone, num_workers=1, job="other") as (worker,):
        now, _ = worker.hear()
        worker.tell("end")
        worker.result()
    assert now == 3  # Its first step is the third, since the checkpoint is of the second.


@pytest.mark.slow
def test_jobs_in_one_folder_and_four_at_once(shards: Shards, tmp_path: Path) -> None:
    command, folder = Command(tmp_path), tmp_path / "checkpoints"
    jobs = [new_job(), new_job()]
    workers = []
    for job in jobs:
        manager = shards.workers(train_alone, num_workers=1, job=job)
        workers.append((manager, manager.__enter__()[0]))
    try:
        weights = [worker.hear()[1] for _, worker in workers]
        address = ",".join(shards.addresses)
        spawned = [
            subprocess.Popen(
                command.line("checkpoint", folder, "--job", job, "--servers", address, "--keep", 2),
                env=command.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for job in [*jobs, *jobs]
        ]
        said = [process.communicate(timeout=WAIT_S) for process in spawned]
        assert [process.returncode for process in spawned] == [0] * 4, said
        paths = [Path(out.strip()) for out, _ in said]
        assert len(set(paths)) == 4
        assert {folder / name for name in os.listdir(folder) if name[0] != "."} == set(paths)
        for number, path in enumerate(paths):
            assert holds(path, weights[number % 2])
        last = taken(command, shards, folder, jobs[0], "--keep", 1)
        kept = {folder / name for name in os.listdir(folder) if name[0] != "."}
        assert kept == {last, paths[1], paths[3]}  # Those of the other job stay.
        said_no = run(command, shards, "restore", folder, code=2).stderr
        assert all(repr(job) in said_no for job in jobs)
        command.run("export", tmp_path / "one.safetensors", "--from", folder, "--job", jobs[1])
        one = load_file(tmp_path / "one.safetensors")
        assert all(np.array_equal(one[name].numpy(), weights[1][name]) for name in one)
    finally:
        for manager, worker in workers:
            worker.tell("end")
            worker.result()
            manager.__exit__(None, None, None)
