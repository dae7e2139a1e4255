"""Delayed modes against their equations, written here in numpy and sharing no code with Paceline.

ALGORITHMS.md is the design's reference of equations; the numbers of its sections stand at each
model. Gradients are a function of (worker, step, weights) that both sides can compute.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, weights_of

Array = npt.NDArray[Any]

# ----- OD-SGD, bit by bit

NUMEL = (9000, 300)  # Of the two parameters: one over two slices, and a group of its own.
LR = (0.05, 0.02)
MOMENTUM = (0.9, 0.5)
WEIGHT_DECAY = (1e-3, 0.0)
OD_STEPS, OD_WARMUP = 20, 3


def od_table(name: str, *key: int) -> npt.NDArray[np.float32]:
    """Returns a row of random numbers over all elements."""
    rng = np.random.default_rng([len(name), *key])
    return rng.standard_normal(sum(NUMEL), np.float32)


def od_gradient(rank: int, step: int, weights: Array) -> Array:
    """Returns curvature * weights - target in float32, the same bits in numpy and torch."""
    return np.abs(od_table("curvature", rank)) * weights - od_table("target", rank, step)


OD_MODES = (  # The second is item 1 of section 11.
    f"ssd(steps=1, warmup={OD_WARMUP}, local=sgd)",
    f"ssd(steps=1, warmup={OD_WARMUP}, local=glu, alpha=1.0, beta=0.0)",
)


def work_od(me: Station, mode: str) -> tuple[list[Array], Array]:
    start = np.split(od_table("start"), [NUMEL[0]])
    model = torch.nn.ParameterList([torch.from_numpy(part.copy()) for part in start])
    groups = [
        {"params": [weight], "lr": lr, "momentum": momentum, "weight_decay": decay}
        for weight, lr, momentum, decay in zip(model, LR, MOMENTUM, WEIGHT_DECAY, strict=True)
    ]
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(groups), named_parameters=model.named_parameters(), mode=mode
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    path = []
    for step in range(OD_STEPS):
        flat = np.concatenate([weight.detach().numpy() for weight in model])
        path.append(flat)
        parts = np.split(od_gradient(me.rank, step, flat), [NUMEL[0]])
        optimizer.zero_grad()
        loss = sum((w * torch.from_numpy(g)).sum() for w, g in zip(model, parts, strict=True))
        assert isinstance(loss, torch.Tensor)
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
    psworker.shutdown()
    return path, np.concatenate([weight.detach().numpy() for weight in model])


def columns(values: tuple[float, float], factor: float = 1.0) -> npt.NDArray[np.float32]:
    """Returns one number for each element of the two parameters."""
    return np.repeat(np.array(values) * factor, NUMEL).astype(np.float32)


def od_sgd(num_workers: int) -> tuple[list[list[Array]], Array]:
    """Returns the local weights of every worker at every step, and W at the end (2.1, Lambda=0).

    W^{t+1} = W^t - lr V^{t+1},  V^{t+1} = m V^t + G^t + wd W^t       (V^1 = G^0 + wd W^0)
    w_i^{t+1} = W^t - lr (g_i^t + wd W^t)                             after the warm-up
    """
    momentum, decay = columns(MOMENTUM), columns(WEIGHT_DECAY)
    shard: Array = od_table("start")
    velocity = np.zeros_like(shard)
    local = [shard] * num_workers
    paths: list[list[Array]] = [[] for _ in range(num_workers)]
    for step in range(OD_STEPS):
        lr = columns(LR, 0.5 ** (step // 8))
        gradients = [od_gradient(rank, step, local[rank]) for rank in range(num_workers)]
        for rank in range(num_workers):
            paths[rank].append(local[rank])
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        direction = total * np.float32(1 / num_workers) + decay * shard
        velocity = direction if step == 0 else momentum * velocity + direction
        former, shard = shard, shard - lr * velocity
        local = [
            shard if step < OD_WARMUP else former - lr * (gradient + decay * former)
            for gradient in gradients
        ]
    return paths, shard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_workers"), [(OD_MODES[0], 2), (OD_MODES[0], 3), (OD_MODES[1], 2)]
)
def test_ssd_with_k_1_and_the_plain_step_is_od_sgd_to_the_bit(
    shards: Shards, mode: str, num_workers: int
) -> None:
    expected, expected_end = od_sgd(num_workers)
    results = shards.run(work_od, mode, num_workers=num_workers)
    for rank, (path, end) in enumerate(results):
        for step, (ours, theirs) in enumerate(zip(path, expected[rank], strict=True)):
            assert np.array_equal(ours, theirs), (rank, step, np.abs(ours - theirs).max())
        assert np.array_equal(end, expected_end), rank
    assert not np.array_equal(results[0][0][-1], results[1][0][-1]), "local weights must differ"


# ----- GLU, secant and mirror, against float64

SOFTMAX_STEPS, SOFTMAX_WARMUP = 42, 4
INPUTS, CLASSES, SAMPLES = 30, 8, 12
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}


def samples(rank: int, step: int) -> tuple[Array, Array]:
    """Returns a batch in float64 whose numbers float32 holds too; workers' data differ in kind."""
    rng = np.random.default_rng([rank, step])
    inputs = rng.standard_normal((SAMPLES, INPUTS), np.float32) + np.float32(0.5 * rank)
    return inputs.astype(np.float64), (inputs[:, :CLASSES].argmax(axis=1) + rank) % CLASSES


