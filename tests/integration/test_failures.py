"""Workers that end early, in any way, block no other; shards of a script's own end with it."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

import psworker
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.remote import ask
from psworker.connection.shard_link import Link
from tests.inside import table_of
from tests.integration.cluster import Script, Shards, Station, new_job, wait_until
from tests.integration.command import free_ports, gone
from tests.integration.models import (
    backward,
    batch,
    make_model,
    relative_error,
    same,
    sgd,
    weights_of,
)

Weights = dict[str, np.ndarray]
LONG, SHORT = 10, 6
LEASE_S = 8.0  # A healthy worker keeps it under load; of a killed one 40 % are enough.


def train(me: Station, mode: str, steps: tuple[int, int], end: str = "") -> Weights:
    """Makes the worker's number of steps and tells each; then ends as `end` says."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, overlap=True
    )
    for step in range(steps[me.rank]):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        me.tell(step)
    if end == "exit" and me.rank == 1:
        os._exit(3)
    elif end == "hold" and me.rank == 1:
        me.hear()
    else:
        psworker.shutdown()
    return weights_of(model)


def alone(steps: tuple[int, int]) -> Weights:
    """Returns torch's weights: the mean of both gradients, then those of worker 0 alone."""
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(max(steps)):
        present = [rank for rank in range(2) if step < steps[rank]]
        optimizer.zero_grad()
        for rank in present:
            inputs, classes = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes) / len(present)
            torch.autograd.backward(loss)
        optimizer.step()
    return weights_of(model)


def losses(shards: Shards, job: str) -> int:
    """Returns how often a shard has declared a worker of a job lost."""
    lines = shards.written().splitlines()
    return sum("worker lost" in line and f"job={job}" in line for line in lines)


def agree(ours: Weights, theirs: Weights) -> None:
    for name, weight in theirs.items():
        assert relative_error(ours[name], weight) <= 1e-5, name


def test_a_worker_with_less_data_leaves_and_the_other_continues(shards: Shards) -> None:
    """Steps close with the gradients of those left, and no lease has to be over for that."""
    job = new_job()
    first, _ = shards.run(train, "ssgd", (LONG, SHORT), job=job)
    agree(first, alone((LONG, SHORT)))
    assert not losses(shards, job)


@pytest.mark.parametrize("mode", ["asgd", "ssd(steps=3, warmup=2)", "ssd(steps=1, warmup=0)"])
def test_no_mode_hangs_on_uneven_data(shards: Shards, mode: str) -> None:
    for weights in shards.run(train, mode, (SHORT, LONG)):
        assert all(np.isfinite(weight).all() for weight in weights.values())


@pytest.mark.slow
def test_an_asynchronous_job_is_not_over_before_all_have_come(shards: Shards) -> None:
    job = new_job()
    with shards.workers(train, "asgd", (SHORT, SHORT), ranks=[0], job=job) as (first,):
        waits = r"has waited \d+ s for worker 1 \(has not joined yet\) at barrier 'begin of model'"
        wait_until(lambda: re.search(waits, first.written()) is not None)
        with shards.workers(train, "asgd", (SHORT, SHORT), ranks=[1], job=job) as (second,):
            for worker in (first, second):
                assert worker.result()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Shards]:
    """Shards that declare a silent worker lost sooner than usual."""
    with Shards(2, lease_s=LEASE_S) as started:
        yield started


@pytest.mark.slow
def test_a_worker_that_dies_without_a_word_is_missed_for_a_lease(impatient: Shards) -> None:
    with impatient.workers(train, "ssgd", (LONG, SHORT), "exit") as (first, _):
        agree(first.result(), alone((LONG, SHORT)))
    assert "worker lost" in impatient.written()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["ssgd", "ssd(steps=3, warmup=2)", "diloco(steps=2, overlap=mirror, fragments=2)"]
)
def test_a_killed_worker_hangs_nobody(impatient: Shards, mode: str) -> None:
    with impatient.workers(train, mode, (LONG, SHORT), "hold") as (first, second):
        for _ in range(SHORT):
            second.hear()
        second.kill()
        weights = first.result()
    if mode == "ssgd":
        agree(weights, alone((LONG, SHORT)))


@pytest.mark.slow
def test_a_job_whose_workers_have_died_can_be_forgotten_and_starts_over(impatient: Shards) -> None:
    job = new_job()
    with impatient.workers(train, "ssgd", (SHORT, SHORT), "hold", job=job) as workers:
        workers[1].hear()
        for worker in workers:
            worker.kill()
    wait_until(lambda: losses(impatient, job) == 4)  # Both, at both shards.
    assert all(reply.found for reply in ask.forget(impatient.addresses, job))
    first, _ = impatient.run(train, "ssgd", (LONG, SHORT), job=job)
    agree(first, alone((LONG, SHORT)))


