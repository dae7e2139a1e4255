"""Worker 0 leaves a job, and the others change the mode, the model or the state, or begin anew."""

from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station
from tests.integration.models import backward, batch, make_model, weights_of

STEPS, LEAVES = 6, 3


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def change(act: str, model: Any, optimizer: Any) -> None:
    if act == "mode":
        optimizer.set_mode("allreduce")
    elif act == "unfreeze":
        model[:4].requires_grad_(True)


def train(me: Station, act: str) -> dict[str, np.ndarray]:
    model: Any = make_model()
    model[:4].requires_grad_(act != "unfreeze")
    optimizer = psworker.DistributedOptimizer(sgd(model), model.named_parameters())
    saved = optimizer.state_dict()
    for step in range(STEPS):
        if step == LEAVES:
            if me.rank == 0:
                break
            change(act, model, optimizer)
            if act == "state":
                model.load_state_dict(make_model().state_dict())
                optimizer.load_state_dict(saved)
                assert optimizer.steps == 0
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


def plain(act: str) -> dict[str, np.ndarray]:
    """Returns the weights of torch's own optimizer: both workers have the same batches."""
    model: Any = make_model()
    model[:4].requires_grad_(act != "unfreeze")
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == LEAVES:
            change("" if act == "mode" else act, model, optimizer)
            if act == "state":
                model.load_state_dict(make_model().state_dict())
                optimizer = sgd(model)
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    return weights_of(model)


def begin(me: Station, what: str) -> dict[str, np.ndarray]:
    """Trains a model, and then another, which worker 0 does not train."""
    model: Any = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model), model.named_parameters())
    optimizer.close()
    if me.rank == 0:
        psworker.shutdown()
        return {}
    torch.manual_seed(me.rank)  # The weights of the lowest rank left count.
    model, table, rows = torch.nn.Linear(4, 1), None, None
    if what == "rows":
        table = psworker.Embedding(10, 4, name="rows")
    elif what == "given rows":
        table = psworker.Embedding.from_pretrained(torch.nn.Embedding(10, 4), name="rows")
    if table is not None:
        rows = torch.optim.SGD([table.weight], lr=0.1)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        rows=rows,
        publish_every=1,
    )
    inputs = torch.ones(1, 4) if table is None else table(torch.tensor([3]))
    model(inputs).sum().backward()
    optimizer.step()
    found = weights_of(model)
    with torch.no_grad():
        found |= {} if table is None else {"row": table(torch.tensor([3])).numpy()}
    psworker.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "rows", "given rows"])
def test_the_lowest_rank_left_begins(shards: Shards, what: str) -> None:
    found = shards.run(begin, what, num_workers=3)
    torch.manual_seed(1)
    first = torch.nn.Linear(4, 1)
    for name, weight in found[1].items():
        assert np.array_equal(weight, found[2][name]), name
    assert np.array_equal(found[1]["bias"], first.bias.detach().numpy() - np.float32(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("act", ["mode", "unfreeze", "state"])
def test_the_others_go_on_without_it(shards: Shards, act: str) -> None:
    found = shards.run(train, act, num_workers=2)[1]
    for name, weight in plain(act).items():
        assert np.abs(found[name] - weight).max() < 1e-5, name
