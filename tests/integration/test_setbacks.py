"""After an error that a script catches, all of the wrapper can be used, at once (recovery.py)."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import psworker
from psworker.connection.exchange.payloads import Payloads
from psworker.transports import OutgoingPush
from tests.inside import table_of
from tests.integration.cluster import Shards, Station
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of

STEPS, BAD = 7, 3
HUGE = 3e38


def wrap(model: torch.nn.Module, **options: Any) -> psworker.DistributedOptimizer:
    return psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), compress_min_nbytes=1024, **options
    )


def residual(optimizer: psworker.DistributedOptimizer) -> dict[str, np.ndarray]:
    table_of(optimizer).exchange.flush()
    return table_of(optimizer).exchange.compressor_state()


def spoil_gradient(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    """The last slice to be looked at holds a NaN."""
    grad = model.get_parameter("0.weight").grad
    assert grad is not None
    grad[0, 0] = float("nan")


def overflow(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    """One number of the last slice cannot be added to the residual."""
    spec = table_of(optimizer).exchange.layout.slices[0]
    state = residual(optimizer)
    state["residual"][spec.start] = HUGE
    table_of(optimizer).exchange.load_compressor_state(state)
    grad = list(model.parameters())[spec.segments[0].tensor].grad
    assert grad is not None
    grad.view(-1)[spec.segments[0].tensor_start] = HUGE


def no_rate(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = float("nan")


def no_weight(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    optimizer.samples = -1.0


def clip(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


Fault = Callable[[torch.nn.Module, psworker.DistributedOptimizer], None]


def look(model: torch.nn.Module, optimizer: psworker.DistributedOptimizer) -> None:
    """Uses what a script may use after an error."""
    state = optimizer.state_dict()
    assert all(
        bool(torch.isfinite(x).all()) for x in state["paceline"]["compressor_state"].values()
    )
    with optimizer.global_weights():
        assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def spoil_and_step(
    fault: Fault,
    model: torch.nn.Module,
    optimizer: psworker.DistributedOptimizer,
    spoilt: dict[str, np.ndarray],
) -> None:
    fault(model, optimizer)
    spoilt.update(residual(optimizer))
    optimizer.step()


def train(me: Station, fault: Fault | None, options: dict[str, Any], ends: bool) -> Any:
    """Trains; before the step `BAD` makes another one that ends in an error, and is left out."""
    model = make_model()
    optimizer = wrap(model, **options)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        if step == BAD and fault is not None:
            optimizer.zero_grad()
            backward(model, *batch(me.rank, 99))
            kept, spoilt = residual(optimizer), residual(optimizer)
            with pytest.raises((psworker.GradientError, psworker.ConfigError)):
                spoil_and_step(fault, model, optimizer, spoilt)
            if not options.get("overlap"):
                assert all((residual(optimizer)[name] == spoilt[name]).all() for name in spoilt)
            optimizer.param_groups[0]["lr"] = lr
            if fault is overflow:  # The value that this test put there.
                table_of(optimizer).exchange.load_compressor_state(kept)
            look(model, optimizer)
            if ends:
                break
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    optimizer.close()
    psworker.shutdown()
    return weights_of(model)


DELAYED = "ssd(steps=2, warmup=1, local=sgd)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("ssgd", spoil_gradient),
        (DELAYED, spoil_gradient),
        ("ssgd", overflow),
        (DELAYED, overflow),
        ("ssgd", no_rate),
        ("ssgd", no_weight),
    ],
)
def test_a_step_that_was_refused_here_has_not_been(shards: Shards, mode: str, fault: Fault) -> None:
    """Nothing has left: residuals are as before, and training has the bits of one without it."""
    options = {"mode": mode, "compression": "2bit", "overlap": False}
    first, second = shards.run(train, fault, options, False)
    assert same(first, second)
    plain, _ = shards.run(train, None, options, False)
    assert same(first, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mode", "compression"),
    [
        (clip, "ssgd", "none"),
        (spoil_gradient, "ssgd", "2bit"),
        (spoil_gradient, "asgd", "2bit"),
        (clip, "cd(warmup=1)", "none"),
    ],
)
def test_slices_that_have_left_count_once_and_the_others_later(
    shards: Shards, fault: Fault, mode: str, compression: str
) -> None:
    options = {"mode": mode, "compression": compression, "overlap": True}
    first, second = shards.run(train, fault, options, False)
    assert all(np.isfinite(weight).all() for weight in first.values())
    assert same(first, second) or mode == "asgd"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [spoil_gradient, overflow])
def test_training_may_end_behind_an_error(shards: Shards, fault: Fault) -> None:
    options = {"mode": "ssgd", "compression": "2bit", "overlap": True}
    shards.run(train, fault, options, True)


def step_and_wait(optimizer: psworker.DistributedOptimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.step(optimizer)
    optimizer.state_dict()  # A mode that does not wait for its pushes hears of it here.


def be_refused(me: Station, mode: str, scale: float) -> tuple[int, dict[str, np.ndarray]]:
    """Trains; at one step a shard refuses what worker 0 sends of one of two slices."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 0.0)
    scaler.scale(torch.zeros(()))  # From now on it has its scale, which changes no gradient here.
    optimizer = wrap(model, mode=mode, compression="2bit", overlap=False)
    prepare = Payloads.prepare

    def nonsense(payloads: Payloads, index: int, *args: Any, **options: Any) -> OutgoingPush:
        outgoing = prepare(payloads, index, *args, **options)
        outgoing.header.samples = -1.0 if index == 1 else outgoing.header.samples
        return outgoing

    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        if step == BAD and me.rank == 0:
            with (
                mock.patch.object(Payloads, "prepare", nonsense),
                pytest.raises(psworker.RemoteProtocolError, match="weight of a push is -1"),
            ):
                step_and_wait(optimizer, scaler)
            if scale == 0.0:  # Else the next step() comes back.
                look(model, optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    optimizer.close()
    clock = optimizer.clock
    psworker.shutdown()
    return clock, weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "scale"), [("ssgd", 0.0), ("ssd(steps=2, warmup=1)", 0.0), ("ssgd", 1.0)]
)
def test_a_refused_push_makes_the_worker_join_again(
    shards: Shards, mode: str, scale: float
) -> None:
    (_, first), (_, second) = shards.run(be_refused, mode, scale)
    assert all(np.isfinite(weight).all() for weight in first.values())
    assert first.keys() == second.keys()


def lose_a_round(me: Station) -> dict[str, np.ndarray]:
    """The weights are NaN at the end of a round; the round is given up, and the next one counts."""
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)  # No NaN stays in a momentum.
    named = model.named_parameters()
    optimizer = psworker.DistributedOptimizer(plain, named, mode="local(steps=2)")
    for step in range(6):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        if step == 3:
            with torch.no_grad():
                model.get_parameter("2.weight").fill_(float("nan"))
            with pytest.raises(psworker.GradientError, match="those of its beginning"):
                optimizer.step()
            look(model, optimizer)
            backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


def test_a_round_with_a_nan_is_given_up(shards: Shards) -> None:
    first, _ = shards.run(lose_a_round)
    assert all(np.isfinite(weight).all() for weight in first.values())
