"""Hints about scripts that do something else than they seem to."""

import logging
from typing import Any

import pytest
import torch

import psworker
from psworker.training import hints
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import batch, make_model, same, sgd, weights_of

MODES = ("ssgd", "ssd(steps=3, warmup=1)", "asgd", "ssp(bound=2)", "local(steps=2)", "dcasgd")


class Lines(logging.Handler):
    """The warnings of a worker."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("paceline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def end(self) -> list[str]:
        logging.getLogger("paceline").removeHandler(self)
        return self.lines


def step_without_backward(me: Station, job: str) -> list[list[str]]:
    """Makes steps without a gradient in each mode; returns the warnings of each mode."""
    told = []
    for mode in MODES:
        psworker.init(job=f"{job}-{mode}")
        model, lines = make_model(), Lines()
        optimizer = psworker.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), mode=mode
        )
        before = weights_of(model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step()
        assert optimizer.steps == 3
        with optimizer.global_weights():
            assert same(before, weights_of(model))
        psworker.shutdown()
        told.append(lines.end())
    return told


def test_a_step_without_a_gradient_moves_nothing_and_is_told_once(shards: Shards) -> None:
    (told,) = shards.run(step_without_backward, new_job(), num_workers=1)
    assert told == [[hints.NO_GRADIENT]] * len(MODES)


def train_rows(me: Station, job: str) -> list[list[str]]:
    """Trains rows alone, a second model, and a table made too late; returns their warnings."""
    psworker.init(job=job)
    dense, rows, lines = make_model(), psworker.Embedding(9, 4, name="early"), Lines()
    optimizer = psworker.DistributedOptimizer(
        sgd(dense.parameters()),
        [*dense.named_parameters(), *rows.named_parameters("early")],
        rows=torch.optim.SGD([rows.weight], lr=1.0),
    )
    ids, told = torch.arange(9), []
    second = psworker.Embedding(9, 4, name="second")
    second(ids).sum().backward()  # Before its optimizer is made, behind the first one's.
    other = make_model()
    psworker.DistributedOptimizer(
        sgd(other.parameters()),
        [*other.named_parameters("other"), *second.named_parameters("second")],
        rows=torch.optim.SGD([second.weight], lr=1.0),
    )
    late = psworker.Embedding(9, 4, name="late")
    for tables in ((rows,), (rows, late)):
        for _ in range(2):
            optimizer.zero_grad()
            loss: Any = sum(table(ids).sum() for table in tables)
            loss.backward()
            optimizer.step()
        told.append(list(lines.lines))
        lines.lines.clear()
    psworker.shutdown()
    lines.end()
    return told


def test_a_step_of_rows_alone_has_a_gradient_and_a_table_made_too_late_is_named(
    shards: Shards,
) -> None:
    ((of_rows, of_late),) = shards.run(train_rows, new_job(), num_workers=1)
    assert of_rows == []
    (line,) = of_late
    assert "row table 'late' has a gradient, but DistributedOptimizer was made without it" in line


def train(me: Station, job: str, how: str, mode: str) -> list[str]:
    """Trains with gradients that are treated in one way; returns the warnings."""
    psworker.init(job=job)
    model, lines = make_model(), Lines()
    inner = sgd(model.parameters())
    where = "auto"
    if how == "hook":
        where = "worker"
        inner.register_step_pre_hook(lambda *_: clip(model))
    optimizer = psworker.DistributedOptimizer(
        inner, model.named_parameters(), mode=mode, optimizer_on=where
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaled")
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            inputs, classes = batch(me.rank, 2 * step + part)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        if how == "torch":
            clip(model)
        elif how == "mean":
            psworker.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    psworker.shutdown()
    return lines.end()


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("how", "mode", "num_workers", "expected"),
    [
        ("torch", "ssgd", 2, [hints.CHANGED]),
        ("torch", "ssd(steps=2, warmup=1)", 2, [hints.CHANGED]),
        ("torch", "ssgd", 1, []),  # Its gradient is the mean.
        ("torch", "asgd", 2, []),  # There is no mean of a step.
        ("mean", "ssgd", 2, []),
        ("hook", "ssgd", 2, []),
        ("scaled", "ssgd", 2, []),
    ],
)
def test_a_clip_before_the_mean_is_told_once(
    shards: Shards, how: str, mode: str, num_workers: int, expected: list[str]
) -> None:
    told = shards.run(train, new_job(), how, mode, num_workers=num_workers)
    assert told == [expected] * num_workers
