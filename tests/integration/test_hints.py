"""Hints about scripts that do something else than they seem to."""

import logging
import time
from typing import Any

import pytest
import torch

import psworker
from pscore.errors import ConfigError
from pscore.net.credentials import EVERY, read_credentials
from psworker.advice.running import ObservedJob, read_job, situation_of_job
from psworker.training import hints
from tests.integration.cluster import Shards, Station, new_job, wait_until
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of

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


def train_without_a_server(me: Station, job: str) -> list[str]:
    """Makes a step in a mode whose shards have an average only; returns the warnings."""
    psworker.init(job=job)
    model, lines = make_model(), Lines()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode="dpsgd", optimizer_on="worker"
    )
    backward(model, *batch(me.rank, 0))
    optimizer.step()
    psworker.shutdown()
    return lines.end()


def test_where_workers_have_the_model_nothing_is_said_of_filling_a_shard(shards: Shards) -> None:
    assert shards.run(train_without_a_server, new_job()) == [[], []]


def wait_for_the_slow_one(me: Station, job: str) -> list[str]:
    """Trains, worker 1 with pauses, beside a second model; returns the warnings."""
    hints.ASK_TIMEOUT_S = 200.0
    psworker.init(job=job)
    model, other, lines = make_model(), make_model(), Lines()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    psworker.DistributedOptimizer(sgd(other.parameters()), other.named_parameters())
    for step in range(60):  # Some heartbeats long.
        optimizer.zero_grad()
        inputs, classes = batch(me.rank, step)
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
        time.sleep(0.1 * me.rank)  # Far longer than a busy machine takes for a step.
        optimizer.step()
    psworker.shutdown()
    return lines.end()


@pytest.mark.slow
def test_at_its_end_the_first_worker_names_once_the_one_that_it_waited_for(shards: Shards) -> None:
    """Its own waits look like those for a slow network, which a mode with rounds would hide."""
    first, second = shards.run(wait_for_the_slow_one, new_job(), num_workers=2)
    (line,) = first
    assert "most of it for worker 1, which computes for" in line
    assert "would take" not in line
    assert second == []


def train_and_wait(me: Station, job: str) -> None:
    """Trains, and leaves when it is told to."""
    psworker.init(job=job)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(30):
        optimizer.zero_grad()
        inputs, classes = batch(me.rank, step)
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
        optimizer.step()
    me.tell("trained")
    me.hear()
    psworker.shutdown()


def test_advice_reads_a_job_that_runs_and_one_that_has_ended(shards: Shards) -> None:
    job, credentials = new_job(), read_credentials({}, job=EVERY)

    def read() -> ObservedJob:
        return read_job(shards.addresses, credentials, job)

    with shards.workers(train_and_wait, job) as workers:
        for worker in workers:
            worker.hear()
        wait_until(lambda: read().is_ready)  # Sums come with heartbeats.
        assert not read().has_ended
        for worker in workers:
            worker.tell()
            worker.result()
    ended = read()
    assert ended.has_ended
    situation = situation_of_job(ended, 1.0)
    assert situation.sources["workers"].value == "2 on 1 host"
    assert situation.sources["optimizer"].source.endswith(f"{job!r}, whose workers are gone")
    with pytest.raises(ConfigError, match=r"no job 'nobody' at .*; there are .*"):
        read_job(shards.addresses, credentials, "nobody")
