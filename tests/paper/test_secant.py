"""The secant, equation by equation, in numbers that binary fractions hold exactly."""

import numpy as np
import pytest
import torch

from pscore.local.secant import Secant, passed
from pscore.local.sgd import PlainSGD
from tests.paper.quadratic import make_part, median_objective, rebase

# lr 1/2, no momentum, weight decay 1/4: one step keeps 7/8 of a weight.
HYPER = [0.5, 0.0, 0.0, 0.25, 0.0, 0.0]


def test_the_first_pull_tells_of_no_global_update() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=7)
    assert part.weights.tolist() == [1.0]
    assert part.state["grad_sync"].tolist() == [0.0]
    assert part.state["weights_old"].tolist() == [1.0]


def test_two_pulls_give_the_gradient_of_the_sgd_step_between_them() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=0)
    # The shard, with mean gradient 3/4: 1 - 1/2 * (3/4 + 1/4 * 1) = 1/2.
    rebase(Secant(), part, [0.5], version=1)
    assert part.state["grad_sync"].tolist() == [0.75]
    assert (part.weights.tolist(), part.state["weights_old"].tolist()) == ([0.5], [0.5])


def test_several_updates_between_two_pulls_give_their_mean() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [0.5], version=1)
    # k = 2: ((7/8)^2 * 1/2 - 1/4) / (2 * 1/2) = 49/128 - 32/128.
    rebase(Secant(), part, [0.25], version=3)
    assert part.state["grad_sync"].tolist() == [17 / 128]


def test_a_rate_that_drops_between_two_pulls_does_not_stretch_the_direction() -> None:
    """Three updates with the rates 1/2, 1/2 and 1/4; the pull lands when it is 1/8."""
    part = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    rebase(Secant(), part, [1.0], version=4)
    for rate in (0.5, 0.5, 0.25):
        part.hyper = np.array([[rate, 0.0, 0.0, 0.0, 0.0, 0.0]])
        part.past.append(part.hyper)  # As the replica does.
    part.hyper = np.array([[0.125, 0.0, 0.0, 0.0, 0.0, 0.0]])
    rebase(Secant(), part, [1.0 - 1.25 * 0.75], version=7)
    assert part.state["grad_sync"].tolist() == [0.75]


def test_the_newest_rates_count_and_what_is_not_known_counts_with_the_present_one() -> None:
    rates = [[rate, 0.0, 0.0, decay, 0.0, 0.0] for rate, decay in ((8.0, 0.0), (0.5, 0.25))]
    part = make_part([0.25, 0.0, 0.0, 0.5, 0.0, 0.0], 1)
    part.past = [np.array([row]) for row in rates]
    for num_updates, shrink, total in ((1, 7 / 8, 0.5), (2, 7 / 8, 8.5), (3, 49 / 64, 8.75)):
        shrinks, inverse = passed(part, num_updates)
        assert shrinks.tolist() == [shrink]
        assert inverse.tolist() == [np.float32(1 / total)]


def test_the_local_step_adds_its_own_gradient_the_global_one_and_weight_decay() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=0)
    rebase(Secant(), part, [0.5], version=1)
    Secant().update(part, torch.tensor([0.5]))
    # 1/2 - 1/2 * (2 * 1/2 + 1/2 * 3/4 + 1/4 * 1/2) = 1/2 - 1/2 * 3/2.
    assert part.weights.tolist() == [-0.25]
    Secant(alpha=1.0, beta=2.0, lr_scale=0.5).update(part, torch.tensor([0.5]))
    # -1/4 - 1/4 * (1 * 1/2 + 2 * 3/4 - 1/4 * 1/4) = -1/4 - 1/4 * 31/16.
    assert part.weights.tolist() == [-0.25 - 31 / 64]
    assert part.state["grad_sync"].tolist() == [0.75]


