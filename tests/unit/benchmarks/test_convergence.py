"""One run of the convergence benchmark, on a few made-up images."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch

from benchmarks import convergence, tasks
from benchmarks.learning import runs
from benchmarks.learning.sweeps import Setting, ssd, ssgd
from psworker.commands.demo import data

NUM_IMAGES, STEPS = 500, 20
ARGS = argparse.Namespace(gbit=1.0, compute_ms=8.0)


def make_task() -> tasks.Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_IMAGES, 1, 28, 28, generator=generator)
    labels = torch.arange(NUM_IMAGES) % 10
    images[torch.arange(NUM_IMAGES), 0, 2 * labels] += 6.0  # A bright row for each class.
    part = data.Part(images=images, labels=labels)
    return tasks.Task(
        name="LeNet, rows", model=tasks.LeNet, train=part, test=part, seed=1, num_workers=4, batch=4
    )


def test_every_image_of_an_epoch_goes_to_one_worker_once() -> None:
    task = make_task()
    seen = torch.cat(
        [
            task.minibatch(rank, step)[0].sum((1, 2, 3))
            for rank in range(4)
            for step in range(task.steps_per_epoch)
        ]
    )
    assert len(set(seen.tolist())) == 4 * 4 * task.steps_per_epoch
    assert not torch.equal(task.minibatch(0, 0)[1], task.minibatch(0, task.steps_per_epoch)[1])


@pytest.mark.parametrize("setting", [ssgd(), ssd("glu", 4, warmup=5)])
def test_a_run_has_points_and_figures_and_is_found_again(setting: Setting, tmp_path: Path) -> None:
    run = convergence.run_one(setting, make_task(), STEPS, ARGS)
    assert run.accuracy > 0.15
    assert math.isfinite(run.loss)
    assert [step for step, _, _ in run.points] == [4, 8, 12, 16, STEPS]
    assert run.pulled_mb > 0
    assert run.key == ("LeNet, rows", setting.name, 1, STEPS, 4)
    path = tmp_path / "runs.jsonl"
    runs.keep(run, path)
    runs.keep(run, path)
    assert [found.key for found in runs.load(path)] == [run.key] * 2


def test_a_run_whose_loss_is_not_a_number_is_ended() -> None:
    run = convergence.run_one(ssgd(lr=1e30), make_task(), STEPS, ARGS)
    assert "NaN" in run.failure
    assert math.isnan(run.accuracy)
    assert "lost" in runs.cells("ssgd", runs.Row(setting=run.setting, runs=[run]), {})[4]
