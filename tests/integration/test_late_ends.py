"""The end of a worker that was silent for longer than its lease just before it."""

from __future__ import annotations

import contextlib
import signal
import time

import numpy as np
import pytest

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.test_peers import begin, copy_of, go


def end_when_told(me: Station, mode: str) -> dict[str, np.ndarray]:
    model, optimizer = begin(mode)
    go(me, model, optimizer, range(6))
    me.tell()
    me.hear()
    psworker.shutdown()
    return copy_of(model)


LEASE_S = 3.0
MODES = (
    ("ssgd", "diloco(steps=4)", "dpsgd", "adpsgd"),
    ("asgd", "ssd(steps=4)", "sgp", "allreduce(average_every=3)"),
)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_was_silent_before_its_end_ends_with_the_global_weights(first: int) -> None:
    with contextlib.ExitStack() as stack:
        shards = stack.enter_context(Shards(1, lease_s=LEASE_S))
        names = [new_job() for _ in MODES[first]]
        jobs = [
            stack.enter_context(shards.workers(end_when_told, mode, job=name))
            for mode, name in zip(MODES[first], names, strict=True)
        ]
        for worker in (worker for job in jobs for worker in job):
            worker.hear()
        for _, silent in jobs:
            silent.kill(signal.SIGSTOP)
        for name in names:
            shards.wait_until_lost(name, 1)
        for _, silent in jobs:
            silent.kill(signal.SIGCONT)
        for job in jobs:
            job[first].tell()
        time.sleep(0.5)  # The first one may end before the other, which ends the job; it need not.
        for job in jobs:
            job[1 - first].tell()
        for mode, job in zip(MODES[first], jobs, strict=True):
            for worker in job:
                for name, weight in worker.result().items():
                    assert np.isfinite(weight).all(), (mode, name)
            assert "worker 1 rejoins" in job[1].written(), mode
            assert mode.startswith("diloco") or "no step was under way" in job[1].written(), mode
