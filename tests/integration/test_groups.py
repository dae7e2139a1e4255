"""Two levels: two groups of two processes are two workers (docs/hosts.md)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from tests.integration import test_modes
from tests.integration.cluster import Shards, Station, Worker, WorkerError, new_job, results_of
from tests.integration.command import Command, free_ports
from tests.integration.test_device import STAND_IN, place

Array = npt.NDArray[Any]
GROUPS, SIZE = 2, 2
ROWS, COLUMNS = 300, 40
STEPS, WARMUP = 12, 2
LR, MOMENTUM = 0.05, 0.9
THRESHOLD = 0.02


def group_environment(shards: Shards, rank: int, port: int, job: str) -> dict[str, str]:
    """Returns what torchrun sets, started once for each group, and the group's number."""
    group, local = divmod(rank, SIZE)
    return shards.environment(local, SIZE, job) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "PACELINE_GROUP": str(group),
        "PACELINE_NUM_GROUPS": str(GROUPS),
    }


@contextmanager
def group_workers(
    shards: Shards, function: Callable[..., Any], *args: Any, job: str, groups: tuple[int, ...]
) -> Iterator[list[Worker]]:
    """Starts the processes of some groups of a job, and ends them in any case."""
    started: list[Worker] = []
    try:
        for group in groups:
            (port,) = free_ports(1)
            for rank in range(SIZE * group, SIZE * (group + 1)):
                env = group_environment(shards, rank, port, job)
                started.append(Worker(function, rank, args, env))
        yield started
    finally:
        for worker in started:
            worker.close()


# ----- a linear gradient, in float32 and float64


def table(*key: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(key).standard_normal((ROWS, COLUMNS), np.float32)


def gradient(rank: int, step: int, weights: Array) -> Array:
    """Returns the gradient of one process."""
    return 0.1 * np.abs(table(1, rank)) * weights - table(2, rank, step)


def samples_of(rank: int, step: int) -> float:
    return float(1 + (rank + step) % 3)


def train(mode: str, compression: str, overlap: bool) -> tuple[Array, Array]:
    """Returns the weights before each step, and the global ones at the end."""
    weight = torch.nn.Parameter(torch.from_numpy(table(0)))
    unused = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight, unused], lr=LR, momentum=MOMENTUM),
        named_parameters=[("weight", weight), ("unused", unused)],
        mode=mode,
        compression=compression,
        compress_min_nbytes=64,
        overlap=overlap,
    )
    rank, path = psworker.rank(), []
    for step in range(STEPS):
        path.append(weight.detach().numpy().astype(np.float64))
        optimizer.samples = samples_of(rank, step)
        optimizer.zero_grad()
        grad = torch.from_numpy(gradient(rank, step, weight.detach().numpy()).astype(np.float32))
        torch.autograd.backward((weight * grad).sum())
        optimizer.step()
    assert (psworker.size(), optimizer.steps) == (GROUPS * SIZE, STEPS)
    with optimizer.global_weights():
        return np.array(path), weight.detach().numpy().astype(np.float64)


def work(
    me: Station, job: str, cases: list[tuple[str, str, bool]], where: str
) -> list[tuple[Array, Array]]:
    """Runs each case as a job, in one process for all."""
    torch.distributed.init_process_group("gloo")
    results = []
    for number, case in enumerate(cases):
        psworker.init(job=f"{job}-{number}")
        assert psworker.rank() == me.rank
        with place(where):
            results.append(train(*case))
        psworker.shutdown()
    return results


