"""Whoever holds a job up is named within ten seconds: by the log of worker and shard, by status."""

import json
import os
import re
import signal
from collections.abc import Iterator
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


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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
            wait_until(lambda: named.search(shards.written()) is not None)
            wait_until(lambda: named.search(first.written()) is not None)


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
            wait_until(lambda: named.search(workers[0].written()) is not None)
            wait_until(lambda: named.search(shards.written()) is not None)
            assert re.search("worker [01], for (the )?" + named.pattern, awaited(shards, job, 6))
            assert status(shards, 6)["silent"] == [{"index": 1, "address": shards.addresses[1]}]
        for worker in workers:
            assert worker.hear() == STEPS + 1


@pytest.mark.parametrize(("mode", "rank"), [("ssgd", 0), ("ssgd", 1), ("asgd", 0)])
def test_a_worker_that_never_joins_is_named(shards: Shards, mode: str, rank: int) -> None:
    job = new_job()
    with shards.workers(train, mode, ranks=[rank], job=job) as (worker,):
        missing = rf"worker {1 - rank} \(has not joined yet\)"
        at = r"slice \d of 'model' on shard \d" if mode == "ssgd" else "barrier 'begin'"
        named = re.compile(f"{missing}.*{at}|{at}.*{missing}")
        logged = re.compile(f"{job}.*({named.pattern})")
        wait_until(lambda: logged.search(shards.written()) is not None)
        wait_until(lambda: named.search(worker.written()) is not None)
        assert named.search(awaited(shards, job))
