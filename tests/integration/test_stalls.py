"""A worker that delays a job is named within ten seconds: by logs and by status."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import psworker
from tests.integration import warm
from tests.integration.cluster import (
    DEADLINE_S,
    Shards,
    Station,
    clean_environment,
    new_job,
    wait_until,
)
from tests.integration.models import backward, batch, make_model, sgd

STEPS = 3


def train(me: Station, mode: str) -> None:
    """Makes a few steps, and tells; then one for each word from the test until it says stop."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode
    )
    step = 0
    while step < STEPS or me.hear():
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        step += 1
        if step >= STEPS:
            me.tell(step)
    psworker.shutdown()


def status(shards: Shards, code: int = 0) -> dict[str, Any]:
    """Returns what `psserver status` prints."""
    words = ["-m", "psserver", "status", "--json", "--servers", shards.servers]
    done = warm.run(words, env=clean_environment(), timeout=DEADLINE_S)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def awaited(shards: Shards, job: str, code: int = 0) -> str:
    """Returns what a job waits for, as status tells it."""
    (found,) = [item for item in status(shards, code)["jobs"] if item["name"] == job]
    waits = [*found["waiting_for"], *(w for t in found["tables"] for w in t["waiting_for"])]
    return "\n".join(waits)


def wait_until_said(wanted: re.Pattern[str], written: Callable[[], str]) -> None:
    """Waits until a process has written something."""
    wait_until(lambda: wanted.search(written()) is not None)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "od"])
def test_a_worker_that_hangs_is_named_with_shard_slice_and_step(shards: Shards, mode: str) -> None:
    job = new_job()
    with shards.workers(train, mode, job=job) as (first, second):
        for worker in (first, second):
            assert worker.hear() == STEPS
        who = rf"step \d+ of worker 1 \(process {second.pid} on [^ ]+\), at slice \d of 'model' "
        named = re.compile(who + r"on shard \d")
        with stopped(second.pid):
            for _ in range(3):  # `od` lets a step go before it waits.
                first.tell(True)
            wait_until(lambda: named.search(awaited(shards, job)) is not None)
            wait_until_said(named, shards.written)
            wait_until_said(named, first.written)


@pytest.mark.slow
def test_a_shard_that_hangs_is_named_with_worker_slice_and_step() -> None:
    job = new_job()
    with Shards(2) as shards, shards.workers(train, "ssgd", job=job) as workers:
        for worker in workers:
            assert worker.hear() == STEPS
        hanging = status(shards)["shards"][1]["pid"]
        where = r"(weights after|room for) step \d of slice \d of 'model' from shard 1 at "
        named = re.compile(where + re.escape(shards.addresses[1]) + ", which has not answered")
        with stopped(hanging):
            for worker in workers:
                worker.tell(True)
            wait_until_said(named, workers[0].written)
            wait_until_said(named, shards.written)
            assert re.search("worker [01], for (the )?" + named.pattern, awaited(shards, job, 6))
            assert status(shards, 6)["silent"] == [{"index": 1, "address": shards.addresses[1]}]
        for worker in workers:
            assert worker.hear() == STEPS + 1


@pytest.mark.slow
def test_workers_that_never_join_are_named(shards: Shards) -> None:
    """Three jobs at once: the waits for the reports are one."""
    with contextlib.ExitStack() as started:
        cases = []
        for mode, rank in (("ssgd", 0), ("ssgd", 1), ("asgd", 0)):
            job = new_job()
            workers = shards.workers(train, mode, ranks=[rank], job=job)
            cases.append((mode, rank, job, started.enter_context(workers)[0]))
        for _, rank, job, worker in cases:
            missing = rf"worker {1 - rank} \(has not joined yet\)"
            at = r"(slice \d of 'model' on shard \d|barrier 'begin of model')"
            named = re.compile(f"{missing}.*{at}|{at}.*{missing}")
            logged = re.compile(f"{job}.*({named.pattern})")
            wait_until_said(logged, shards.written)
            wait_until_said(named, worker.written)
            assert named.search(awaited(shards, job))