def mean(step: int, views: list[Array], ranks: range) -> tuple[Array, float]:
    """Returns the mean gradient of processes, weighted by samples, and the sum of those."""
    weights = [samples_of(rank, step) for rank in ranks]
    grads = [gradient(rank, step, views[rank // SIZE]) for rank in ranks]
    return np.average(grads, axis=0, weights=weights), sum(weights)


def cd(steps: int, threshold: float) -> tuple[list[Array], Array]:
    """Returns the workers' weights at each step, and W at the end: CD-SGD with 2 bits.

    Workers train one update behind, from w = W - lr g, and push g quantized with its residual,
    except at every `steps`-th step, which is pushed as it is. `threshold` 0 is OD-SGD.
    """
    shard, velocity = table(0).astype(np.float64), np.zeros((ROWS, COLUMNS))
    views, paths = [shard] * GROUPS, []
    residuals = [np.zeros((ROWS, COLUMNS)) for _ in range(GROUPS)]
    for step in range(STEPS):
        paths.append(np.array(views))
        is_warm = step < WARMUP
        grads, weights = [], []
        for group in range(GROUPS):
            grad, weight = mean(step, views, range(SIZE * group, SIZE * (group + 1)))
            grads.append(grad)
            weights.append(weight)
        pushed = list(grads)
        if not (is_warm or (step - WARMUP) % steps == steps - 1) and threshold:
            for group in range(GROUPS):
                total = residuals[group] + grads[group]
                pushed[group] = threshold * (
                    (total >= threshold).astype(float) - (total <= -threshold)
                )
                residuals[group] = total - pushed[group]
        direction = np.average(pushed, axis=0, weights=weights)
        velocity = MOMENTUM * velocity + direction
        former, shard = shard, shard - LR * velocity
        views = [shard if is_warm else former - LR * grad for grad in grads]
    return paths, shard


def ssgd() -> Array:
    """Returns W at the end of synchronous SGD of four processes."""
    shard, velocity = table(0).astype(np.float64), np.zeros((ROWS, COLUMNS))
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + mean(step, [shard] * GROUPS, range(GROUPS * SIZE))[0]
        shard = shard - LR * velocity
    return shard


def local_sgd(steps: int) -> Array:
    """Returns W at the end where each group makes `steps` steps of SGD, and then they average."""
    shard = table(0).astype(np.float64)
    velocity = [np.zeros((ROWS, COLUMNS)) for _ in range(GROUPS)]
    for begin in range(0, STEPS, steps):
        views, samples = [shard.copy() for _ in range(GROUPS)], [0.0] * GROUPS
        for step in range(begin, begin + steps):
            for group in range(GROUPS):
                grad, weight = mean(step, views, range(SIZE * group, SIZE * (group + 1)))
                velocity[group] = MOMENTUM * velocity[group] + grad
                views[group] = views[group] - LR * velocity[group]
                samples[group] += weight
        shard = np.average(views, axis=0, weights=samples)
    return shard


def error(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", STAND_IN])
def test_two_groups_of_two_follow_the_models_of_their_modes(shards: Shards, where: str) -> None:
    """Also with samples, compression and overlap; the same bits twice, and in both processes."""
    cases = [
        ("ssgd", "none", False),
        ("ssgd", "none", True),
        (f"od(warmup={WARMUP}, local=sgd)", "none", True),
        (f"cd(steps=3, warmup={WARMUP})", f"2bit(threshold={THRESHOLD})", False),
        ("local(steps=3)", "none", True),
        ("asgd", "none", True),
    ]
    arguments = new_job(), cases, where
    with group_workers(shards, work, *arguments, job=new_job(), groups=(0, 1)) as workers:
        results = results_of(workers)
    for first, second in (results[:2], results[2:]):
        for case, (path, end), (other_path, other_end) in zip(cases, first, second, strict=True):
            assert np.array_equal(path, other_path), case
            assert case[0] == "asgd" or np.array_equal(end, other_end), case
    ends = [end for _, end in results[0]]
    assert error(ends[0], ssgd()) < 1e-6
    assert np.array_equal(ends[0], ends[1])
    for number, model in ((2, cd(3, 0.0)), (3, cd(3, THRESHOLD))):
        paths, end = model
        for group in range(GROUPS):
            ours = results[SIZE * group][number][0]
            assert error(ours, np.array([views[group] for views in paths])) < 3e-6, number
        assert error(ends[number], end) < 3e-6, number
    assert error(ends[4], local_sgd(3)) < 3e-6


def work_softmax(me: Station, modes: list[str], job: str) -> list[tuple[Array, Array]]:
    torch.distributed.init_process_group("gloo")
    return test_modes.work_softmax(me, modes, job)


@pytest.mark.slow
def test_ssd_of_two_groups_follows_its_model_in_float64(shards: Shards) -> None:
    mode, make_local, k = next(case for case in test_modes.CASES if "mirror" in case[0])
    with group_workers(
        shards, work_softmax, [mode], new_job(), job=new_job(), groups=(0, 1)
    ) as workers:
        results = results_of(workers)
    paths, end = test_modes.ssd(make_local, k, GROUPS, SIZE)
    for rank, ((path, own_end),) in enumerate(results):
        assert test_modes.distance(path, paths[rank // SIZE]) <= 3e-6
        assert test_modes.distance(own_end, end) <= 3e-6


# ----- groups against the same job of single workers


@dataclass(frozen=True)
class Case:
    """One job, made by groups and again by one process for each, whose gradient is the mean."""

    mode: str
    compression: str = "none"
    in_turn: bool = False  # One worker makes its step after the other: the order is known.
    clip: float = 0.0
    scaler_fails_at: int = -1  # The last process overflows there.
    to_mode: str = ""  # After half of the steps.
    reloads: bool = False  # A new job continues from `state_dict` after half of the steps.
    elastic: bool = False
    buffers: str = "rank0"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(table(0)))
        self.register_buffer("seen", torch.zeros(4))


class Run:
    """One process's part in a case; `alone` stands for a whole group."""

    def __init__(self, case: Case, me: Station, job: str, *, alone: bool) -> None:
        self.case, self.alone, self.group = case, alone, me.rank // SIZE
        self.ranks = range(SIZE * self.group, SIZE * (self.group + 1)) if alone else [me.rank]
        self.begin(job)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        self.log: list[float] = []
        self.path: list[Array] = []

    def begin(self, job: str, servers: list[str] | None = None) -> None:
        case = self.case
        sizes: dict[str, Any] = {"min_workers": 1, "max_workers": GROUPS} if case.elastic else {}
        if self.alone:
            count: dict[str, Any] = {} if case.elastic else {"num_workers": GROUPS}
            psworker.init(job=job, rank=self.group, local_group=None, **count, **sizes)
        else:
            psworker.init(servers, job=job, **sizes)
        self.net = Net()
        self.optimizer = psworker.DistributedOptimizer(
            torch.optim.SGD(self.net.parameters(), lr=LR, momentum=MOMENTUM),
            named_parameters=self.net.named_parameters(),
            mode=case.mode,
            compression=case.compression,
            compress_min_nbytes=64,
            model=self.net,
            buffers=case.buffers,
        )
        psworker.barrier("begun")

    def step(self, step: int) -> None:
        case, weight, optimizer = self.case, self.net.weight, self.optimizer
        view = weight.detach().numpy()
        self.path.append(view.astype(np.float64))
        samples = [samples_of(rank, step) for rank in self.ranks]
        grads = [gradient(rank, step, view) for rank in self.ranks]
        grad = np.average(grads, axis=0, weights=samples).astype(np.float32)
        optimizer.samples = sum(samples)
        if step == case.scaler_fails_at and GROUPS * SIZE - 1 in self.ranks:
            grad[-1, -1] = np.inf
        optimizer.zero_grad()
        loss = (weight * torch.from_numpy(grad)).sum()
        scaled = case.scaler_fails_at >= 0
        torch.autograd.backward(self.scaler.scale(loss) if scaled else loss)
        if case.clip:
            self.log.append(float(psworker.clip_grad_norm_(optimizer, case.clip)))
        self.net.seen.fill_(float(np.mean(self.ranks)) + step)  # type: ignore[operator]
        if scaled:
            self.scaler.step(optimizer)
            self.scaler.update()
            self.log.append(self.scaler.get_scale())
        else:
            optimizer.step()

    def train(self, job: str) -> None:
        for step in range(STEPS):
            for group in range(GROUPS) if self.case.in_turn else ():
                if group == self.group:
                    self.step(step)
                psworker.barrier(f"turn {step} {group}")
            if not self.case.in_turn:
                self.step(step)
            if step == STEPS // 2 - 1:
                self.change(job)

    def change(self, job: str) -> None:
        if self.case.to_mode:
            self.optimizer.set_mode(self.case.to_mode)
            psworker.barrier("changed")  # No later step is in the weights pulled here.
        if self.case.reloads:
            state, before = self.optimizer.state_dict(), self.net.weight.detach().clone()
            psworker.shutdown()
            self.begin(f"{job}-again")
            self.net.weight.data.copy_(before)
            self.optimizer.load_state_dict(state)

    def end(self) -> tuple[Array, Array, list[float]]:
        psworker.barrier("ended")
        with self.optimizer.global_weights():
            end = self.net.weight.detach().numpy().astype(np.float64)
            if self.case.buffers == "mean":
                self.log.extend(self.net.seen.tolist())  # type: ignore[operator]
        psworker.barrier("looked")
        psworker.shutdown()
        return np.array(self.path), end, self.log


Ended = tuple[Array, Array, list[float]]


def work_twice(me: Station, job: str, cases: list[Case]) -> list[tuple[Ended, Ended | None]]:
    """Runs each case in groups, and then with the first process of each group as a worker."""
    torch.distributed.init_process_group("gloo")
    results = []
    for number, case in enumerate(cases):
        ends: list[Ended] = []
        for alone in (False, True) if me.rank % SIZE == 0 else (False,):
            name = f"{job}-{number}-{alone}"
            try:
                run = Run(case, me, name, alone=alone)
                run.train(name)
                ends.append(run.end())
            except Exception as problem:
                raise AssertionError(f"{case}, alone: {alone}") from problem
        results.append((ends[0], ends[1] if ends[1:] else None))
    return results


@pytest.mark.slow
def test_groups_train_as_single_workers_with_their_mean_gradients(shards: Shards) -> None:
    """Also what the workers do beside steps: clipping, loss scaling, changes of mode, states."""
    cases = [
        Case("ssgd", clip=3.0, buffers="mean"),
        Case("ssgd", elastic=True, scaler_fails_at=4),
        Case("ssgd", to_mode="od(warmup=2, local=sgd)"),
        Case("asgd", in_turn=True, to_mode="ssp(bound=2)"),
        Case("ssgd", f"2bit(threshold={THRESHOLD})", reloads=True),
        Case("staleness", in_turn=True),
        Case("dcasgd(adaptive=true)", in_turn=True, scaler_fails_at=4),
        Case("ssgd(backup=1)", in_turn=True),
        Case("slowmo(steps=3)"),
        Case("diloco(steps=3)"),
        Case("slowmo(steps=3, overlap=mirror, delay=1)"),
        Case("diloco(steps=3, overlap=eager, delay=1)"),
        Case("local(steps=3, overlap=blend, delay=1)"),
        Case("local(steps=3, overlap=late, delay=1)"),
    ]
    with group_workers(
        shards, work_twice, new_job(), cases, job=new_job(), groups=(0, 1)
    ) as workers:
        results = results_of(workers)
    wrong = []
    for group in range(GROUPS):
        leader, other = results[SIZE * group : SIZE * (group + 1)]
        for case, (ours, flat), (theirs, _) in zip(cases, leader, other, strict=True):
            assert flat is not None
            same = np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])
            errors = error(ours[0], flat[0]), error(ours[1], flat[1])
            logs = np.allclose(ours[2], flat[2], rtol=1e-5) and ours[2] == theirs[2]
            if not (same and max(errors) < 3e-6 and logs):
                wrong.append((case, group, same, errors, ours[2], theirs[2], flat[2]))
    assert not wrong, "\n".join(map(str, wrong))


def work_restored(me: Station, job: str, servers: list[str]) -> tuple[Array, Array]:
    """Trains a job with a pause for a checkpoint, and its second half again on other shards."""
    torch.distributed.init_process_group("gloo")
    case = Case("ssgd", f"2bit(threshold={THRESHOLD})")
    run, ends = Run(case, me, job, alone=False), []
    for step in range(STEPS // 2):
        run.step(step)
    for shard_places in (None, servers):
        me.tell()
        me.hear()
        if shard_places is not None:
            run.begin(job, shard_places)
        for step in range(STEPS // 2, STEPS):
            run.step(step)
        ends.append(run.end()[1])
    return ends[0], ends[1]


@pytest.mark.slow
def test_a_checkpoint_has_the_residuals_of_all_processes(shards: Shards, tmp_path: Path) -> None:
    command, folder, job = Command(tmp_path), tmp_path / "checkpoints", new_job()
    with (
        Shards(3) as others,
        group_workers(
            shards, work_restored, job, others.addresses, job=job, groups=(0, 1)
        ) as workers,
    ):
        for name, place in (("checkpoint", shards), ("restore", others)):
            for worker in workers:
                worker.hear()
            command.run(name, folder, "--job", job, "--servers", place.servers)
            for worker in workers:
                worker.tell()
        for whole, again in results_of(workers):
            assert np.array_equal(whole, again)


# ----- a process that is killed


def work_told(me: Station, job: str, elastic: bool = False) -> tuple[int, Array, Array]:
    """Makes as many steps as the test says, or looks alone, each time it says so; 0 ends it."""
    torch.distributed.init_process_group("gloo")
    sizes: dict[str, Any] = {"min_workers": 1, "max_workers": GROUPS} if elastic else {}
    psworker.init(job=job, **sizes)
    net = Net()
    torch.nn.init.zeros_(net.weight)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5),
        named_parameters=net.named_parameters(),
        model=net,
        buffers="rank0" if elastic else "mean",
    )
    me.tell(optimizer.steps)
    while told := me.hear():
        if told == "look":  # The other processes of the group do nothing meanwhile.
            with optimizer.global_weights():
                me.tell(float(net.weight[0, 0]))
            continue
        for _ in range(told):
            optimizer.zero_grad()
            torch.autograd.backward(net.weight.sum())
            net.seen.fill_(float(psworker.rank()))  # type: ignore[operator]
            optimizer.step()
        me.tell(optimizer.steps)
    if not elastic:
        psworker.barrier("ended")
        with optimizer.global_weights():
            shared = net.seen.numpy().copy()  # type: ignore[operator]
        psworker.barrier("looked")
    else:
        shared = np.zeros(4)
    psworker.shutdown()
    return optimizer.steps, net.weight.detach().numpy(), shared


def make_steps(workers: list[Worker], steps: int | str) -> list[Any]:
    for worker in workers:
        worker.tell(steps)
    return [worker.hear() for worker in workers]


def end(workers: list[Worker], steps: int) -> list[Array]:
    """Ends processes that have made `steps` steps of -0.5 each; returns their shared buffers."""
    for worker in workers:
        worker.tell(0)
    results = results_of(workers)
    for made, weights, _ in results:
        assert made == steps
        assert np.array_equal(weights, np.full((ROWS, COLUMNS), -0.5 * steps, np.float32))
    return [shared for _, _, shared in results]


@pytest.mark.slow
def test_a_killed_process_ends_its_group_and_the_group_comes_back(shards: Shards) -> None:
    """The other group goes on meanwhile; a new group takes part in its place; then all are killed.

    One process may look at the global weights alone, and the mean of buffers has all processes.
    """
    job = new_job()
    with group_workers(shards, work_told, job, job=job, groups=(0, 1)) as workers:
        first, second = workers[:SIZE], workers[SIZE:]
        assert [worker.hear() for worker in workers] == [0] * 4
        assert make_steps(workers, 3) == [3] * 4
        assert make_steps([second[1]], "look") == [-1.5]
        for worker in first:  # They wait for the other group's gradients.
            worker.tell(4)
        second[0].tell(4)
        second[1].kill()
        with pytest.raises(WorkerError, match="process 1 of this worker's group has ended"):
            second[0].result()
        assert [worker.hear() for worker in first] == [7, 7]
        with group_workers(shards, work_told, job, job=job, groups=(1,)) as third:
            assert [worker.hear() for worker in third] == [7, 7]
            everyone = [*first, *third]
            assert make_steps(everyone, 3) == [10] * 4
            for worker in everyone:
                worker.kill()
    with group_workers(shards, work_told, job, job=job, groups=(0, 1)) as workers:
        assert [worker.hear() for worker in workers] == [10] * 4
        assert make_steps(workers, 2) == [12] * 4
        for shared in end(workers, 12):
            assert np.array_equal(shared, np.full(4, 1.5, np.float32))


@pytest.mark.slow
def test_groups_join_and_leave_an_elastic_job(shards: Shards) -> None:
    job = new_job()
    with group_workers(shards, work_told, job, True, job=job, groups=(0,)) as first:
        assert [worker.hear() for worker in first] == [0, 0]
        assert make_steps(first, 3) == [3, 3]
        with group_workers(shards, work_told, job, True, job=job, groups=(1,)) as second:
            assert [worker.hear() for worker in second] == [3, 3]
            assert make_steps([*first, *second], 2) == [5] * 4
            end(second, 5)
        assert make_steps(first, 2) == [7, 7]
        end(first, 7)
