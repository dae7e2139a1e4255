"""The run of a pipeline's schedule on paper, against numbers worked out by hand."""

import pytest

from psworker.pipeline.plan.costs import ShardsCost
from psworker.pipeline.plan.partition import Level, MemoryLimit, Partition, Stage
from psworker.pipeline.plan.profile import Layer
from psworker.pipeline.plan.timing import PAYLOAD, Flow, Links, Run, fastest

LINK = 1 / PAYLOAD  # A byte of payload a second.


def layer(compute: float, output: int = 0, weights: int = 0) -> Layer:
    return Layer(
        name=f"{compute} {output} {weights}",
        forward_s=compute / 3,
        backward_s=compute * 2 / 3,
        output_nbytes=output,
        held_nbytes=0,
        parameter_nbytes=weights,
    )


def stages(*replicas: int) -> Partition:
    return Partition(
        tuple(
            Stage(first=n, last=n, replicas=m, in_flight=1, memory_nbytes=0)
            for n, m in enumerate(replicas)
        ),
        0.0,
    )


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (0, 3),  # Only computing.
        # Two minibatches are in flight, and each is computed at both stages and sent twice.
        (1, (3 + 3 + 2 * 1) / 2),
        (5, (3 + 3 + 2 * 5) / 2),
    ],
)
def test_two_stages_wait_for_minibatches_under_way(transfer: int, expected: float) -> None:
    layers = [layer(3, transfer, 1), layer(3, 0, 1)]
    run = Run(layers, stages(1, 1), ShardsCost(num_shards=2, on_workers=True), LINK, 2)
    assert run.minibatch_s() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hides", "expected"),
    [
        # Two replicas push 8 bytes each over one shard's link in 16 s; the last of four parts is
        # pulled by both in 4 s behind it. Then two minibatches are over.
        (False, (10 + 16 + 4) / 2),
        (True, (16 + 4) / 2),
    ],
)
def test_replicas_share_the_link_of_their_shard(hides: bool, expected: float) -> None:
    cost = ShardsCost(num_shards=1, hides=hides)
    run = Run([layer(10, 0, 8)], stages(2), cost, LINK, 2)
    assert run.minibatch_s() == pytest.approx(expected)


def test_a_shard_beside_its_worker_needs_no_link() -> None:
    cost = ShardsCost(num_shards=2, hides=False, on_workers=True)
    # A host sends half of its 8 bytes to the other's shard, and its shard sends half to the other.
    run = Run([layer(10, 0, 8)], stages(2), cost, LINK, 2)
    assert run.minibatch_s() == pytest.approx((10 + 4 + 4) / 2)


def test_flows_on_one_link_share_it_and_the_other_half_is_free_at_the_end_of_one() -> None:
    links = Links(2, LINK)
    short, long = (Flow(left, {0: 1.0, 3: 1.0}, 1, lambda: None) for left in (10.0, 20.0))
    for flow in (short, long):
        links.add(flow)
    links.share()
    assert (short.rate, long.rate) == pytest.approx((0.5, 0.5))
    assert links.next_s() == pytest.approx(20)
    assert links.advance(20) == [short]
    links.share()
    assert links.next_s() == pytest.approx(10)


def test_rates_are_max_min_fair() -> None:
    links = Links(3, LINK)
    # Host 0 sends to hosts 1 and 2, which has a second sender with three connections.
    first = Flow(1, {0: 1.0, 3: 1.0}, 1, lambda: None)
    second = Flow(1, {0: 1.0, 5: 1.0}, 1, lambda: None)
    third = Flow(1, {2: 1.0, 5: 1.0}, 3, lambda: None)
    for flow in (first, second, third):
        links.add(flow)
    links.share()
    assert (first.rate, second.rate, third.rate) == pytest.approx((0.75, 0.25, 0.75))


def test_the_fastest_pipeline_is_one_that_was_timed() -> None:
    layers = [layer(10, 1, 1), layer(10, 1, 1), layer(10, 0, 1000)]
    cost = ShardsCost(num_shards=3, on_workers=True)
    found = fastest(layers, Level(3, LINK), cost, MemoryLimit())
    assert found is not None
    assert found.stages[-1].replicas == 1  # 1000 bytes of weights are not sent.
    assert found.seconds == Run(layers, found, cost, LINK, 3).minibatch_s()
    assert fastest(layers[:1], Level(3, LINK), cost, MemoryLimit()) is None
