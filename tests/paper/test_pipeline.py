"""1F1B without a flush, with weight versions: against a float64 model of the formulas.

The model knows no schedule: it goes through the minibatches in order, keeps every version of every
stage's weights, and takes each gradient at the versions that the papers name. The machines run one
action at a time, in a random order, with their own queue of messages.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pscore.errors import ConfigError
from pssim.pipelines import PipelineWorld
from psworker.pipeline.run.ring import WeightRing
from psworker.pipeline.run.schedule import Order, Place, Stash, TwoVersions, Vertical

WIDTH, BATCHES = 3, 40
LR = 0.1
Optimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr / 10),
}
VERSIONS: dict[str, Callable[[Place], Stash]] = {
    "stash": Stash,
    "vertical": Vertical,
    "2bw": lambda place: TwoVersions(place, 4),
}
SHAPES = [(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (2, 2, 1), (1, 1, 1, 1), (2, 1, 2, 1)]
SHAPES += [(2, 2, 2, 2)]
WITH_ADAM = [(2, 1), (1, 1, 1)]


def make_stages(number: int) -> list[nn.Module]:
    torch.manual_seed(number)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(number)
    ]


def data(number: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(2, WIDTH, generator=generator).double(),
            torch.randn(2, WIDTH, generator=generator).double(),
        )
        for _ in range(number)
    ]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


# ----- the formulas, without a schedule

State = dict[str, torch.Tensor]


def optimizer_step(name: str, lr: float, number: int, w: State, g: State, memory: Any) -> State:
    """Returns new weights by the optimizer's own formula."""
    new = {}
    for key, value in w.items():
        if name == "sgd":
            memory[key] = 0.9 * memory[key] + g[key] if key in memory else g[key]
            new[key] = value - lr * memory[key]
            continue
        m, v = memory.get(key, (torch.zeros_like(value), torch.zeros_like(value)))
        m, v = 0.9 * m + 0.1 * g[key], 0.999 * v + 0.001 * g[key] ** 2
        memory[key] = m, v
        scale = (v / (1 - 0.999**number)).sqrt() + 1e-8
        new[key] = value - lr / 10 * (m / (1 - 0.9**number)) / scale
    return new


