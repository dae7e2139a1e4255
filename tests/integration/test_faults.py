"""Training through lost, late, doubled, reordered and damaged frames ends where it does without."""

import numpy as np
import pytest
import torch

import psworker
from pscore.net import faults
from tests.integration.cluster import Shards, Station, clean_environment
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of

Weights = dict[str, np.ndarray]
STEPS = 12
AT_THE_WORKER = {
    "drop": "drop=0.1,seed=1",
    "disconnect": "disconnect=0.1,seed=2",
    "duplicate": "duplicate=0.5,seed=3",
    "reorder": "reorder=0.3,seed=4",
    "corrupt": "corrupt=0.1,seed=5",
    "delay": "delay=3ms:0.5@push,seed=6",
    "all": "drop=0.04,disconnect=0.04,duplicate=0.2,reorder=0.2,corrupt=0.04,delay=2ms:0.2,seed=7",
}


def train(me: Station, mode: str) -> Weights:
    torch.set_num_threads(1)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, overlap=True
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


@pytest.fixture(scope="module")
def expected(shards: Shards) -> Weights:
    """Returns the end of a training run without faults."""
    weights: Weights = shards.run(train, "ssgd")[0]
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", "tcp", "grpc"])
@pytest.mark.parametrize("fault", list(AT_THE_WORKER))
def test_faults_of_workers_change_no_bit(
    shards: Shards, expected: Weights, fault: str, plane: str
) -> None:
    env = {"PACELINE_DATA_PLANE": plane, faults.VARIABLE: AT_THE_WORKER[fault]}
    for weights in shards.run(train, "ssgd", env=env):
        assert same(weights, expected)


@pytest.fixture(scope="module")
def faulty_shards() -> object:
    """Shards whose answers are lost, doubled, late and damaged."""
    text = "drop=0.04@pushed,disconnect=0.04,duplicate=0.2,reorder=0.2,corrupt=0.04,seed=9"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tests.integration.cluster.clean_environment",
            lambda: {**clean_environment(), faults.VARIABLE: text},
        )
        started = Shards(2)
    with started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", "tcp", "grpc"])
def test_faults_of_shards_change_no_bit(
    faulty_shards: Shards, expected: Weights, plane: str
) -> None:
    env = {"PACELINE_DATA_PLANE": plane}
    for weights in faulty_shards.run(train, "ssgd", env=env):
        assert same(weights, expected)


def test_a_fault_that_is_none_is_an_error_of_the_worker(shards: Shards) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: PACELINE_FAULTS: 'lose=1' must be"):
        shards.run(train, "ssgd", num_workers=1, env={faults.VARIABLE: "lose=1"})
