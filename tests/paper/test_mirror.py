"""Mirror: Paceline's own local update, in numbers worked by hand and in its limits."""

import numpy as np
import pytest
import torch

from pscore.local import LocalSlice
from pscore.local.mirror import Mirror
from pscore.optimizers import OPTIMIZERS
from pscore.optimizers.base import SliceStep
from tests.paper.quadratic import make_part, median_objective, rebase

# lr 1/2, momentum 1/2.
HYPER = [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def seeded(local: Mirror) -> LocalSlice:
    """A worker that has pulled W = 1 with momentum V = 1/2."""
    part = make_part(HYPER, 1)
    local.rebase(part, torch.tensor([1.0]), [torch.tensor([0.5])], 4)
    part.version = 4
    part.counts[:] = 4
    return part


@pytest.mark.parametrize("form", ["exact", "kept"])
def test_local_steps_continue_from_the_momentum_of_the_shard(form: str) -> None:
    local = Mirror(form)
    part = seeded(local)
    local.update(part, torch.tensor([0.25]))  # V = 1/4 + 1/4 = 1/2; w = 1 - 1/4.
    assert (part.weights.tolist(), part.state["momentum_buffer"].tolist()) == ([0.75], [0.5])
    local.update(part, torch.tensor([0.0]))  # V = 1/4; w = 3/4 - 1/8.
    assert (part.weights.tolist(), part.state["momentum_buffer"].tolist()) == ([0.625], [0.25])
    assert part.counts.tolist() == [6]


def test_a_pull_with_state_replaces_the_momentum() -> None:
    local = Mirror("exact")
    part = seeded(local)
    local.update(part, torch.tensor([0.25]))
    local.rebase(part, torch.tensor([2.0]), [torch.tensor([1.0])], 6)
    local.update(part, torch.tensor([0.5]))  # V = 1/2 + 1/2; w = 2 - 1/2.
    assert part.weights.tolist() == [1.5]


def test_a_pull_without_state_keeps_the_momentum() -> None:
    local = Mirror("kept")
    part = seeded(local)
    local.update(part, torch.tensor([0.75]))  # V = 1/4 + 3/4 = 1.
    rebase(local, part, [2.0], 6)
    local.update(part, torch.tensor([0.0]))  # V = 1/2; w = 2 - 1/4.
    assert part.weights.tolist() == [1.75]


def test_pulled_weights_are_copied() -> None:
    local = Mirror()
    part = make_part(HYPER, 1)
    weights, state = torch.tensor([1.0]), torch.tensor([0.5])
    local.rebase(part, weights, [state], 1)
    weights.fill_(9.0)
    state.fill_(9.0)
    assert (part.weights.tolist(), part.state["momentum_buffer"].tolist()) == ([1.0], [0.5])


def test_kept_asks_for_state_at_the_end_of_the_warm_up_only() -> None:
    kept, exact = Mirror("kept"), Mirror("exact")
    assert (kept.pulls_state, exact.pulls_state) == (False, True)
    assert [kept.wants_state(last_of_warmup=last) for last in (False, True)] == [False, True]
    assert [exact.wants_state(last_of_warmup=last) for last in (False, True)] == [True, True]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("sgd", HYPER),
        ("sgd", [0.1, 0.9, 0.0, 0.01, 1.0, 0.0]),
        ("adam", [0.1, 0.9, 0.99, 1e-8, 0.01, 0.0]),
        ("adamw", [0.1, 0.9, 0.99, 1e-8, 0.01, 0.0]),
    ],
)
def test_a_worker_alone_makes_the_steps_of_the_shard(name: str, row: list[float]) -> None:
    """With one worker its gradient is the mean, so that both make the same steps, bit for bit."""
    part = make_part(row, 33)
    part.optimizer = OPTIMIZERS[name]()
    local = Mirror()
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(33, np.float32)
    state = [np.zeros(33, np.float32) for _ in part.optimizer.state_names]
    counts = np.zeros(1, np.int64)
    local.rebase(part, torch.from_numpy(weights.copy()), [], 0)
    for _ in range(10):
        grad = rng.standard_normal(33, np.float32)
        out = np.empty_like(weights)
        part.optimizer.step(
            SliceStep(
                weights, out, grad, 1.0, state, part.segments, counts, part.active, part.hyper
            )
        )
        weights = out
        local.update(part, torch.from_numpy(grad))
    np.testing.assert_array_equal(part.weights.numpy(), weights)


@pytest.mark.parametrize("form", ["exact", "kept"])
@pytest.mark.parametrize("steps", [5, 32])
def test_mirror_stays_at_ssgd_where_glu_has_long_diverged(form: str, steps: int) -> None:
    reached = median_objective(1, 0.9, None)
    assert median_objective(steps, 0.9, Mirror(form)) == pytest.approx(reached, rel=0.01)
