"""Pushes that name their minibatch: each slice counts one once, from whichever worker it comes."""

from pathlib import Path

import numpy as np
import pytest

from pscore.errors import RemoteProtocolError
from pscore.rules import ASGD, SSGD
from pscore.types import Pull, Push
from psserver.decisions import mode_switch
from psserver.decisions.orders import Update
from psserver.decisions.shard import Job, Shard
from psserver.slices.arena import Arena
from psserver.slices.journal import ROOT_NBYTES
from tests.unit.psserver.bench import Bench, words
from tests.unit.psserver.decisions.test_jobs_and_tables import push, ready
from tests.unit.psserver.slices.test_journal import HYPER, NUMEL, Process, messages, values


def send(bench: Bench, worker: int, step: int, minibatch: int) -> list[str]:
    sent = Push(
        worker=worker, step=step, base_version=0, hyper=np.array([[0.5]]), minibatch=minibatch
    )
    return words(bench.clock.push(sent, f"{worker}@{step}"))


def test_a_minibatch_that_is_counted_takes_part_without_a_weight() -> None:
    bench = Bench(SSGD(), 2)
    assert send(bench, 0, 0, 0) == ["set 0@0 x1 in 0", "ack 0@0 ACCEPTED v0"]
    bench.leave(1)  # Step 0 closes with minibatch 0 alone; worker 1 has died with minibatch 1.
    assert (bench.clock.version, bench.clock.minibatches.clock) == (1, 1)
    bench.expected = [0, 1]
    assert send(bench, 0, 1, 1) == ["set 0@1 x1 in 1", "ack 0@1 ACCEPTED v1"]
    # The push of minibatch 1 again, from a worker that did not know: the mean is that of worker 0.
    assert send(bench, 1, 1, 1) == ["add 1@1 x0 in 1", "ack 1@1 ACCEPTED v1", "update 1 x1 -> v2"]
    assert bench.clock.minibatches.clock == 2


def test_a_step_of_repeated_minibatches_changes_nothing() -> None:
    bench = Bench(SSGD(), 1)
    send(bench, 0, 0, 0)
    sent = Push(worker=0, step=1, base_version=1, hyper=np.array([[0.5]]), minibatch=0)
    actions = bench.clock.push(sent, "again")
    (update,) = [action for action in actions if isinstance(action, Update)]
    assert (update.scale, update.present, update.version) == (0.0, 0, 2)


def test_a_push_that_is_too_late_does_not_count_its_minibatch() -> None:
    bench = Bench(SSGD(backup=1), 2)
    send(bench, 0, 0, 0)
    assert send(bench, 1, 0, 1) == ["ack 1@0 TOO_LATE v1"]
    assert (bench.clock.minibatches.clock, 1 in bench.clock.minibatches) == (1, False)


def test_an_asynchronous_mode_leaves_a_repeated_minibatch_out() -> None:
    bench = Bench(ASGD(), 2)
    assert send(bench, 0, 0, 7)[1].startswith("update")
    assert send(bench, 1, 0, 7) == ["ack 1@0 ACCEPTED v1"]
    assert 7 in bench.clock.minibatches


def test_minibatches_may_come_in_any_order() -> None:
    bench = Bench(ASGD(), 1)
    for step, minibatch in enumerate((2, 0, 3)):
        send(bench, 0, step, minibatch)
    assert (bench.clock.minibatches.clock, bench.clock.minibatches.ahead) == (1, {2, 3})
    send(bench, 0, 3, 1)
    assert (bench.clock.minibatches.clock, bench.clock.minibatches.ahead) == (4, set())


def test_pushes_without_a_minibatch_count_as_before() -> None:
    bench = Bench(SSGD(), 1)
    for step in range(3):
        assert bench.push(0, step, base=step)[0] == f"set 0@{step} x1 in {step}"
    assert bench.clock.minibatches.clock == 0


@pytest.mark.parametrize("dies_after", range(12))
def test_a_killed_process_knows_the_minibatches_in_its_journal(
    dies_after: int, tmp_path: Path
) -> None:
    arena = Arena(tmp_path / "a", seal=1)
    root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
    process = Process(arena, SSGD(), "sgd", root)
    sent = messages("sgd")
    process.send(*sent[0])
    for number in range(dies_after):
        token, first, grad = sent[1 + number]
        named = first._replace(minibatch=first.step * 3 + first.worker, samples=1.0)
        process.send(token, named, grad)
    again = Process(Arena(tmp_path / "a"), SSGD(), "sgd", root)
    assert again.clock.minibatches == process.clock.minibatches
    assert len(again.clock.minibatches.ahead) + again.clock.minibatches.clock == dies_after


def test_a_repeated_minibatch_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", seal=1)
    root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
    once = Process(arena, ASGD(), "sgd", root)
    once.send(*messages("sgd")[0])
    first = Push(worker=0, step=0, base_version=0, hyper=HYPER["sgd"], minibatch=0)
    once.send("first", first, values(0, 0))
    before = once.store.weights.copy()
    other = Push(worker=1, step=0, base_version=0, hyper=HYPER["sgd"], minibatch=0)
    once.send("other", other, values(1, 0))
    np.testing.assert_array_equal(once.store.weights, before)


# ----- absences


def back(shard: Shard, job: Job, rank: int, number: int = 1, minibatch: int = 0) -> None:
    mode_switch.come_back(job.table(0), rank, (1, number), minibatch)


def test_a_step_waits_again_for_a_worker_that_is_back() -> None:
    shard, job, address = ready(2)
    shard.step_aside(job, 0, 1, (1, 1))
    push(shard, job, address, 0, 0)
    clock = job.table(0).clock(0)
    assert clock.version == 1
    back(shard, job, 1, minibatch=40)
    assert clock.minibatches.clock == 40
    push(shard, job, address, 0, 1)
    assert clock.version == 2  # It has not pulled yet.
    shard.decide_pull(job, address, Pull(worker=1, clock=0, min_version=0), "pull")
    push(shard, job, address, 0, 2)
    assert clock.version == 2
    push(shard, job, address, 1, 2)
    assert clock.version == 3


def test_a_late_message_does_not_end_the_next_absence() -> None:
    shard, job, address = ready(2)
    shard.step_aside(job, 0, 1, (1, 1))
    back(shard, job, 1)
    shard.step_aside(job, 0, 1, (1, 2))
    back(shard, job, 1, number=1)
    push(shard, job, address, 0, 0)
    assert job.table(0).clock(0).version == 1
    shard.step_aside(job, 0, 1, (1, 1))  # Nor does one begin again.
    back(shard, job, 1, number=2)
    assert job.table(0).participants.aside == {}


def test_a_minibatch_out_of_range_is_refused() -> None:
    shard, job, _ = ready(1)
    with pytest.raises(RemoteProtocolError, match="beyond"):
        back(shard, job, 0, minibatch=1 << 60)
