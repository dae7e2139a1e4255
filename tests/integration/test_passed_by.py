"""Workers wait for all others between two steps, and some have been passed by in steps."""

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station
from tests.integration.models import make_model, sgd

STEPS = 4
MODES = ["ssgd(backup=1)", "local(steps=2, backup=1)", "diloco(steps=2, quorum=2)"]


def wait_for_all(me: Station, mode: str, where: str) -> float:
    """Trains as many steps as the others, and waits for them; rank 2 begins once they wait."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode
    )

    def train(steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()

    if me.rank == 2:
        me.hear()
    train(STEPS)
    if me.rank < 2:
        me.tell()
    if where == "barrier":
        psworker.barrier()
    elif where == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    mean = psworker.push_pull(torch.tensor([float(me.rank)]), "mean")
    train(STEPS)
    psworker.shutdown()
    return float(mean)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["barrier", "load_state_dict", "push_pull"])
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_was_passed_by_comes_to_where_the_others_wait(
    shards: Shards, mode: str, where: str
) -> None:
    """Its steps then need no gradient of workers that cannot push any."""
    with shards.workers(wait_for_all, mode, where, num_workers=3) as workers:
        for worker in workers[:2]:
            worker.hear()
        workers[2].tell()
        assert [worker.result() for worker in workers] == [1.0] * 3  # The mean of all ranks.