def train_to_the_end(me: Station) -> tuple[int, Weights]:
    """Trains to step LONG, and tells each; returns the step at which it began."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    first = optimizer.steps
    while (step := optimizer.steps) < LONG:
        if (me.rank, step) == (1, SHORT):
            me.tell()
            me.hear()
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return first, weights_of(model)


@pytest.mark.slow
def test_a_worker_that_is_replaced_once_the_others_have_finished_ends_too(
    impatient: Shards,
) -> None:
    """Like a pod of a Kubernetes Job, which is started for the first time, as far as it knows."""
    job, run = new_job(), {"PACELINE_RUN_ID": "first"}
    with impatient.workers(train_to_the_end, job=job, env=run) as (first, second):
        second.hear()
        second.kill()
        _, weights = first.result()
    with impatient.workers(train_to_the_end, ranks=[1], job=job, env=run) as (back,):
        step, taken = back.result()
        assert "has ended at step 10, and this worker is of the same run" in back.written()
    assert step == LONG
    assert same(weights, taken)
    with impatient.workers(
        train_to_the_end, job=job, env={"PACELINE_RUN_ID": "second"}
    ) as following:
        following[1].hear()
        following[1].tell()
        assert [worker.result()[0] for worker in following] == [0, 0]


def train_on_signal(me: Station) -> Weights:
    """Trains SHORT steps, and then one for each word from the test until it says stop.

    After the first steps the machine's clock is set back, to 1970: nobody is locked out for that.
    """
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    step = 0
    while step < SHORT or me.hear():
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        step += 1
        assert table_of(optimizer).replica.step == step
        if step >= SHORT:
            mock.patch("time.time_ns", int).start()  # gRPC's deadlines are by `time.time`.
            me.tell()
    psworker.shutdown()
    return weights_of(model)


@pytest.mark.slow
def test_a_worker_that_was_held_up_comes_back_and_says_so(impatient: Shards) -> None:
    """As by a debugger, or a machine that sleeps: it is missed, and joins again."""
    with impatient.workers(train_on_signal) as (first, second):
        for worker in (first, second):
            worker.hear()
        os.kill(second.pid, signal.SIGSTOP)
        first.tell(True)
        first.hear()  # The step closes when the lease is over.
        os.kill(second.pid, signal.SIGCONT)
        second.tell(True)
        second.hear()
        for _ in range(3):
            for worker in (first, second):
                worker.tell(True)
            for worker in (first, second):
                worker.hear()
        for worker in (first, second):
            worker.tell(False)
        weights = [worker.result() for worker in (first, second)]
        assert same(*weights)
        assert f"worker 1 rejoins, step {SHORT} " in second.written()
        assert "comes back" not in first.written()


@pytest.mark.slow
def test_a_shard_that_was_held_up_loses_no_worker(impatient: Shards) -> None:
    """The beats that its workers have sent meanwhile wait in its sockets."""
    with impatient.workers(train_on_signal) as workers:
        for worker in workers:
            worker.hear()
        shards = psutil.Process(impatient.pid).children()
        for shard in shards:
            shard.suspend()
        time.sleep(LEASE_S + 1.0)
        for shard in shards:
            shard.resume()
        for worker in workers:
            worker.tell(True)
        for worker in workers:
            worker.hear()
            worker.tell(False)
        weights = [worker.result() for worker in workers]
        assert same(*weights)
        assert not any("rejoins" in worker.written() for worker in workers)


# ----- scripts

SCRIPT = """
import sys
import torch
import psworker
psworker.print_short_errors()
from tests.integration.command import gone
from tests.integration.models import backward, batch, make_model, sgd

steps, end = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model = make_model()
optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
rank = psworker.rank()
for step in range(steps):
    optimizer.zero_grad()
    backward(model, *batch(rank, step))
    optimizer.step()
print("trained", sum(weight.double().sum().item() for weight in model.parameters()), flush=True)
if end == "raise":
    raise SystemError("on purpose")
if end == "wait-step":
    sys.stdin.readline()
if end in ("step", "wait-step"):
    optimizer.step()
if end == "wait":
    sys.stdin.readline()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise", 1)])
def test_a_script_that_just_ends_or_fails_hangs_nobody(
    shards: Shards, script: Path, end: str, status: int
) -> None:
    job = new_job()
    env = shards.environment(1, 2, job)
    with (
        Script(script, SHORT, end, env=env) as second,
        shards.workers(train, "ssgd", (LONG, 0), ranks=[0], job=job) as (first,),
    ):
        agree(first.result(), alone((LONG, SHORT)))
        assert not losses(shards, job)
        assert second.wait() == status
        assert ("SystemError: on purpose" in second.stderr()) == bool(status)
        assert "Fatal Python error" not in second.stderr()


