"""Modes with rounds through real shards: against the same rounds made by torch in one process."""

import copy
import time
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.compressors import parse_compressor
from pscore.rules import parse_mode
from pssim.training import TrainingCluster, TrainingJob
from tests.inside import table_of
from tests.integration.cluster import Shards, Station
from tests.integration.models import backward, batch, make_model, relative_error, weights_of

STEPS = 22  # Not a multiple of a round: the last one is pushed as it is when training ends.


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """The shards have no counterpart of it."""
    return torch.optim.RMSprop(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)


SPARSELY = {"compression": "sparseloco", "pull_compression": "sparseloco(decay=1.0)"}
INNER = {"rmsprop": rmsprop, "adamw": adamw}


def train(me: Station, mode: str, inner: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        INNER[inner](model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # Nothing has left by then.
        optimizer.step()
        scheduler.step()
    psworker.shutdown()
    return weights_of(model)


def train_alone(inner: str, rounds: int, outer: torch.optim.Optimizer | None = None) -> Any:
    """Returns the weights of two models in one process, averaged after each round."""
    reference = make_model()
    models = [make_model() for _ in range(2)]
    optimizers = [INNER[inner](model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=7, gamma=0.5) for o in optimizers]
    step_outer = torch.optim.SGD(
        reference.parameters(), **({"lr": 1.0} if outer is None else outer.defaults)
    )
    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            backward(model, *batch(rank, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[rank].step()
            schedulers[rank].step()
        if (step + 1) % rounds and step + 1 < STEPS:
            continue
        with torch.no_grad():
            for name, weight in reference.named_parameters():
                held = [model.state_dict()[name] for model in models]
                weight.grad = weight - torch.stack(held).mean(dim=0)
        step_outer.step()
        for model in models:
            model.load_state_dict(reference.state_dict())
    return weights_of(reference)


@pytest.mark.slow
@pytest.mark.parametrize("inner", list(INNER))
def test_local_sgd_is_the_mean_of_models_trained_apart(shards: Shards, inner: str) -> None:
    first, second = shards.run(train, "local(steps=5)", inner)
    for name, weight in train_alone(inner, 5).items():
        assert np.array_equal(first[name], second[name]), name
        assert relative_error(first[name], weight) <= 1e-5, name


@pytest.mark.slow
def test_diloco_is_nesterov_over_the_means_of_models_trained_apart(shards: Shards) -> None:
    outer = torch.optim.SGD([torch.zeros(1)], lr=0.7, momentum=0.9, nesterov=True)
    first, second = shards.run(train, "diloco(steps=8)", "adamw")
    for name, weight in train_alone("adamw", 8, outer).items():
        assert np.array_equal(first[name], second[name]), name
        assert relative_error(first[name], weight) <= 1e-5, name


def train_beside_a_still_one(me: Station, mode: str) -> list[float]:
    """Worker 0 moves by 1/8 at each step, worker 1 does not; returns where the shards end."""
    weight = torch.nn.Parameter(torch.zeros(9000))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=(1.0, 0.0)[me.rank]),
        named_parameters=[("weight", weight)],
        mode=mode,
    )
    for _ in range(8 if me.rank == 0 else 4):
        optimizer.zero_grad()
        torch.autograd.backward(weight.sum().div(-8.0))
        optimizer.step()
    psworker.barrier("end")
    with optimizer.global_weights():
        ends = [float(weight[0]), float(weight[-1])]
    psworker.shutdown()
    return ends


def test_delayed_nesterov_waits_for_no_other_worker(shards: Shards) -> None:
    """Each of its 4 rounds moves the weights by 1/2 * 1/2 * 2/8; other rounds move them by 0."""
    mode = "delayed_nesterov(steps=2, outer_lr=0.5, outer_momentum=0.0)"
    assert shards.run(train_beside_a_still_one, mode) == [[0.25, 0.25]] * 2


class Seconds:
    """A clock of a worker's pace that its script sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def train_by_speed(me: Station) -> tuple[list[int], float, float, int]:
    """Steps of 1/8, which take worker 1 twice as long; returns those after speeds are known."""
    weight, clock = torch.nn.Parameter(torch.zeros(9000)), Seconds()
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        named_parameters=[("weight", weight)],
        mode="local(steps=8, steps_min=2)",
    )
    session = table_of(optimizer).session
    session.pace.now = clock  # In thousands of seconds, beside which no real wait counts.

    def go_on(until: int) -> list[int]:
        made = []
        while optimizer.steps < until:
            made.append(optimizer.steps)
            optimizer.zero_grad()
            torch.autograd.backward(weight.sum().div(-8.0))
            clock.now_s += 1e6 * (1 + me.rank)
            optimizer.step()
        return made

    go_on(8)
    ends_s = time.monotonic() + 60.0
    while abs(session.pace.share - (1.0, 0.5)[me.rank]) > 1e-3:
        assert time.monotonic() < ends_s, session.pace.message()
        session.heartbeats.hurry()
        time.sleep(0.02)
    psworker.barrier("speeds")
    go_on(16)  # Its length may have been chosen before.
    with optimizer.global_weights():
        before, seen = float(weight[0]), optimizer.samples_seen
    made = go_on(32)
    with optimizer.global_weights():
        moved = float(weight[0]) - before
    session.heartbeats.hurry()
    result = made, moved, optimizer.samples_seen - seen, session.pace.message().round_steps
    psworker.shutdown()
    return result


@pytest.mark.slow
def test_a_worker_at_half_speed_makes_half_the_steps_of_a_round(shards: Shards) -> None:
    """Moves of 8/8 and 4/8, weighed by their steps: (8 * 1 + 4 * 1/2) / 12 a round."""
    first, second = shards.run(train_by_speed)
    assert first[0] == list(range(16, 32))
    assert second[0] == [16, 17, 18, 23, 24, 25, 26, 31]
    for _, moved, _, _ in (first, second):
        assert moved == pytest.approx(2 * 10 / 12)
    assert [first[2], second[2]] == [16.0, 8.0]
    assert [first[3], second[3]] == [8, 4]


def train_apart(rounds: int, delay: int) -> Any:
    """Returns the weights of two models in one process, whose rounds mirror DiLoCo's outer step."""
    names = [name for name, _ in make_model().named_parameters()]
    start = [weight.detach().clone() for weight in make_model().parameters()]
    velocity = [torch.zeros_like(weight) for weight in start]
    models = [make_model() for _ in range(2)]
    origins = [[weight.clone() for weight in start] for _ in models]
    optimizers = [adamw(model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=7, gamma=0.5) for o in optimizers]

    def outer(index: int, move: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        speed = 0.9 * velocity[index] + move
        return start[index] - 0.7 * (move + 0.9 * speed), speed

    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            backward(model, *batch(rank, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[rank].step()
            schedulers[rank].step()
        place, is_last = step % rounds, step + 1 == STEPS
        for index in range(len(names)):
            held = [list(model.parameters())[index].detach() for model in models]
            if place + 1 == delay and step >= rounds:
                for weight, origin in zip(held, origins, strict=True):
                    weight += start[index] - origin[index]
                    origin[index] = start[index].clone()
            if place + 1 < rounds and not is_last:
                continue
            moves = [origin[index] - weight for origin, weight in zip(origins, held, strict=True)]
            for weight, origin, move in zip(held, origins, moves, strict=True):
                weight.copy_(outer(index, move)[0])
                origin[index] = weight.clone()
            start[index], velocity[index] = outer(index, torch.stack(moves).mean(dim=0))
    return {name: weight.numpy() for name, weight in zip(names, start, strict=True)}


def test_overlapped_rounds_start_at_the_outer_step_of_each_worker(shards: Shards) -> None:
    """Two whole rounds and six steps, with AdamW inside; the last answer lands in step 19."""
    first, second = shards.run(train, "diloco(steps=8, overlap=mirror, delay=3)", "adamw")
    for name, weight in train_apart(8, 3).items():
        assert np.array_equal(first[name], second[name]), name
        assert relative_error(first[name], weight) <= 1e-4, name


def make_matrices() -> tuple[torch.nn.Module, list[Any], list[Any]]:
    """Returns a model, its matrices and the rest, by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    named = list(model.named_parameters())
    return (
        model,
        [one for one in named if one[1].ndim == 2],
        [one for one in named if one[1].ndim == 1],
    )


def train_muon(me: Station) -> dict[str, np.ndarray]:
    """MuLoCo: Muon inside for the matrices, AdamW for the rest; a table for each."""
    model, matrices, rest = make_matrices()
    mode = "diloco(steps=4, outer_lr=0.7)"
    optimizers = [
        psworker.DistributedOptimizer(make([weight for _, weight in named]), named, mode=mode)
        for make, named in ((muon, matrices), (adamw, rest))
    ]
    for step in range(8):
        backward(model, *batch(me.rank, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    psworker.shutdown()
    return weights_of(model)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.01)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muloco_is_nesterov_over_the_means_of_models_trained_apart_by_muon(shards: Shards) -> None:
    reference, models = make_matrices()[0], [make_matrices() for _ in range(2)]
    inner = [
        [muon([weight for _, weight in matrices]), adamw([weight for _, weight in rest])]
        for _, matrices, rest in models
    ]
    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(8):
        for rank, (model, _, _) in enumerate(models):
            backward(model, *batch(rank, step))
            for optimizer in inner[rank]:
                optimizer.step()
                optimizer.zero_grad()
        if step % 4 == 3:
            with torch.no_grad():
                for name, weight in reference.named_parameters():
                    held = [model.state_dict()[name] for model, _, _ in models]
                    weight.grad = weight - torch.stack(held).mean(dim=0)
            outer.step()
            for model, _, _ in models:
                model.load_state_dict(reference.state_dict())
    first, second = shards.run(train_muon)
    for name, expected in weights_of(reference).items():
        assert np.array_equal(first[name], second[name]), name
        assert relative_error(first[name], expected) <= 1e-4, name


def hold_still(me: Station, mode: str) -> float:
    """Rounds of a bfloat16 model that does not move; returns how far the shards' weights went."""
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model = model.to(torch.bfloat16)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        mode=mode,
    )
    # Once, worker 0 moves its bias by 1/256: W is 1 - 1/512, which bfloat16 cannot hold.
    for step in range(8):
        optimizer.zero_grad()
        model(torch.zeros(1, 8, dtype=torch.bfloat16)).sum().mul(0.0).backward()
        if step == 0 and me.rank == 0:
            assert model.bias.grad is not None
            model.bias.grad.fill_(2.0**-8)
        optimizer.step()
    with optimizer.global_weights():
        bias = table_of(optimizer).flat.weight(1).clone()
    assert len(set(bias.tolist())) == 1
    return 1.0 - float(bias[0])


@pytest.mark.parametrize("mode", ["local(steps=2)", "local(steps=2, overlap=mirror, delay=1)"])
def test_the_rounding_of_a_bfloat16_model_is_not_taken_for_a_move(
    shards: Shards, mode: str
) -> None:
    """Otherwise each round would round the shards' weights to bfloat16."""
    assert shards.run(hold_still, mode) == [2.0**-9, 2.0**-9]


def save_and_load(me: Station) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Trains 6 and 6 steps, and the second 6 again after the state of the first has come back."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        adamw(model.parameters()),
        named_parameters=model.named_parameters(),
        mode="diloco(steps=3, outer_lr=0.5)",
    )

    def go_on(steps: range) -> dict[str, np.ndarray]:
        for step in steps:
            optimizer.zero_grad()
            backward(model, *batch(me.rank, step))
            optimizer.step()
        return weights_of(model)

    go_on(range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = go_on(range(6, 12))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return first, go_on(range(6, 12))


def test_a_state_dict_holds_the_inner_and_the_outer_state(shards: Shards) -> None:
    for first, again in shards.run(save_and_load):
        for name, weight in first.items():
            assert np.array_equal(weight, again[name]), name


def change_in_the_middle(me: Station) -> list[Any]:
    """Rounds of two fragments, in which every step is of 1/8: changes come between their ends."""
    weight = torch.nn.Parameter(torch.zeros(9000))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        named_parameters=[("weight", weight)],
        mode="local(steps=4, fragments=2)",
    )

    def go_on(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(weight.sum().div(-8.0))
            optimizer.step()

    def note() -> list[float]:
        with optimizer.global_weights():
            return [optimizer.steps, 8.0 * float(weight[0]), 8.0 * float(weight[-1])]

    noted = []
    go_on(3)  # One fragment has ended a round of 2 steps, the other none.
    noted.append(note())
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.set_mode("local(steps=6, fragments=2, overlap=mirror, delay=1)")
    noted.append(note())
    go_on(4)  # To step 7: rounds end at 3 and 6 steps of a cycle, so at step 6.
    noted.append(note())
    with torch.no_grad():
        weight.zero_()
    optimizer.load_state_dict(saved)
    noted.append(note())
    go_on(3)
    noted.append(note())
    optimizer.set_mode("local(steps=2)")
    go_on(2)
    noted.append(note())
    psworker.shutdown()
    return noted


def test_changes_of_a_job_between_the_ends_of_two_fragments(shards: Shards) -> None:
    """A change of the mode loses no step; a saved state holds the rounds that had ended."""
    for noted in shards.run(change_in_the_middle):
        assert noted == [[3, 2, 0], [3, 3, 3], [7, 3, 6], [3, 0, 0], [6, 0, 3], [8, 5, 5]]


def train_as_simulated(
    me: Station, mode: str, options: dict[str, Any], steps: int
) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        adamw(model.parameters()),
        named_parameters=model.named_parameters(),
        mode=mode,
        compress_min_nbytes=1024,
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    with optimizer.global_weights():
        weights = weights_of(model)
    psworker.shutdown()
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("diloco(steps=5, overlap=mirror)", {}),
        ("diloco(steps=4, outer_lr=0.9, outer_momentum=0.0)", SPARSELY),
    ],
)
def test_a_simulated_job_has_the_bits_of_one_of_processes(
    shards: Shards, mode: str, options: dict[str, str]
) -> None:
    """So `python -m benchmarks.rounds` need not start any."""
    steps = 20
    first, second = shards.run(train_as_simulated, mode, options, steps)

    def gradient(model: torch.nn.Module, rank: int, step: int) -> float:
        backward(model, *batch(rank, step))
        return 0.0

    job = TrainingJob(
        rule=parse_mode(mode),
        make_model=make_model,
        gradient=gradient,
        group={"lr": 2e-3},
        make_inner=adamw,
        num_workers=2,
        steps=steps,
        compressor=parse_compressor(options.get("compression", "none")),
        pull_compressor=parse_compressor(options.get("pull_compression", "none")),
    )
    simulated = weights_of(TrainingCluster(job).run().show(make_model()))
    for name, weight in simulated.items():
        assert np.array_equal(first[name], weight), name
        assert np.array_equal(second[name], weight), name
