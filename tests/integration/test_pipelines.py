"""Pipelines made by torch whose stages are jobs on the shards: `examples/pipelines.py`."""

import copy
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.cluster import ROOT, Shards, Station, Worker, new_job
from tests.integration.command import free_ports

EXAMPLE = ROOT / "examples" / "pipelines.py"
STAGES, PIPELINES = 2, 2
STEPS, SAMPLES = 6, 8
MODES = {"ssgd": 1, "local(steps=3)": 3}  # With the steps between two means.


def run_example(me: Station, job: str, cases: list[tuple[str, str, int]]) -> None:
    """Runs the example as torchrun would, once for each mode."""
    for mode, out, port in cases:
        os.environ |= {"PACELINE_JOB": f"{job}-{port}", "MASTER_PORT": str(port)}
        sys.argv = [str(EXAMPLE), "--mode", mode, "--out", out]
        sys.argv += ["--steps", str(STEPS), "--samples", str(SAMPLES)]
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def one_process(every: int) -> dict[str, torch.Tensor]:
    """Returns the weights of both models' mean, taken every so many steps.

    For `ssgd` the mean of the gradients is taken in its place, by one model with both minibatches.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    models = [model] if every == 1 else [copy.deepcopy(model) for _ in range(PIPELINES)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    data = [torch.Generator().manual_seed(number) for number in range(PIPELINES)]
    truth = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
    for step in range(STEPS):
        batches = [torch.randn(SAMPLES, 20, generator=generator) for generator in data]
        shares = [torch.cat(batches)] if every == 1 else batches
        for m, optimizer, inputs in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(m(inputs), (inputs @ truth).argmax(dim=1))
            torch.autograd.backward(loss)
            optimizer.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for parameters in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack(parameters).mean(dim=0)
                    for parameter in parameters:
                        parameter.copy_(mean)
    return dict(models[0].state_dict())


def stages_of(folder: Path) -> list[torch.Tensor]:
    """Returns the tensors of both stages, in the order of the whole model."""
    parts = [torch.load(folder / f"stage{stage}.pt") for stage in range(STAGES)]
    return [value for part in parts for value in part.values()]


@pytest.mark.slow
def test_two_pipelines_of_two_stages_equal_one_process(shards: Shards, tmp_path: Path) -> None:
    job, cases = new_job(), []
    for number, mode in enumerate(MODES):
        cases.append((mode, str(tmp_path / str(number)), *free_ports(1)))
    workers = []
    try:
        for rank in range(STAGES * PIPELINES):
            env = shards.environment(rank, STAGES * PIPELINES, job)
            env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            workers.append(Worker(run_example, rank, (job, cases), env))
        for worker in workers:
            worker.result()
    finally:
        for worker in workers:
            worker.close()
    for number, every in enumerate(MODES.values()):
        expected = list(one_process(every).values())
        torch.testing.assert_close(
            stages_of(tmp_path / str(number)), expected, rtol=1e-5, atol=1e-5
        )
