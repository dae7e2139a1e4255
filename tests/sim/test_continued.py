"""Pipelines whose workers die at every point: each slice of each stage counts a minibatch once."""

import pytest

from psworker.pipeline.run import members
from tests.sim.continuing_world import ContinuedWorld, Kill, draw, find_failure

pytestmark = pytest.mark.usefixtures("no_sleep")
REPLICAS, MINIBATCHES = (2, 1), 3


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time does not pass in this world."""
    monkeypatch.setattr(members, "LOOK_S", 0.0)


def test_an_undisturbed_run_counts_each_once() -> None:
    ContinuedWorld(REPLICAS, MINIBATCHES, 0, []).run()


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("replicas", "every"), [(REPLICAS, 1), ((1, 1, 1), 3)], ids=str)
def test_a_worker_may_be_killed_at_every_point(
    replicas: tuple[int, ...], every: int, rank: int
) -> None:
    calm = ContinuedWorld(replicas, MINIBATCHES, rank, [])
    calm.run()
    for at in range(1, calm.num_actions, every):
        ContinuedWorld(replicas, MINIBATCHES, rank, [Kill(at=at, rank=rank)]).run()


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("replicas", "every"), [(REPLICAS, 1), ((1, 1, 1), 3)], ids=str)
def test_a_worker_may_be_stopped_until_it_is_lost_at_every_point(
    replicas: tuple[int, ...], every: int, rank: int
) -> None:
    """It rejoins where it was: in a step, while it saves, or at the end."""
    calm = ContinuedWorld(replicas, MINIBATCHES, rank, [])
    calm.run()
    for at in range(1, calm.num_actions, every):
        stop = Kill(at=at, rank=rank, is_stop=True)
        ContinuedWorld(replicas, MINIBATCHES, rank, [stop]).run()


@pytest.mark.slow
def test_the_other_replica_goes_on_without_one_that_never_returns() -> None:
    calm = ContinuedWorld((2, 1), 4, 5, [])
    calm.run()
    for at in range(1, calm.num_actions, 3):
        ContinuedWorld((2, 1), 4, 5, [Kill(at=at, rank=0, returns=False)]).run()


@pytest.mark.slow
def test_several_deaths_at_drawn_points() -> None:
    assert [found for found in map(find_failure, range(100)) if found] == []


@pytest.mark.slow
def test_several_workers_are_killed_or_stopped_at_drawn_points() -> None:
    found = [find_failure(seed, stops=True) for seed in [*range(60), 92, 124, 355]]
    assert [one for one in found if one] == []


@pytest.mark.parametrize("seed", [138, 210, 214, 265])
def test_deaths_while_a_checkpoint_is_saved(seed: int) -> None:
    assert find_failure(seed) == ""


def test_a_seed_gives_the_same_run() -> None:
    first, second = draw(7), draw(7)
    first.run()
    second.run()
    assert first.num_actions == second.num_actions
