"""Training in virtual time, as the benchmarks of convergence and stragglers use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pscore.compressors import parse_compressor
from pscore.rules import parse_mode
from pssim.network import NetworkLink
from pssim.training import Compute, TrainingCluster, TrainingJob

LR, MOMENTUM, NUM_WORKERS, STEPS = 0.1, 0.9, 4, 30


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))


def minibatch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator)
    return inputs, inputs[:, :5].argmax(dim=1)


def gradient(model: nn.Module, rank: int, step: int) -> float:
    inputs, labels = minibatch(rank, step)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def make_job(mode: str, **changes: Any) -> TrainingJob:
    rule = parse_mode(mode)
    return TrainingJob(
        **{
            "rule": rule,
            "make_model": make_model,
            "gradient": gradient,
            "group": make_sgd([nn.Parameter(torch.zeros(1))]).param_groups[0],
            "make_inner": make_sgd if rule.outer_optimizer else None,
            "num_workers": NUM_WORKERS,
            "steps": STEPS,
            **changes,
        }
    )


def trained_plainly(lr: Any = None) -> nn.Module:
    """One process on the joint batch."""
    model = make_model()
    optimizer = make_sgd(model.parameters())
    for step in range(STEPS):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(step)
        parts = [minibatch(rank, step) for rank in range(NUM_WORKERS)]
        inputs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@pytest.mark.parametrize("lr", [None, lambda step: LR / (1 + step)])
@pytest.mark.parametrize("mode", ["ssgd", "local(steps=1)"])
def test_the_synchronous_modes_are_a_plain_loop_on_the_joint_batch(mode: str, lr: Any) -> None:
    cluster = TrainingCluster(make_job(mode, lr=lr)).run()
    shown = cluster.show(make_model())
    for ours, plain in zip(shown.parameters(), trained_plainly(lr).parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mode", ["asgd", "ssd(steps=4, warmup=3)", "ssgd(backup=1)", "diloco(steps=5)"]
)
def test_a_seed_gives_the_same_bits_and_another_seed_others(mode: str) -> None:
    runs = [TrainingCluster(make_job(mode, seed=seed)).run() for seed in (1, 1, 2)]
    weights = [run.weights() for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert runs[0].now_s == runs[1].now_s
    assert runs[0].now_s != runs[2].now_s


def test_a_slow_network_is_hidden_by_the_delay_modes_only() -> None:
    link = NetworkLink(bandwidth=2e6)
    seconds = {
        mode: TrainingCluster(make_job(mode, link=link, num_shards=1)).run().now_s
        for mode in ("ssgd", "od(warmup=0)", "ssd(steps=5, warmup=0)")
    }
    assert seconds["od(warmup=0)"] < 0.75 * seconds["ssgd"]
    assert seconds["ssd(steps=5, warmup=0)"] < 0.75 * seconds["ssgd"]


def test_simulated_time_is_computing_and_bytes_and_latency() -> None:
    compute = Compute(mean_s=1.0, deviation=0.0)
    link = NetworkLink(latency_s=0.25, bandwidth=1e3)
    cluster = TrainingCluster(
        make_job("ssgd", num_workers=1, num_shards=1, steps=10, compute=compute, link=link)
    ).run()
    nbytes = cluster.workers[0].pushed_nbytes + cluster.workers[0].pulled_nbytes
    # Requests for weights travel behind the gradients, an acknowledgement beside the answer.
    assert cluster.now_s == pytest.approx(10 * 1.0 + nbytes / 1e3 + 22 * 0.25, rel=0.02)


def test_a_fast_worker_is_ahead_by_the_bound_and_no_further() -> None:
    most = {}
    for mode in ("ssp(bound=2)", "asgd"):
        done = [0] * NUM_WORKERS
        ahead = [0]

        def count(
            cluster: TrainingCluster,
            rank: int,
            step: int,
            loss: float,
            done: Any = done,
            ahead: Any = ahead,
        ) -> None:
            done[rank] = step + 1
            ahead[0] = max(ahead[0], max(done) - min(done))

        TrainingCluster(make_job(mode, compute=Compute(slow={1: 60.0}), on_step=count)).run()
        most[mode] = ahead[0]
    assert most["ssp(bound=2)"] <= 3
    assert most["asgd"] == STEPS


def test_compressed_pushes_are_smaller_and_still_train() -> None:
    losses: dict[str, list[float]] = {}
    pushed = {}
    for name in ("none", "2bit"):
        seen = losses.setdefault(name, [])
        job = make_job(
            "cd(warmup=5)",
            compressor=parse_compressor(name),
            compress_min_nbytes=0,
            on_step=lambda cluster, rank, step, loss, seen=seen: seen.append(loss),
        )
        pushed[name] = TrainingCluster(job).run().workers[0].pushed_nbytes
    assert pushed["2bit"] < 0.6 * pushed["none"]
    assert sum(losses["2bit"][-20:]) < 0.8 * sum(losses["2bit"][:20])


def test_time_that_has_come_ends_a_run() -> None:
    cluster = TrainingCluster(make_job("asgd", steps=1 << 30)).run(until_s=0.1)
    assert 0.08 < cluster.now_s <= 0.1