def test_the_local_rate_rises_over_the_first_local_steps_whatever_is_pulled_meanwhile() -> None:
    """local_warmup = 2: half a step, then whole ones; a pull in between does not start over."""
    part, glu = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1), Secant(beta=0.0, local_warmup=2)
    rebase(glu, part, [1.0], version=0)
    for pulled, moved in ((1.0, 0.25), (1.0, 0.5), (2.0, 0.5)):
        rebase(glu, part, [pulled], version=part.version + 1)
        glu.update(part, torch.tensor([0.5]))
        part.num_made += 1  # As the replica counts.
        assert part.weights.tolist() == [pulled - moved]


def test_maximize_turns_the_own_gradient_only() -> None:
    part = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 1.0], 1)
    rebase(Secant(), part, [1.0], version=0)
    rebase(Secant(), part, [1.5], version=1)  # Upwards already: G_sync = (1 - 3/2) / (1/2) = -1.
    Secant().update(part, torch.tensor([0.5]))
    # 3/2 - 1/2 * (2 * -1/2 + 1/2 * -1) = 3/2 + 3/4.
    assert part.weights.tolist() == [2.25]


def test_a_learning_rate_of_zero_tells_of_no_global_update() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=0)
    rebase(Secant(), part, [0.5], version=1)
    part.hyper = part.hyper * 0.0
    rebase(Secant(), part, [0.25], version=2)
    assert part.state["grad_sync"].tolist() == [0.0]
    assert part.state["weights_old"].tolist() == [0.25]


def test_the_same_version_again_leaves_the_global_update() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=0)
    rebase(Secant(), part, [0.5], version=1)
    part.weights.fill_(9.0)
    rebase(Secant(), part, [0.5], version=1)
    assert (part.weights.tolist(), part.state["grad_sync"].tolist()) == ([0.5], [0.75])


def test_a_version_that_goes_back_tells_of_no_global_update() -> None:
    part = make_part(HYPER, 1)
    rebase(Secant(), part, [1.0], version=5)
    rebase(Secant(), part, [0.5], version=6)
    rebase(Secant(), part, [0.25], version=2)
    assert part.state["grad_sync"].tolist() == [0.0]


def test_with_momentum_on_the_shard_a_steady_gradient_counts_several_times() -> None:
    """1 / (1 - momentum) times: the basis of alpha=2, beta=0.5."""
    part = make_part([0.5, 0.5, 0.0, 0.0, 0.0, 0.0], 1)
    weight, velocity = 0.0, 2.0  # Of a gradient of 1, after long: v = v / 2 + 1.
    rebase(Secant(), part, [weight], version=0)
    for _ in range(5):
        velocity = velocity / 2 + 1.0
        weight -= 0.5 * velocity
    rebase(Secant(), part, [weight], version=5)
    assert part.state["grad_sync"].tolist() == pytest.approx([2.0], rel=1e-6)


@pytest.fixture(scope="module")
def ssgd() -> float:
    return median_objective(1, 0.9, None)


def test_secant_stays_near_ssgd_where_plain_local_steps_diverge(ssgd: float) -> None:
    assert ssgd == pytest.approx(0.167, rel=0.01)
    assert median_objective(5, 0.9, Secant()) == pytest.approx(ssgd, rel=0.2)
    assert median_objective(5, 0.9, PlainSGD()) > 10 * ssgd


def test_secant_without_its_global_term_is_worse(ssgd: float) -> None:
    assert median_objective(5, 0.9, Secant(beta=0.0)) > 1.3 * ssgd


def test_secant_diverges_from_eight_steps_on(ssgd: float) -> None:
    assert median_objective(8, 0.9, Secant()) > 100 * ssgd


def test_without_momentum_on_the_shard_nothing_diverges() -> None:
    reached = median_objective(1, 0.0, None)
    assert median_objective(8, 0.0, PlainSGD()) == pytest.approx(reached, rel=0.05)
    assert median_objective(8, 0.0, Secant()) == pytest.approx(reached, rel=0.05)
