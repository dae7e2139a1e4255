"""Loss scaling with the stock `torch.amp.GradScaler`, and steps that a worker leaves out.

A scale that is a power of two changes no bit of a gradient that neither overflows nor vanishes. So
a run with a scaler is held to the same run without one, in which every worker leaves out the batch
that overflows; and that, in `ssgd`, to plain torch in one process.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from psworker.connection.membership.session import Session
from tests.integration.cluster import Shards, Station, new_job, wait_until
from tests.integration.models import batch, make_model, relative_error, same, weights_of

STEPS = 8
SPOILT = 5  # The batch that overflows, on rank 1 alone.
SCALES = (4.0, 1024.0, 65536.0)
MODES = ("ssgd", "od(warmup=2)", "ssd(steps=2, warmup=2)", "local(steps=2)")
RECIPES = ("plain", "clipped", "accumulated")
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}
Weights = dict[str, np.ndarray]


def losses(model: torch.nn.Module, rank: int, step: int, recipe: str) -> Iterator[torch.Tensor]:
    """Yields the loss of each backward pass of a step; that of batch `SPOILT` of rank 1 is Inf."""
    num_parts = 2 if recipe == "accumulated" else 1
    for part in range(num_parts):
        inputs, classes = batch(rank + 10 * part, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes) / num_parts
        yield loss * float("inf") if (rank, step) == (1, SPOILT) else loss


def train_scaled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, recipe: str, scale: float
) -> float:
    """Trains as PyTorch's examples of mixed precision do; returns the scale at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, rank, step, recipe):
            torch.autograd.backward(scaler.scale(loss))
        if recipe == "clipped":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def train_unscaled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, recipe: str, mode: str
) -> None:
    """Trains without a scaler, on the batches that do not overflow."""
    for step in range(STEPS):
        if step == SPOILT and not mode.startswith("local"):
            continue
        optimizer.zero_grad()
        for loss in losses(model, rank, step, recipe):
            torch.autograd.backward(loss)
        if (rank, step) == (1, SPOILT):
            optimizer.skip_step()  # type: ignore[attr-defined]
            continue
        if recipe == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def wrap(make: str, mode: str, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = make_model()
    return model, psworker.DistributedOptimizer(
        OPTIMIZERS[make](model.parameters()), model.named_parameters(), mode=mode, **options
    )


def compare(me: Station, job: str, make: str) -> dict[str, Any]:
    """Returns weights, clock and scale of each mode and recipe, with a scaler and without one."""
    found: dict[str, Any] = {}
    scales = itertools.cycle(SCALES)
    for mode, recipe in itertools.product(MODES, RECIPES):
        scale = next(scales)
        for is_scaled in (True, False):
            me.tell(mode)  # It continues: the first worker of all compiles kernels.
            psworker.shutdown()
            psworker.init(job=f"{job}-{mode}-{recipe}-{is_scaled}")
            model, optimizer = wrap(make, mode)
            final = 0.0
            if is_scaled:
                final = train_scaled(model, optimizer, me.rank, recipe, scale) / scale
            else:
                train_unscaled(model, optimizer, me.rank, recipe, mode)
            clock = optimizer.clock
            optimizer.close()
            found[f"{mode} {recipe} {is_scaled}"] = (weights_of(model), clock, final)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scaler_changes_no_bit_and_an_overflow_is_left_out_by_all(
    shards: Shards, make: str
) -> None:
    first, second = shards.run(compare, new_job(), make)
    for mode, recipe in itertools.product(MODES, RECIPES):
        case = f"{mode} {recipe}"
        scaled = [ours[f"{case} True"] for ours in (first, second)]
        unscaled = [ours[f"{case} False"] for ours in (first, second)]
        for (weights, clock, final), (expected, expected_clock, _) in zip(
            scaled, unscaled, strict=True
        ):
            assert clock == expected_clock, case
            assert same(weights, expected), case
            if not mode.startswith("local"):  # Doubled at 3, halved at the overflow.
                assert final == 1.0, case
        assert same(scaled[0][0], scaled[1][0]), case


def together(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Weights:
    """Trains in one process on the mean gradient of both workers, with a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # It wraps the optimizer's step.
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for loss in losses(model, rank, step, "plain"):
                torch.autograd.backward(scaler.scale(loss / 2))
        scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


def alone(me: Station, make: str) -> Weights:
    model, optimizer = wrap(make, "ssgd")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_scaled(model, optimizer, me.rank, "plain", 1024.0)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_two_workers_with_scalers_train_as_one_process_does(shards: Shards, make: str) -> None:
    model = make_model()
    plain = together(model, OPTIMIZERS[make](model.parameters()))
    first, second = shards.run(alone, make)
    assert same(first, second)
    for name, weight in plain.items():
        assert relative_error(first[name], weight) <= 1e-5, name


# ----- gradients that have left during backward


def unscale(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    """Unscales as `torch.amp.GradScaler` does, which leaves no trace in a version."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    half = torch.full((1,), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), half)


def change_data(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    grad = model.get_parameter("2.weight").grad
    assert grad is not None
    grad.data[0, 0] += 1e-3


def use_scaler(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


Change = Callable[[torch.nn.Module, torch.optim.Optimizer], None]
CHANGES: dict[str, tuple[Change, str]] = {
    "unscaled": (unscale, r"the gradient of '.*' was changed after it had been pushed"),
    "data": (change_data, r"the gradient of '2.weight' was changed after it had been pushed"),
    "scaler": (use_scaler, r"gradients were pushed during backward, before GradScaler could"),
}


def change_late(me: Station, job: str) -> dict[str, str]:
    """Returns what a step says whose gradients were changed after they had left."""
    told = {}
    for name, (change, _) in CHANGES.items():
        psworker.shutdown()
        psworker.init(job=f"{job}-{name}", num_workers=1, rank=0)
        model, optimizer = wrap("sgd", "ssgd", overlap=True)
        for step in range(6):
            optimizer.zero_grad()
            torch.autograd.backward(next(losses(model, 0, step, "plain")))
            try:
                if step == 5:
                    change(model, optimizer)
                optimizer.step()
            except psworker.GradientError as problem:
                told[name] = f"{step}: {problem}"
    return told


def test_a_change_of_what_has_left_is_an_error_also_where_it_leaves_no_trace(
    shards: Shards,
) -> None:
    (told,) = shards.run(change_late, new_job(), num_workers=1)
    for name, (_, message) in CHANGES.items():
        assert re.match(f"5: {message}", told[name]), name
        assert "pass overlap=False to DistributedOptimizer" in told[name]


# ----- where an update does not take every worker's gradient


def patch_as_accelerate(me: Station) -> tuple[float, Weights]:
    """Trains with a `step` that a library replaces for each call, without its signature."""
    model, optimizer = wrap("sgd", "ssgd")
    original: Any = optimizer.step

    def patched(*args: Any, **options: Any) -> Any:
        return original(*args, **options)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, me.rank, step, "plain"):
            torch.autograd.backward(scaler.scale(loss))
        optimizer.step = patched
        scaler.step(optimizer)
        optimizer.step = original
        scaler.update()
    psworker.shutdown()
    return scaler.get_scale(), weights_of(model)


def test_a_library_may_replace_step_around_a_scaler(shards: Shards) -> None:
    """Accelerate's optimizer does so with mixed_precision="fp16"."""
    first, second = shards.run(patch_as_accelerate)
    assert first[0] == second[0] == 512.0
    assert same(first[1], second[1])


def overflow_alone(me: Station, mode: str) -> tuple[float, int, bool]:
    """Trains with a batch that overflows on rank 1; returns scale, clock, and if all is finite."""
    model, optimizer = wrap("sgd", mode)
    scale = train_scaled(model, optimizer, me.rank, "plain", 1024.0)
    clock = optimizer.clock
    optimizer.close()
    is_finite = all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    return scale, clock, is_finite


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd(backup=1)", "asgd"])
def test_where_workers_need_not_wait_each_leaves_out_its_own_step(
    shards: Shards, mode: str
) -> None:
    """Nobody waits for others in order to agree; with backup workers the clock continues."""
    (first, _, is_finite), (second, clock, is_too) = shards.run(overflow_alone, mode)
    assert (first, second) == (4096.0, 1024.0)
    assert is_finite
    assert is_too
    assert clock >= (STEPS if mode.startswith("ssgd") else STEPS - 1)


# ----- a worker that leaves out a step by itself


def leave_out(me: Station) -> int:
    """Trains until the test says so; rank 1 does not make its step 5."""
    model, optimizer = wrap("sgd", "ssgd")
    step = 0
    while not me.is_told():
        optimizer.zero_grad()
        torch.autograd.backward(next(losses(model, 0, step, "plain")))
        if (me.rank, step) != (1, SPOILT):
            optimizer.step()
        step += 1
    psworker.shutdown()
    return step


@pytest.mark.slow
def test_a_step_that_one_worker_leaves_out_is_said_to_all(shards: Shards) -> None:
    with shards.workers(leave_out) as workers:
        for worker in workers:
            wait_until(lambda: "has left out" in worker.written())  # noqa: B023
        for worker in workers:
            worker.tell()
        for worker in workers:
            worker.result()
            (line,) = [line for line in worker.written().splitlines() if "has left out" in line]
            assert re.search(
                r"worker 1 \(process \d+ on .*\) has left out 1 step that worker 0 \(.*\) has "
                r"made, the last of them before the end of step 5: .*call optimizer.skip_step\(\)",
                line,
            ), line


# ----- a worker that dies while others wait to agree


def stop_in_the_middle(me: Station) -> float:
    """Trains with a scaler; rank 1 does not come to the end of its step 2."""
    model, optimizer = wrap("sgd", "ssgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(next(losses(model, 0, step, "plain"))))
        if (me.rank, step) == (1, 2):
            me.tell()
            me.hear()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def test_the_others_agree_without_a_worker_that_dies(shards: Shards) -> None:
    with shards.workers(stop_in_the_middle) as (first, second):
        second.hear()
        second.kill()
        assert first.result() == 4.0


def agree_in_turns(me: Station, pauses: bool, spoilt: int) -> tuple[Weights, float]:
    """Trains with a scaler; the first worker stops between the agreement on a step and the step."""
    if pauses:
        original = Session.agree_at

        def agree_at(
            self: Session, name: str, number: int, value: float, **how: bool
        ) -> tuple[float, int]:
            agreed = original(self, name, number, value, **how)
            if optimizer.steps == SPOILT:
                me.tell("agreed")
                me.hear()
            return agreed

        Session.agree_at = agree_at  # type: ignore[method-assign]
    model, optimizer = wrap("sgd", "ssgd")
    me.tell(optimizer.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    while (step := optimizer.steps) < STEPS:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch(0, step)[0]), batch(0, step)[1])
        torch.autograd.backward(scaler.scale(loss * (float("inf") if step == spoilt else 1.0)))
        scaler.step(optimizer)
        scaler.update()
        spoilt = -1 if step == spoilt else spoilt
    return weights_of(model), scaler.get_scale()


@pytest.mark.parametrize(("first_spoilt", "second_spoilt"), [(-1, -1), (-1, SPOILT), (SPOILT, -1)])
def test_a_worker_may_join_between_the_agreement_on_a_step_and_the_step(
    shards: Shards, first_spoilt: int, second_spoilt: int
) -> None:
    job = new_job()
    env = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    options: dict[str, Any] = {"num_workers": 1, "job": job, "env": env}
    with shards.workers(agree_in_turns, True, first_spoilt, **options) as (first,):
        assert first.hear() == 0
        assert first.hear() == "agreed"
        with shards.workers(agree_in_turns, False, second_spoilt, **options) as (second,):
            assert second.hear() == SPOILT
            first.tell()
            if first_spoilt == SPOILT:  # It makes another attempt at the step, with the other.
                assert first.hear() == "agreed"
                first.tell()
            (weights, scale), (others, their_scale) = (w.result() for w in (first, second))
    assert same(weights, others)
    assert scale == (512.0 if first_spoilt == SPOILT else 1024.0)
    assert their_scale == (512.0 if SPOILT in (first_spoilt, second_spoilt) else 1024.0)


def skip_or_scale(me: Station) -> tuple[Weights, int]:
    """Worker 1 skips two steps; in the second one the gradient of worker 0 overflows."""
    model, optimizer = wrap("sgd", "ssgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, classes = batch(me.rank, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        if me.rank == 1 and step in (0, SPOILT):
            optimizer.skip_step()
            continue
        torch.autograd.backward(scaler.scale(loss * (float("inf") if step == SPOILT else 1.0)))
        scaler.step(optimizer)
        scaler.update()
    return weights_of(model), optimizer.steps


def test_a_worker_may_skip_a_step_for_which_the_others_have_a_scaler(shards: Shards) -> None:
    first, second = shards.run(skip_or_scale)
    assert same(first[0], second[0])
    assert first[1] == second[1] == STEPS
