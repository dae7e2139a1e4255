"""A model that grows in training: parameters are unfrozen, or groups are added."""

import io
import logging
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from pscore.table_names import newest, next_name
from psserver.remote import checkpoint, checkpoint_files
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, same, weights_of

STEPS = 12
Weights = dict[str, np.ndarray]


def adamw(model: Any, *layers: int) -> torch.optim.Optimizer:
    groups = [{"params": model[layer].parameters(), "lr": 0.01 / (1 + layer)} for layer in layers]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def thaw(model: Any, optimizer: Any, step: int) -> None:
    """Unfreezes a layer of the optimizer at step 4, and adds a group at step 8."""
    if step == 4:
        model[2].requires_grad_(True)
    if step == 8:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})


def make_step(me: Station | None, model: Any, optimizer: Any, step: int) -> None:
    """Makes a worker's step; without Paceline that of both batches."""
    optimizer.zero_grad()
    ranks = (0, 1) if me is None else (me.rank,)
    parts = zip(*(batch(rank, step) for rank in ranks), strict=True)
    backward(model, *map(torch.cat, parts))
    optimizer.step()


def train(me: Station, mode: str, overlap: bool = False) -> Any:
    """Trains with the last layer at first; returns weights and a state that loads elsewhere."""
    model: Any = make_model()
    model[:4].requires_grad_(False)
    optimizer = psworker.DistributedOptimizer(
        adamw(model, 2, 4) if "local" not in mode else torch.optim.SGD(model[2:].parameters(), 0.1),
        model.named_parameters(),
        mode=mode,
        overlap=overlap,
        compression="none" if overlap else "fp16",
        compress_min_nbytes=0,
    )
    for step in range(STEPS):
        thaw(model, optimizer, step)
        make_step(me, model, optimizer, step)
    assert optimizer.steps == STEPS
    file = io.BytesIO()
    with optimizer.global_weights():
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    psworker.shutdown()
    return weights_of(model), file.getvalue()


def alone() -> Weights:
    model: Any = make_model()
    model[:4].requires_grad_(False)
    optimizer = adamw(model, 2, 4)
    for step in range(STEPS):
        thaw(model, optimizer, step)
        make_step(None, model, optimizer, step)
    return weights_of(model)