def train_in_two_parts(me: Station) -> Weights:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(LONG):
        if step == SHORT:
            me.tell()
            me.hear()
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


@pytest.mark.slow
def test_ctrl_c_ends_a_waiting_worker_at_once_and_the_others_continue(
    shards: Shards, script: Path
) -> None:
    """The worker waits in step() for another that does not come; its status is Python's own."""
    job = new_job()
    with (
        Script(script, SHORT, "step", env=shards.environment(1, 2, job)) as second,
        shards.workers(train_in_two_parts, ranks=[0], job=job) as (first,),
    ):
        second.line()
        first.hear()
        second.process.send_signal(signal.SIGINT)
        assert second.wait() == -signal.SIGINT
        assert "psworker: interrupted by Ctrl-C" in second.stderr()
        first.tell()
        assert first.result()
    # It has left by itself: no lease had to be over.
    assert not re.search(rf"worker lost .*job={job} .*silent_s=", shards.written())


@pytest.mark.slow
def test_a_shard_that_dies_is_an_error_that_names_it(script: Path) -> None:
    with Shards(2) as dying:
        env = dying.environment(0, 1, new_job()) | {"PACELINE_TIMEOUT_S": "1"}
        with Script(script, 1, "wait-step", env=env) as worker:
            worker.line()
            for process in psutil.Process(dying.pid).children(recursive=True):
                process.kill()
            assert worker.process.stdin is not None
            worker.process.stdin.write("continue\n")
            worker.process.stdin.flush()
            assert worker.wait() == 1
            addresses = "|".join(map(re.escape, dying.addresses))
            message = rf"psworker: no shard answers at ({addresses}) after \d"
            assert re.search(message, worker.stderr()), worker.stderr()


LOADER_SCRIPT = """
import os
import sys
import torch
import psworker
from tests.integration.command import gone
from tests.integration.models import batch, make_model, sgd

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    data = torch.utils.data.TensorDataset(*batch(psworker.rank(), 0, rows=32))
    for inputs, classes in torch.utils.data.DataLoader(data, batch_size=8, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    optimizer.step()
    print("trained", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_loader_with_processes_of_its_own_and_a_fork_leave_the_job_alone(
    shards: Shards, tmp_path: Path
) -> None:
    script, job = tmp_path / "loader.py", new_job()
    script.write_text(LOADER_SCRIPT, encoding="utf-8")
    with Script(script, env=shards.environment(0, 1, job)) as worker:
        assert worker.line() == "trained"
        assert states_of(shards, job) == ["live"]
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.wait() == 0


def states_of(shards: Shards, job: str) -> list[str]:
    """Returns what the first shard says of the workers of a job."""
    link = Link(shards.addresses[0], patience_s=5.0)
    try:
        jobs = link.call(link.control.Status, pb.StatusRequest()).jobs
    finally:
        link.close()
    return [worker.state for item in jobs if item.job == job for worker in item.workers]


# ----- shards of one's own


def children(script: Script) -> list[psutil.Process]:
    """Returns the processes of the shards that a script has started."""
    found = psutil.Process(script.process.pid).children(recursive=True)
    assert len(found) >= 1
    return found


def trained(script: Script) -> float:
    word, value = script.line().split()
    assert word == "trained"
    return float(value)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_without_any_server_shards_start_and_end_with_the_script(script: Path, end: str) -> None:
    with Script(script, SHORT, "wait") as worker:
        expected = sum(weight.sum(dtype=np.float64) for weight in alone((SHORT, 0)).values())
        assert trained(worker) == pytest.approx(expected, rel=1e-4)
        shards = children(worker)
        if end == "ends":
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            assert worker.wait() == 0
        else:
            worker.process.kill()
        wait_until(lambda: all(gone(shard.pid) for shard in shards))


@pytest.mark.slow
def test_workers_of_torchrun_share_the_shards_that_the_first_of_them_starts(script: Path) -> None:
    """The variables that torchrun sets, and no address: ranks 0 and 1 on one machine."""
    (port,) = free_ports(1)

    def variables(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": new_job(),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    launched = [variables(rank) for rank in range(2)]
    launched[1]["TORCHELASTIC_RUN_ID"] = launched[0]["TORCHELASTIC_RUN_ID"]
    with Script(script, SHORT, "", env=launched[0]) as first:
        with Script(script, SHORT, "", env=launched[1]) as second:
            sums = [trained(first), trained(second)]
            shards = children(first)
            assert [first.wait(), second.wait()] == [0, 0]
        expected = sum(weight.sum(dtype=np.float64) for weight in alone((SHORT, SHORT)).values())
        assert sums[0] == sums[1] == pytest.approx(expected, rel=1e-4)
        wait_until(lambda: all(gone(shard.pid) for shard in shards))