def start_weights() -> Array:
    """Returns weights `(classes, inputs + 1)` in float64; the last column is the bias."""
    values = np.random.default_rng(7).standard_normal((CLASSES, INPUTS + 1), np.float32)
    return values.astype(np.float64) * 0.5


def softmax_gradient(weights: Array, rank: int, step: int) -> Array:
    """Returns the gradient of the mean cross entropy of softmax regression, by hand."""
    inputs, classes = samples(rank, step)
    with_one = np.concatenate([inputs, np.ones((SAMPLES, 1))], axis=1)
    scores = with_one @ weights.T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = odds / odds.sum(axis=1, keepdims=True) - np.eye(CLASSES)[classes]
    gradient: Array = errors.T @ with_one / SAMPLES
    return gradient


class Glu:
    """1.4, V1 as released: the way since the last local step over D = k lr, and the gradient."""

    alpha, beta = 2.0, 0.5

    def __init__(self, weights: Array) -> None:
        self.base = weights
        self.before: Array | None = None
        self.k = 1

    def pull(self, weights: Array, velocity: Array, updates: int) -> None:
        self.base = weights

    def step(self, gradient: Array) -> None:
        lr, decay = SGD["lr"], SGD["weight_decay"]
        before = self.base if self.before is None else self.before
        self.before = self.base
        sync = ((1 - lr * decay) * before - self.base) / (self.k * lr)
        move = self.alpha * gradient + self.beta * sync + decay * self.base
        self.base = self.base - lr * move


class Secant:
    """1.4: the mean update of the shard, read off two snapshots, beside the own gradient."""

    alpha, beta = 2.0, 0.5

    def __init__(self, weights: Array) -> None:
        self.base = self.old = weights
        self.global_gradient = np.zeros_like(weights)

    def pull(self, weights: Array, velocity: Array, updates: int) -> None:
        lr, decay = SGD["lr"], SGD["weight_decay"]
        self.global_gradient = ((1 - lr * decay) ** updates * self.old - weights) / (updates * lr)
        self.base = self.old = weights

    def step(self, gradient: Array) -> None:
        move = self.alpha * gradient + self.beta * self.global_gradient
        self.base = self.base - SGD["lr"] * (move + SGD["weight_decay"] * self.base)


class MirrorExact:
    """1.10: the shard's own optimizer, with its state taken over at each pull."""

    def __init__(self, weights: Array) -> None:
        self.base = weights
        self.velocity = np.zeros_like(weights)

    def pull(self, weights: Array, velocity: Array, updates: int) -> None:
        self.base, self.velocity = weights, velocity

    def step(self, gradient: Array) -> None:
        direction = gradient + SGD["weight_decay"] * self.base
        self.velocity = SGD["momentum"] * self.velocity + direction
        self.base = self.base - SGD["lr"] * self.velocity


