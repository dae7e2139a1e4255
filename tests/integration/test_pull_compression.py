"""Compressed pulls through real shards: one estimate, followed by all workers, to the bit."""

import os
import signal
from typing import Any

import numpy as np
import pytest

import psworker
from pscore.compressors import parse_compressor
from tests.inside import estimates_of, table_of
from tests.integration.cluster import Shards, Station, results_of
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of

STEPS = 6
LEASE_S = 6.0  # A healthy worker keeps it under load.
Weights = dict[str, np.ndarray]


def wrap(model: Any, **options: Any) -> psworker.DistributedOptimizer:
    return psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), compress_min_nbytes=1024, **options
    )


def step(me: Station, model: Any, optimizer: psworker.DistributedOptimizer, number: int) -> None:
    optimizer.zero_grad()
    backward(model, *batch(me.rank, number))
    optimizer.step()


def resyncs(optimizer: psworker.DistributedOptimizer) -> int:
    return sum(held.num_resyncs for held in estimates_of(optimizer))


def train(me: Station, mode: str, options: dict[str, Any], spoil: int = -1) -> dict[str, Any]:
    """Trains; before step `spoil` one bit of worker 1's estimate is changed."""
    model = make_model()
    optimizer = wrap(model, mode=mode, **options)
    during, shown = [], []
    for number in range(STEPS):
        if number == spoil and me.rank == 1:
            held = estimates_of(optimizer)[0]
            assert held.values is not None
            held.values.view(np.uint32)[0] ^= 1
        step(me, model, optimizer, number)
        during.append(weights_of(model))
        with optimizer.global_weights():
            shown.append(weights_of(model))
        assert same(weights_of(model), during[-1])
    traffic = optimizer.traffic
    layout = table_of(optimizer).flat.layout
    found = {
        "during": during,
        "shown": shown,
        "pulled": traffic.pulled_nbytes,
        "resyncs": resyncs(optimizer),
        "small": sum(spec.numel for spec in layout.slices if spec.compress),
        "payload": [spec.numel for spec in layout.slices if spec.compress],
        "rest": sum(spec.numel for spec in layout.slices if not spec.compress),
    }
    psworker.shutdown()
    return {**found, "final": weights_of(model)}


TWO_BIT = {"compression": "2bit", "pull_compression": "2bit"}


def test_all_workers_train_on_one_estimate_and_end_with_the_weights(shards: Shards) -> None:
    first, second = shards.run(train, "ssgd", TWO_BIT)
    for index in range(STEPS):
        assert same(first["during"][index], second["during"][index])
        assert same(first["shown"][index], second["shown"][index])
    assert same(first["during"][0], first["shown"][0])  # The whole, from which deltas lead on.
    for index in range(1, STEPS):
        assert not same(first["during"][index], first["shown"][index])
        for name, weight in first["shown"][index].items():
            if weight.ndim == 1:
                assert np.array_equal(weight, first["during"][index][name])
    assert same(first["final"], second["final"])
    assert same(first["final"], first["shown"][-1])
    assert first["resyncs"] == second["resyncs"] == 0


def test_the_bytes_pulled_are_those_of_the_deltas(shards: Shards) -> None:
    (found,) = shards.run(train, "ssgd", TWO_BIT, num_workers=1)
    compressor = parse_compressor("2bit")
    exact = 4 * (found["small"] + found["rest"])
    delta = sum(compressor.payload_nbytes_max(numel) for numel in found["payload"])
    # The weights at the start and for each `global_weights`; in training one whole, then deltas.
    trained = exact + (STEPS - 1) * (delta + 4 * found["rest"])
    assert found["pulled"] == (1 + STEPS) * exact + trained


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["fp16", "1bit", "topk(ratio=0.05)", "randomk(ratio=0.05)"])
def test_pulls_alone_can_be_compressed(shards: Shards, compressor: str) -> None:
    first, second = shards.run(train, "ssgd", {"pull_compression": compressor})
    assert same(first["final"], second["final"])
    assert all(same(*pair) for pair in zip(first["during"], second["during"], strict=True))
    assert first["resyncs"] == second["resyncs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asgd", "ssp(bound=1)", "dcasgd", "cd(steps=3, warmup=1)"])
