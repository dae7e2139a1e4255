"""Modes between the replicas of a pipeline's stage, on real shards and workers.

A stage adds a vector to its input, and the loss of minibatch m is component m. So the gradient of
every stage is 1 at that component whatever the weights, and the weights tell which minibatches are
in them, and with which learning rate.
"""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.paper import test_pipeline as model

TOTAL, SAVED = 13, 8  # The last round of two replicas holds one minibatch.
LR = 0.5
# Learning rate of a minibatch at the first stage, of two replicas, and at the second one.
MODES = {
    "ssgd": (LR / 2, LR / 2),
    "ssd(steps=3, warmup=0)": (LR / 2, LR / 2),
    "asgd": (LR, LR),
    "ssp(bound=1)": (LR, LR),
    "dcasgd": (LR, LR),
}
COUNTED = ["staleness", "ssgd(backup=1)"]  # With a factor of the delay, and not all of them.


class Offset(nn.Module):
    """Adds a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(TOTAL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def make_run(mode: str, **options: Any) -> psworker.Pipeline:
    return psworker.Pipeline(
        nn.Sequential(Offset(), Offset()),
        torch.zeros(1, TOTAL),
        lambda output, minibatch: output[0, minibatch],
        lambda parameters: torch.optim.SGD(parameters, lr=LR),
        [("0", 2), ("1", 1)],
        mode=mode,
        **options,
    )


def train(me: Station, job: str, folder: Path) -> list[Any]:
    """Trains in each mode in turn; returns the weights of this worker's stage."""
    found = []
    for number, mode in enumerate([*MODES, *COUNTED]):
        run = make_run(mode, job=f"{job}-{number}")
        for minibatch in range(TOTAL):
            run.step(torch.zeros(1, TOTAL), minibatch)
            if minibatch + 1 == SAVED:
                run.save(folder / mode)
        run.finish()
        found.append(next(iter(run.state_dict().values())).tolist())
    return found


def test_every_minibatch_counts_once_in_each_mode(shards: Shards, tmp_path: Path) -> None:
    with shards.workers(train, new_job(), tmp_path, num_workers=3) as workers:
        by_rank = [worker.result() for worker in workers]
    for number, mode in enumerate([*MODES, *COUNTED]):
        first, second, last = (torch.tensor(results[number]) for results in by_rank)
        assert torch.equal(first, second), mode
        (path,) = (tmp_path / mode).iterdir()
        saved = safetensors.torch.load_file(path / "model.safetensors")
        assert (saved["0.offset"][SAVED:] == 0).all(), mode
        if mode == "ssgd(backup=1)":
            assert ((first == 0) | (first == -LR / 2) | (first == -LR)).all()
            # Each update has one minibatch or more. Which ones is open: a replica that was too late
            # continues with the oldest open update, which then need not be that of its round.
            assert torch.count_nonzero(first) >= TOTAL // 2
            continue
        assert (saved["0.offset"][:SAVED] != 0).all(), mode
        assert (first != 0).all(), mode
        if mode in MODES:
            rates = torch.full((2, TOTAL), LR)
            rates[0], rates[1] = MODES[mode]
            if MODES[mode][0] < LR:
                rates[0, -1] = LR  # Alone in its update.
            torch.testing.assert_close(torch.stack([first, last]), -rates, msg=mode)


def train_one_stage(me: Station, job: str) -> list[Any]:
    """Trains as a pipeline of one stage, and with a `DistributedOptimizer`."""
    pipeline = nn.Sequential(*model.make_stages(1)).float()
    run = psworker.Pipeline(
        pipeline,
        torch.zeros(1, model.WIDTH),
        model.loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=model.LR, momentum=0.9),
        [("0.2", 2)],
        job=f"{job}-pipeline",
    )
    for x, y in model.data(12):
        run.step(x.float(), y.float())
    run.finish()
    alone = nn.Sequential(*model.make_stages(1)).float()
    psworker.init(job=f"{job}-alone")
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(alone.parameters(), lr=model.LR, momentum=0.9), alone.named_parameters()
    )
    for x, y in model.data(12)[me.rank :: 2]:
        optimizer.zero_grad()
        torch.autograd.backward(model.loss_of(alone(x.float()), y.float()))
        optimizer.step()
    psworker.shutdown()
    return [[p.detach().numpy() for p in one.parameters()] for one in (pipeline, alone)]


def test_one_stage_is_ssgd_to_the_bit(shards: Shards) -> None:
    with shards.workers(train_one_stage, new_job(), num_workers=2) as workers:
        results = [worker.result() for worker in workers]
    for found in results:
        for values in zip(*found, results[0][1], strict=True):
            assert all((value == values[0]).all() for value in values)


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("diloco", {}, "in which workers make steps by themselves; take ssgd"),
        ("adpsgd", {}, "in which workers make steps by themselves; take ssgd"),
        ("asgd", {"schedule": "2bw"}, "schedule='2bw' with mode='asgd': the mode between"),
        ("ssd", {"schedule": "ScheduleGPipe"}, "must be ssgd without backup"),
        ("ssd", {"stash": "vertical"}, "stash='vertical' with mode='ssd'"),
        (
            "ssgd(backup=1)",
            {"on_lost": "continue"},
            "on_lost='continue' with mode='ssgd(backup=1)'",
        ),
        ("ssgd(backup=2)", {}, "stage 0: ssgd.backup is 2, must be less than the 2 workers"),
    ],
)
def test_modes_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(psworker.ConfigError) as refused:
        make_run(mode, servers="127.0.0.1:1", **options)
    assert message in str(refused.value)
