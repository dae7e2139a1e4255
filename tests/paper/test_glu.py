"""GLU as released, equation by equation in exact numbers, and against a model in float64."""

import numpy as np
import pytest
import torch

from pscore.local.glu import GLU
from pscore.local.sgd import PlainSGD
from pscore.rules import parse_mode
from tests.paper.quadratic import make_part, median_objective, rebase

# lr 1/2, no momentum, weight decay 1/4: one step keeps 7/8 of a weight.
HYPER = [0.5, 0.0, 0.0, 0.25, 0.0, 0.0]


def test_the_first_local_step_knows_of_no_way_but_the_weight_decay() -> None:
    part = make_part(HYPER, 1)
    rebase(GLU(divisor=0.5), part, [1.0], version=7)
    GLU(divisor=0.5).update(part, torch.tensor([0.5]))
    # p = w = 1: sync = (7/8 - 1) / (1/2) = -1/4; 1 - 1/2 * (2 * 1/2 + 1/2 * -1/4 + 1/4 * 1).
    assert part.weights.tolist() == [1.0 - 0.5 * 1.125]
    assert part.state["weights_before"].tolist() == [1.0]


def test_between_pulls_the_way_is_that_of_the_local_step_before() -> None:
    part, glu = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1), GLU(divisor=0.5)
    rebase(glu, part, [1.0], version=1)
    glu.update(part, torch.tensor([0.5]))
    assert part.weights.tolist() == [0.5]
    glu.update(part, torch.tensor([0.25]))
    # p = 1, w = 1/2: sync = 1; 1/2 - 1/2 * (2 * 1/4 + 1/2 * 1).
    assert part.weights.tolist() == [0.0]
    assert part.state["weights_before"].tolist() == [0.5]


def test_after_a_pull_the_way_leads_to_the_global_weights_from_before_the_last_step() -> None:
    part, glu = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1), GLU(divisor=0.5)
    rebase(glu, part, [1.0], version=1)
    glu.update(part, torch.tensor([0.5]))
    rebase(glu, part, [0.25], version=2)
    assert part.weights.tolist() == [0.25]
    glu.update(part, torch.tensor([0.25]))
    # p = 1, not the 1/2 that the step has made of it: sync = (1 - 1/4) / (1/2) = 3/2.
    assert part.weights.tolist() == [0.25 - 0.5 * (0.5 + 0.75)]


def test_the_divisor_is_k_times_the_largest_rate_so_far_and_follows_no_schedule() -> None:
    part, glu = make_part([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1), GLU(lr_scale=0.5, steps=4)
    for rate, wanted in ((0.0, 0.0), (0.25, 2.0), (1.0, 0.5), (0.125, 0.5)):
        part.hyper = np.array([[rate, 0.0, 0.0, 0.0, 0.0, 0.0]])
        assert glu.inverse(part, 0) == wanted
    assert GLU(divisor=8.0, steps=4).inverse(part, 0) == 0.125


def test_the_rate_is_that_of_the_group_and_k_that_of_the_mode() -> None:
    assert parse_mode("ssd(steps=7, local=glu)").local_update().steps == 7
    assert parse_mode("ssd(steps=7, local=glu, divisor=8)").local_update().divisor == 8.0
    assert parse_mode("od(local=glu)").local_update().steps == 1
    assert parse_mode("cd(local=glu, steps=5)").local_update().steps == 1  # Its pulls are od's.


def test_the_local_rate_rises_over_the_first_local_steps() -> None:
    part, glu = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1), GLU(beta=0.0, local_warmup=2)
    for moved in (0.25, 0.5, 0.5):
        rebase(glu, part, [1.0], version=part.version + 1)
        glu.update(part, torch.tensor([0.5]))
        part.num_made += 1  # As the replica counts.
        assert part.weights.tolist() == [1.0 - moved]


def test_maximize_turns_the_own_gradient_only() -> None:
    part, glu = make_part([0.5, 0.0, 0.0, 0.0, 0.0, 1.0], 1), GLU(divisor=0.5)
    rebase(glu, part, [1.0], version=1)
    glu.update(part, torch.tensor([0.5]))
    assert part.weights.tolist() == [1.5]
    glu.update(part, torch.tensor([0.5]))
    # p = 1, w = 3/2: sync = -1; 3/2 - 1/2 * (2 * -1/2 + 1/2 * -1).
    assert part.weights.tolist() == [2.25]


@pytest.mark.parametrize("divisor", [0.0, 8.0])
def test_it_follows_the_released_formula_for_200_steps(divisor: float) -> None:
    """V1 in the table of released forms, in float64, over pulls and a falling rate."""
    rng, k = np.random.default_rng(3), 5
    part, glu = make_part(HYPER, 6), GLU(divisor=divisor, steps=k)
    w = rng.standard_normal(6)
    rebase(glu, part, w.tolist(), version=0)
    w = p = part.weights.numpy().astype(np.float64)
    for step in range(200):
        lr, wd = 0.1 * 0.99**step, 0.01
        part.hyper = np.array([[lr, 0.9, 0.0, wd, 0.0, 0.0]])
        if step % k == k - 1:
            pulled = (w + 0.1 * rng.standard_normal(6)).astype(np.float32)
            rebase(glu, part, pulled.tolist(), version=step)
            w = pulled.astype(np.float64)
        g = rng.standard_normal(6).astype(np.float32)
        glu.update(part, torch.from_numpy(g))
        grad_sync = ((1 - lr * wd) * p - w) / (divisor or k * 0.1)
        p, w = w, w - lr * (2.0 * g + 0.5 * grad_sync + wd * w)
        np.testing.assert_allclose(part.weights.numpy(), w, rtol=1e-5, atol=2e-5)


def test_it_stays_near_ssgd_where_plain_local_steps_diverge_and_fails_more_gently() -> None:
    """Noisy quadratic, momentum 0.9 on the shard: at k=8 both forms of GLU are lost."""
    ssgd = median_objective(1, 0.9, None)
    assert median_objective(5, 0.9, GLU(steps=5)) == pytest.approx(ssgd, rel=0.2)
    assert median_objective(5, 0.9, PlainSGD()) > 10 * ssgd
    assert 10 * ssgd < median_objective(8, 0.9, GLU(steps=8)) < 100 * ssgd