class MirrorKept(MirrorExact):
    """1.10: as `exact`, but after the warm-up it continues with the worker's own state."""

    is_warm = False

    def pull(self, weights: Array, velocity: Array, updates: int) -> None:
        self.base = weights
        if not self.is_warm:
            self.velocity = velocity


Local = type[Glu] | type[Secant] | type[MirrorExact]


def begin(
    make_local: Local, shard: Array, k: int, num_workers: int
) -> list[Glu | Secant | MirrorExact]:
    local = [make_local(shard) for _ in range(num_workers)]
    for worker in local:
        if isinstance(worker, Glu):
            worker.k = k
    return local


def ssd(
    make_local: Local, k: int, num_workers: int = 2, processes: int = 1
) -> tuple[list[Array], Array]:
    """Returns every worker's local weights `(steps, ...)`, and W at the end (1.3).

    The gradient of a worker is the mean of those of its processes.
    """
    shard = start_weights()
    velocity = np.zeros_like(shard)
    local = begin(make_local, shard, k, num_workers)
    paths: list[list[Array]] = [[] for _ in range(num_workers)]
    pull_buffer: tuple[Array, Array] | None = None
    for step in range(SOFTMAX_STEPS):
        weights = [worker.base for worker in local]
        for rank in range(num_workers):
            paths[rank].append(weights[rank])
        gradients = [
            np.mean(
                [
                    softmax_gradient(weights[rank], processes * rank + process, step)
                    for process in range(processes)
                ],
                axis=0,
            )
            for rank in range(num_workers)
        ]
        mean = np.mean(gradients, axis=0)
        if step >= SOFTMAX_WARMUP:
            for rank in range(num_workers):
                if pull_buffer is not None:
                    local[rank].pull(*pull_buffer, k)
                if isinstance(local[rank], MirrorKept):
                    local[rank].is_warm = True  # type: ignore[union-attr]
                local[rank].step(gradients[rank])
            pull_buffer = None
        direction = mean + SGD["weight_decay"] * shard
        velocity = direction if step == 0 else SGD["momentum"] * velocity + direction
        shard = shard - SGD["lr"] * velocity
        if step < SOFTMAX_WARMUP:
            for worker in local:
                worker.pull(shard, velocity, 1)
        elif (step - SOFTMAX_WARMUP) % k == k - 1:
            pull_buffer = (shard, velocity)
    return [np.array(path) for path in paths], shard


def work_softmax(me: Station, modes: list[str], job: str) -> list[tuple[Array, Array]]:
    """Returns the local weights at every step, and the global ones at the end, for each mode."""
    results = []
    for number, mode in enumerate(modes):
        psworker.init(job=f"{job}-{number}")
        layer = torch.nn.Linear(INPUTS, CLASSES)
        start = torch.from_numpy(start_weights()).float()
        with torch.no_grad():
            layer.weight.copy_(start[:, :-1])
            layer.bias.copy_(start[:, -1])
        optimizer = psworker.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), **SGD),  # type: ignore[arg-type]
            named_parameters=layer.named_parameters(),
            mode=mode,
        )

        def flat(layer: torch.nn.Linear = layer) -> Array:
            whole = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
            return whole.detach().numpy().astype(np.float64)

        path = []
        for step in range(SOFTMAX_STEPS):
            path.append(flat())
            inputs, classes = samples(me.rank, step)
            optimizer.zero_grad()
            scores = layer(torch.from_numpy(inputs).float())
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(scores, torch.from_numpy(classes))
            )
            optimizer.step()
        psworker.shutdown()
        results.append((np.array(path), flat()))
    return results


CASES: list[tuple[str, Local, int]] = [
    *((f"ssd(steps={k}, warmup=4, local=glu)", Glu, k) for k in (1, 3, 5)),
    *((f"ssd(steps={k}, warmup=4, local=secant)", Secant, k) for k in (1, 3, 5)),
    *((f"ssd(steps={k}, warmup=4, local=mirror)", MirrorExact, k) for k in (1, 3, 5)),
    *((f"ssd(steps={k}, warmup=4, local=mirror, mirror=kept)", MirrorKept, k) for k in (1, 3, 5)),
]