def test_other_modes_share_the_estimate(shards: Shards, mode: str) -> None:
    for found in shards.run(train, mode, TWO_BIT):
        assert found["resyncs"] == 0
        assert all(np.isfinite(weight).all() for weight in found["final"].values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssd(steps=2, warmup=2, local=glu)", "ssd(steps=2, warmup=2)"])
def test_modes_that_pull_seldom_have_the_same_bits_each_time(shards: Shards, mode: str) -> None:
    """The second one brings the optimizer's state with each pull, and with it the weights."""
    results = [shards.run(train, mode, TWO_BIT) for _ in range(2)]
    for index in range(2):
        assert same(results[0][index]["final"], results[1][index]["final"])


@pytest.mark.slow
def test_every_data_plane_gives_the_same_bits(shards: Shards) -> None:
    results = [
        shards.run(train, "ssgd", TWO_BIT, env={"PACELINE_DATA_PLANE": plane})
        for plane in ("local", "tcp", "grpc")
    ]
    for first, _ in results[1:]:
        assert same(first["final"], results[0][0]["final"])
        assert same(first["during"][-1], results[0][0]["during"][-1])
        assert first["pulled"] == results[0][0]["pulled"]


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["tcp", "grpc"])
def test_an_estimate_that_differs_is_sent_whole(shards: Shards, plane: str) -> None:
    env = {"PACELINE_DATA_PLANE": plane}
    undisturbed, _ = shards.run(train, "ssgd", TWO_BIT, env=env)
    with shards.workers(train, "ssgd", TWO_BIT, 3, env=env) as workers:
        first, second = results_of(workers)
        assert "is not the shard's after 1 deltas; it is sent whole" in workers[1].written()
    assert (first["resyncs"], second["resyncs"]) == (0, 1)
    assert second["pulled"] > first["pulled"]
    assert same(second["final"], undisturbed["final"])
    assert all(same(*pair) for pair in zip(second["during"], undisturbed["during"], strict=True))


def train_on_signal(me: Station) -> dict[str, Any]:
    """Makes a step for each word from the test, until it says stop."""
    model = make_model()
    optimizer = wrap(model, **TWO_BIT)
    number = 0
    while me.hear():
        before = optimizer.traffic.pulled_nbytes
        step(me, model, optimizer, number)
        number += 1
        me.tell(optimizer.traffic.pulled_nbytes - before)
    found = {"during": weights_of(model), "resyncs": resyncs(optimizer)}
    psworker.shutdown()
    return found


@pytest.mark.slow
def test_a_worker_that_comes_back_gets_the_whole() -> None:
    with Shards(2, lease_s=LEASE_S) as shards, shards.workers(train_on_signal) as (first, second):
        pulled: list[list[int]] = []
        for number in range(6):
            if number == 2:
                os.kill(second.pid, signal.SIGSTOP)
                first.tell(True)
                first.hear()  # The step closes when the lease is over.
                os.kill(second.pid, signal.SIGCONT)
                second.tell(True)
                second.hear()
                continue
            for worker in (first, second):
                worker.tell(True)
            pulled.append([worker.hear() for worker in (first, second)])
        for worker in (first, second):
            worker.tell(False)
        mine, theirs = results_of([first, second])
    assert pulled[0][0] == pulled[0][1] > pulled[1][0] == pulled[1][1]
    assert pulled[2] == [pulled[1][0], pulled[0][1]]  # It has the estimate anew, whole.
    assert pulled[3] == pulled[1]
    assert same(mine["during"], theirs["during"])
    assert mine["resyncs"] == theirs["resyncs"] == 0