def load_part(me: Station) -> tuple[list[float], list[str]]:
    """Loads a state while its first layer is frozen; returns counts of steps and log lines."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    saved: dict[str, Any] = {}
    for is_again in (False, True):
        model: Any = make_model()
        model[0].requires_grad_(False)
        optimizer: Any = adamw(model, 0, 2, 4)
        optimizer = psworker.DistributedOptimizer(optimizer, model.named_parameters())
        if is_again:
            optimizer.load_state_dict(saved)
        for step in () if is_again else range(4):
            model[0].requires_grad_(step >= 2)
            make_step(me, model, optimizer, step)
        saved = optimizer.state_dict()
    psworker.shutdown()
    return [entry["step"].item() for entry in saved["state"].values()], said


def test_a_state_keeps_its_counts_where_a_layer_is_frozen_and_names_those_left_out(
    shards: Shards,
) -> None:
    """Each count was taken for the parameter at its place, also in a smaller table."""
    counts, said = shards.run(load_part)[0]
    assert counts == [4.0] * 4
    assert [line for line in said if line.startswith("the state of 2 parameters that were frozen")]


def resume(me: Station, saved: bytes) -> tuple[Weights, int]:
    """Loads the state into a wrapper that is made with all parameters, and makes no step."""
    model: Any = make_model()
    optimizer = psworker.DistributedOptimizer(adamw(model, 2, 4, 0), model.named_parameters())
    weights, state = torch.load(io.BytesIO(saved))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    for index, entry in state["state"].items():
        for name, values in entry.items():
            assert torch.equal(again["state"][index][name], values), (index, name)
    steps = optimizer.steps
    psworker.shutdown()
    return weights_of(model), steps


def turn(me: Station | None) -> Weights:
    """Trains one layer, then another one, and both at the end."""
    model: Any = make_model()
    model[:4].requires_grad_(False)
    optimizer = adamw(model, 2, 4)
    if me is not None:
        optimizer = psworker.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        model[2].requires_grad_(step >= 4)
        model[4].requires_grad_(not 4 <= step < 8)
        make_step(me, model, optimizer, step)
    psworker.shutdown()
    return weights_of(model)


def test_a_layer_that_is_frozen_while_the_model_grows_keeps_its_state(shards: Shards) -> None:
    """Its moments and its count of steps began anew when it was unfrozen."""
    first, second = shards.run(turn)
    assert same(first, second)
    for name, weight in turn(None).items():
        assert relative_error(first[name], weight) <= 2e-6, name


@pytest.mark.slow
def test_with_gradients_that_leave_during_backward_it_equals_torch(shards: Shards) -> None:
    plain = alone()
    first, second = shards.run(train, "ssgd", True)
    assert same(first[0], second[0])
    for name, weight in plain.items():
        assert relative_error(first[0][name], weight) <= 2e-6, name
    for weights, steps in shards.run(resume, first[1]):
        assert steps == STEPS
        assert same(weights, first[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssd(steps=3, warmup=2)", "local(steps=3)", "asgd"])
def test_in_other_modes_all_workers_continue_with_one_model(shards: Shards, mode: str) -> None:
    (first, _), (second, _) = shards.run(train, mode)
    start = weights_of(make_model())
    for name, weight in first.items():
        assert np.isfinite(weight).all()
        assert not np.array_equal(weight, start[name]), name
    if mode != "asgd":  # There each leaves with the newest weights at that time.
        assert same(first, second)


OPTIMIZERS: dict[str, Any] = {
    "on the shards, with a state of scalars": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "on the workers": lambda groups: torch.optim.Adamax(groups, lr=0.01),
}


def grow_with(me: Station | None, kind: str) -> Weights:
    """Trains as `train` does with another optimizer; without Paceline on both batches."""
    model: Any = make_model()
    model[:4].requires_grad_(False)
    groups = [{"params": model[2].parameters()}, {"params": model[4].parameters(), "lr": 0.003}]
    optimizer = OPTIMIZERS[kind](groups)
    if me is not None:
        optimizer = psworker.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        thaw(model, optimizer, step)
        make_step(me, model, optimizer, step)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_equals_torch_wherever_the_optimizer_runs(shards: Shards, kind: str) -> None:
    plain = grow_with(None, kind)
    for ours in shards.run(grow_with, kind):
        for name, weight in plain.items():
            assert relative_error(ours[name], weight) <= 5e-6, name


def come_late(me: Station) -> tuple[str, str, int]:
    """Makes the wrapper of the beginning, which is refused, and that of the grown model."""
    model: Any = make_model()
    model[:4].requires_grad_(False)
    with pytest.raises(psworker.JobMismatchError) as caught:
        psworker.DistributedOptimizer(adamw(model, 2, 4), model.named_parameters())
    psworker.shutdown()
    model.requires_grad_(True)
    optimizer = psworker.DistributedOptimizer(adamw(model, 2, 4, 0), model.named_parameters())
    return str(caught.value), table_of(optimizer).name, optimizer.steps


def stay(me: Station, num_steps: int) -> Weights:
    """Trains and grows; the first worker then holds the job until another one has come."""
    model: Any = make_model()
    model[:4].requires_grad_(False)
    optimizer = psworker.DistributedOptimizer(adamw(model, 2, 4), model.named_parameters())
    for step in range(num_steps):
        thaw(model, optimizer, step)
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    if me.rank == 0:
        me.tell()
        me.hear()
    return weights_of(model)


@pytest.mark.slow
def test_a_worker_that_comes_later_declares_the_grown_model(shards: Shards) -> None:
    """And an export has the weights of the newest table."""
    job = new_job()
    with (
        shards.workers(stay, STEPS, ranks=[0], job=job) as (first,),
        shards.workers(stay, 1, ranks=[1], job=job) as (second,),
    ):
        second.result()
        first.hear()
        found = checkpoint.capture(shards.addresses, ANYONE, job, weights_only=True)
        with shards.workers(come_late, ranks=[1], job=job) as (again,):
            message, name, steps = again.result()
        first.tell()
        weights = first.result()
    told = "make DistributedOptimizer with the mode and all parameters that the job has by now"
    assert told in message
    assert (name, steps) == ("model+2", STEPS)
    exported = checkpoint_files.newest_table(found).arrays["weights"]
    for key, weight in weights.items():
        assert np.array_equal(np.asarray(exported[key]).reshape(weight.shape), weight), key


def refused_groups(me: Station | None) -> Weights:
    """Trains; between two steps groups and a thawed parameter are refused, and change nothing."""
    model: Any = make_model()
    wrong = [
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False),
        torch.nn.Parameter(torch.zeros(3, device="meta"), requires_grad=False),
    ]
    optimizer: Any = torch.optim.SGD([*model[2:].parameters(), *wrong], lr=0.1, momentum=0.9)
    if me is not None:
        named = [*model.named_parameters(), ("float64", wrong[0]), ("meta", wrong[1])]
        optimizer = psworker.DistributedOptimizer(optimizer, named)
    for step in range(STEPS):
        if me is not None and step == 4:
            refuse_groups(optimizer, model, wrong)
        make_step(me, model, optimizer, step)
    return weights_of(model)


def refuse_groups(optimizer: Any, model: Any, wrong: list[torch.nn.Parameter]) -> None:
    new = torch.nn.Linear(3, 3)
    for group, message in [
        ({"params": new.parameters()}, "in the optimizer but not in named_parameters.* of its own"),
        ({"params": model[0].parameters(), "lr": float("nan")}, "lr of parameter group 1 is nan"),
        ({"params": model[0].parameters(), "differentiable": True}, "has differentiable=True"),
    ]:
        with pytest.raises(psworker.ConfigError, match=message):
            optimizer.add_param_group(group)
    for parameter, message in zip(wrong, ("must be float32", "must be on one device"), strict=True):
        parameter.requires_grad_(True)
        with pytest.raises(psworker.ConfigError, match=message):
            optimizer.step()
        parameter.requires_grad_(False)


def test_a_refused_parameter_changes_nothing(shards: Shards) -> None:
    plain = refused_groups(None)
    for ours in shards.run(refused_groups):
        for name, weight in plain.items():
            assert relative_error(ours[name], weight) <= 5e-6, name


def grow_apart(me: Station) -> str:
    """Each worker adds another layer: one of them is refused, and trains no more."""
    model: Any = make_model()
    optimizer = psworker.DistributedOptimizer(adamw(model, 4), model.named_parameters())
    try:
        optimizer.add_param_group({"params": model[2 * me.rank].parameters(), "lr": 0.1})
    except psworker.JobMismatchError:
        backward(model, *batch(me.rank, 0))
        with pytest.raises(psworker.ConfigError) as caught:
            optimizer.step()
        return str(caught.value)
    return ""


def test_a_worker_whose_change_has_failed_trains_no_more(shards: Shards) -> None:
    said = shards.run(grow_apart)
    message = "training has ended: step() called after a change of parameters or mode that failed"
    assert sorted(said) == ["", message]


def grow_elastic(me: Station) -> str:
    model: Any = make_model()
    model[0].requires_grad_(False)
    optimizer = psworker.DistributedOptimizer(adamw(model, 0, 2, 4), model.named_parameters())
    model.requires_grad_(True)
    backward(model, *batch(0, 0))
    with pytest.raises(psworker.ConfigError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_elastic_job_refuses_it(shards: Shards) -> None:
    bounds = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    (message,) = shards.run(grow_elastic, num_workers=1, env=bounds)
    assert message.startswith("parameters cannot be added or unfrozen in a job whose workers come")


def test_names_of_tables_count_on() -> None:
    assert next_name("model.1") == "model.1+1"
    assert next_name("model+9") == "model+10"
    known = ["model", "model+1", "model+2", "model.1+1"]
    assert newest("model", known) == "model+2"
    assert newest("model.1", known) == "model.1+1"
    assert newest("model.2", known) == "model.2"