def distance(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.slow
def test_ssd_follows_an_independent_model_in_float64(shards: Shards) -> None:
    """GLU, secant, mirror (exact and kept), k = 1, 3, 5: every local weight at every step, and W.

    The dynamics are stable, so that float32's rounding (6e-8 of the largest weight, a few times a
    step) adds up like the square root of 42 steps: some 4e-7, and 3e-7 is seen. The models of any
    two of the twelve cases are a thousand times the tolerance apart.
    """
    tolerance = 3e-6
    first, second = shards.run(work_softmax, [mode for mode, _, _ in CASES], new_job())
    models = [ssd(make_local, k) for _, make_local, k in CASES]
    for number, (mode, _, _) in enumerate(CASES):
        paths, end = models[number]
        for rank, (path, own_end) in enumerate((first[number], second[number])):
            assert distance(path, paths[rank]) <= tolerance, (mode, rank)
            assert distance(own_end, end) <= tolerance, (mode, rank)
        for other, (other_paths, _) in enumerate(models):
            assert other == number or distance(paths[0], other_paths[0]) > 1000 * tolerance


# ----- waiting for other workers


def train(mode: str, rank: int, steps: int) -> list[dict[str, Array]]:
    """Returns the weights after each step."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        mode=mode,
    )
    path = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, *batch(rank, step))
        optimizer.step()
        path.append(weights_of(model))
    return path


def work_twice(me: Station, job: str, modes: tuple[str, str], steps: int) -> list[Any]:
    paths = []
    for number, mode in enumerate(modes):
        psworker.init(job=f"{job}-{number}")
        paths.append(train(mode, me.rank, steps))
        psworker.shutdown()
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("local", ["sgd", "glu", "mirror"])
def test_the_warm_up_of_ssd_is_ssgd_to_the_bit(shards: Shards, local: str) -> None:
    modes = ("ssgd", f"ssd(steps=2, warmup=6, local={local})")
    for plain, delayed in shards.run(work_twice, new_job(), modes, 10):
        for step, (one, other) in enumerate(zip(plain, delayed, strict=True)):
            same = all(np.array_equal(one[name], other[name]) for name in one)
            assert same == (step < 6), step


def sum_up(me: Station, steps: int, waits: bool) -> tuple[float, float]:
    """Adds 1, 2, ... to a weight by gradients, in asgd; worker 1 waits for the test before."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)], mode="asgd"
    )
    if waits and me.rank == 1:
        me.hear()
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(-(step + 1) * weight.sum())
        optimizer.step()
    seen = weight[0].item()
    me.tell()
    me.hear()
    with optimizer.global_weights():
        return seen, weight[0].item()


def test_an_asgd_worker_waits_for_its_own_update_only(shards: Shards) -> None:
    with shards.workers(sum_up, 10, True) as (first, second):
        first.hear()  # It has made all its steps while the other has made none.
        second.tell()
        second.hear()
        for worker in (first, second):
            worker.tell()
        assert first.result() == (55.0, 110.0)
        assert second.result() == (110.0, 110.0)


@pytest.mark.slow
def test_asgd_loses_no_gradient_of_workers_that_race(shards: Shards) -> None:
    with shards.workers(sum_up, 30, False, num_workers=3) as workers:
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell()
        assert [worker.result()[1] for worker in workers] == [3 * 465.0] * 3


def run_ahead(me: Station, steps: int) -> list[float]:
    """Returns when each step was over; worker 1 begins when the test says so."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        named_parameters=[("weight", weight)],
        mode="ssd(steps=3, warmup=0)",
    )
    times = []
    if me.rank == 1:
        me.hear()
        times.append(time.monotonic())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(weight.sum())
        optimizer.step()
        times.append(time.monotonic())
        me.tell()
    return times


def test_an_ssd_worker_runs_k_steps_ahead_and_then_waits_for_the_slowest(shards: Shards) -> None:
    with shards.workers(run_ahead, 4) as (fast, slow):
        for _ in range(3):
            fast.hear()
        slow.tell()
        ahead, behind = fast.result(), slow.result()
    assert ahead[2] < behind[0] < ahead[3]