def version_of(kind: str, m: int, s: int, replicas: tuple[int, ...]) -> int:
    def ahead(stage: int) -> int:
        return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage]

    if kind == "stash":
        return max(0, m // replicas[s] - ahead(s))
    if kind == "vertical":
        return max(0, m // replicas[0] - ahead(0)) * replicas[0] // replicas[s]
    return max(0, m // 4 - 1)


def oracle(kind: str, replicas: tuple[int, ...], optimizer: str, total: int) -> list[list[State]]:
    """Returns every version of the weights of each stage."""
    stages = make_stages(len(replicas))
    history = [[{k: p.detach().clone() for k, p in s.named_parameters()}] for s in stages]
    sums: list[list[State]] = [[] for _ in stages]
    memories: list[dict[str, Any]] = [{} for _ in stages]
    for m, (x, y) in enumerate(data(total)):
        used = [
            {k: v.clone().requires_grad_() for k, v in history[s][n].items()}
            for s in range(len(stages))
            for n in [version_of(kind, m, s, replicas)]
        ]
        flowing = x
        for stage, weights in zip(stages, used, strict=True):
            flowing = torch.func.functional_call(stage, weights, (flowing,))
        flat = [value for weights in used for value in weights.values()]
        grads = iter(torch.autograd.grad(loss_of(flowing, y), flat))
        for s, weights in enumerate(used):
            sums[s].append({k: next(grads) for k in weights})
            every = 4 if kind == "2bw" else replicas[s]
            if len(sums[s]) < every and m + 1 < total:
                continue
            mean = {k: torch.stack([g[k] for g in sums[s]]).mean(0) for k in weights}
            lr = LR if kind == "2bw" else LR * replicas[s] / replicas[0]
            new = optimizer_step(optimizer, lr, len(history[s]), history[s][-1], mean, memories[s])
            history[s].append(new)
            sums[s] = []
    return history


# ----- the machines


class Pipes(PipelineWorld):
    """A pipeline that keeps every version of the weights of its stages."""

    def __init__(
        self,
        versions: Callable[[Place], Stash],
        replicas: tuple[int, ...],
        optimizer: str,
        stages: list[nn.Module] | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss_of,
    ) -> None:
        def make(place: Place, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return OPTIMIZERS[optimizer](parameters, LR * versions(place).rate)

        super().__init__(stages or make_stages(len(replicas)), versions, replicas, make, loss)
        self.history = [[self._weights(stage)] for stage in range(len(replicas))]
        self.after_update = lambda stage, _: self.history[stage].append(self._weights(stage))

    def _weights(self, stage: int) -> State:
        module = self.modules[self.group(stage)[0]]
        return {k: p.detach().clone() for k, p in module.named_parameters()}


def flat(versions: list[State]) -> torch.Tensor:
    return torch.cat([value.flatten() for weights in versions for value in weights.values()])


def assert_equal(found: list[list[State]], expected: list[list[State]]) -> None:
    assert [len(stage) for stage in found] == [len(stage) for stage in expected]
    for own, stage in zip(found, expected, strict=True):
        assert [[*weights] for weights in own] == [[*weights] for weights in stage]
        torch.testing.assert_close(flat(own), flat(stage), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("replicas", "optimizer"),
    [*((shape, "sgd") for shape in SHAPES), *((shape, "adam") for shape in WITH_ADAM)],
    ids=str,
)
@pytest.mark.parametrize("kind", VERSIONS)
def test_every_version_of_every_stage_is_that_of_the_formulas(
    kind: str, replicas: tuple[int, ...], optimizer: str
) -> None:
    if kind == "2bw" and replicas == (2, 2, 2, 2):
        with pytest.raises(ConfigError, match="2bw sums 4 minibatches"):
            Pipes(VERSIONS[kind], replicas, optimizer)
        return
    pipes = Pipes(VERSIONS[kind], replicas, optimizer)
    pipes.run(data(), seed=len(replicas))
    assert_equal(pipes.history, oracle(kind, replicas, optimizer, BATCHES))
    assert not pipes.messages
    for place, replica, most in zip(pipes.places, pipes.replicas, pipes.most_flying, strict=True):
        assert most <= place.depth()
        # Vertical sync: the first stage's versions, and those of updates that it has not used yet.
        behind = -(-(place.depth(0) + 1) * replicas[0] // place.num_replicas) + 1
        limit = {"stash": place.depth() + 1, "vertical": behind, "2bw": 2}[kind]
        assert replica.ring.most <= limit


@pytest.mark.parametrize("replicas", [(1,), (2,), (2, 1), (1, 2), (2, 2), (2, 2, 1), (4, 2)])
@pytest.mark.parametrize("total", [*range(1, 8), 9, 38, 39])
def test_the_last_update_is_the_mean_of_its_minibatches(
    replicas: tuple[int, ...], total: int
) -> None:
    """Of an update of 4 minibatches there may be 1 to 3: two on one replica, one on another."""
    for seed in range(3):
        pipes = Pipes(VERSIONS["2bw"], replicas, "sgd")
        pipes.run(data(total), seed)
        assert_equal(pipes.history, oracle("2bw", replicas, "sgd", total))


@pytest.mark.parametrize("kind", VERSIONS)
@pytest.mark.parametrize("total", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (2, 2, 1)])
def test_few_minibatches_are_trained_on_as_the_formulas_say(
    kind: str, total: int, replicas: tuple[int, ...]
) -> None:
    if kind == "2bw" and 4 % replicas[0]:
        return
    pipes = Pipes(VERSIONS[kind], replicas, "sgd")
    pipes.run(data(total), seed=total)
    assert_equal(pipes.history, oracle(kind, replicas, "sgd", total))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_messages_changes_nothing(seed: int) -> None:
    pipes = Pipes(Stash, (2, 2, 1), "sgd")
    pipes.run(data(), seed)
    assert_equal(pipes.history, oracle("stash", (2, 2, 1), "sgd", BATCHES))


def test_the_last_round_holds_the_minibatches_that_there_are() -> None:
    pipes = Pipes(Stash, (2, 1), "sgd")
    pipes.run(data(9))
    assert_equal(pipes.history, oracle("stash", (2, 1), "sgd", 9))


def test_one_stage_is_one_process() -> None:
    pipes = Pipes(Stash, (1,), "sgd")
    pipes.run(data())
    model = make_stages(1)[0]
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()), LR)
    for x, y in data():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model(x), y))
        optimizer.step()
    for found, expected in zip(pipes.modules[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


# ----- by hand


class Power(nn.Module):
    def __init__(self, power: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.power = power

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w**self.power * inputs


class Unstashed(Stash):
    """The newest version at the forward, and another one at the backward: to show the harm."""

    in_place = True


def scalar_run(versions: Callable[[Place], Stash], power: int) -> tuple[list[float], list[float]]:
    """Returns the weights of two stages with y = w1 w0^power, loss y, lr 0.1, without momentum."""
    pipes = Pipes(versions, (1, 1), "sgd", [Power(power), Power(1)], lambda y, _: y.sum())
    for optimizer in pipes.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.0
    pipes.run([(torch.ones(1, dtype=torch.float64), None)] * 3)
    first, second = ([float(w["w"]) for w in stage] for stage in pipes.history)
    return first, second


def test_the_first_steps_by_hand() -> None:
    # m 0 at versions 0, 0: g0 = 1, g1 = 1. m 1 at 0, 1: y = 0.9, g1 = 1, g0 = 0.9. m 2 at 1, 2:
    # w0 = 0.9, w1 = 0.8: g1 = 0.9, g0 = 0.8.
    first, second = scalar_run(Stash, 1)
    assert first == pytest.approx([1, 0.9, 0.81, 0.73])
    assert second == pytest.approx([1, 0.9, 0.8, 0.71])


def test_without_stashing_a_backward_is_the_gradient_of_nothing() -> None:
    # y = w1 w0^2. m 0: g0 = 2. m 1 forward at w0 = 1, w1 = 0.9, backward: stashed 2 x 1 x 0.9 =
    # 1.8; unstashed the factor 2 w0 is taken at w0 = 0.8: 1.44.
    stashed, _ = scalar_run(Stash, 2)
    broken, _ = scalar_run(Unstashed, 2)
    assert stashed[:3] == pytest.approx([1, 0.8, 0.62])
    assert broken[:3] == pytest.approx([1, 0.8, 0.656])


def test_depths_are_those_of_the_released_schedule() -> None:
    def depths(*replicas: int) -> list[int]:
        return [Place(s, 0, replicas).depth() for s in range(len(replicas))]

    assert depths(1, 1, 1, 1) == [3, 2, 1, 0]
    assert depths(15, 1) == [1, 0]
    assert depths(3, 1) == [1, 0]
    assert depths(2, 1, 1) == [1, 1, 0]


def test_ranks_follow_the_stages() -> None:
    places = [Place.of_rank(rank, (2, 1)) for rank in range(3)]
    assert [(p.stage, p.replica) for p in places] == [(0, 0), (0, 1), (1, 0)]
    assert [places[0].has(m) for m in range(4)] == [True, False, True, False]
    assert [places[2].rank_at(-1, m) for m in range(4)] == [0, 1, 0, 1]
    assert places[0].rank_at(1, 2) == 2
    with pytest.raises(ConfigError, match="rank 3 in a pipeline of 3 workers"):
        Place.of_rank(3, (2, 1))


def test_a_minibatch_out_of_turn_is_refused() -> None:
    order = Order(Stash(Place(0, 1, (2,))))
    assert order.begin(1) == 0
    with pytest.raises(ConfigError, match="minibatch 5 came, 3 is the next one here"):
        order.begin(5)


@pytest.mark.parametrize("moves", [True, False])
def test_memory_is_written_again_only_when_it_is_free(moves: bool) -> None:
    value = nn.Parameter(torch.zeros(2))
    ring = WeightRing([value], moves=moves)
    held = ring.weights(0)[0]
    for version in range(1, 6):
        ring.update(max(0, version - 2))
        with torch.no_grad():
            value.add_(1)
        ring.add(version)
    found = [ring.weights(v)[0] for v in (3, 4, 5)]
    assert [weights.detach()[0].item() for weights in found] == [3, 4, 5]
    assert ring.most == ring.held == (3 if moves else 4)
    assert len({weights.data_ptr() for weights in (*found, value)}) == ring.held
    assert held.data_ptr() in {weights.data_ptr() for weights in found}


def test_a_version_that_is_not_used_any_more_needs_no_copy() -> None:
    value = nn.Parameter(torch.zeros(2))
    ring = WeightRing([value])
    place = value.data_ptr()
    for version in range(1, 4):
        ring.update(version)
        with torch.no_grad():
            value.add_(1)
        ring.add(version)
    assert (ring.most, value.data_ptr()) == (1, place)
    assert ring.weights(3)[0].data_ptr() == place
