"""The partition of a model into stages: against brute force, and PipeDream's released plans.

`profiles/` holds the profiles of VGG-16 and ResNet-50 that PipeDream's authors measured and
released: layers, milliseconds and bytes from `profiler/image_classification/profiles/*/graph.txt`
of https://github.com/msr-fiddle/pipedream (MIT), commit 11c40c0, without the loading of images.
Each block of ResNet-50 is one layer, because a cut inside would cut its shortcut too.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.errors import ConfigError
from psworker.pipeline.plan.costs import Cost, RingCost, ShardsCost, StageLoad
from psworker.pipeline.plan.partition import (
    Level,
    MemoryLimit,
    Partition,
    Partitioner,
    in_flight,
    with_idle,
)
from psworker.pipeline.plan.profile import Layer, Profile, read_profile
from psworker.pipeline.plan.verdict import compare

PROFILES = Path(__file__).parent / "profiles"
GBIT = 1e9 / 8


def profile(model: str) -> Profile:
    path = PROFILES / f"{model}.json"
    return read_profile(path.read_text(encoding="utf-8"), path.name)


def layer(
    number: int, compute: float, output: float = 0, weights: float = 0, update: float = 0
) -> Layer:
    return Layer(
        name=f"layer{number}",
        forward_s=compute / 3,
        backward_s=compute * 2 / 3,
        output_nbytes=int(output),
        held_nbytes=int(2 * output),
        parameter_nbytes=int(weights),
        update_s=update,
    )


# ----- an independent search


def plans(num_layers: int, workers: int) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yields all cuts (first layers of stages) and numbers of replicas on all workers."""
    for stages in range(1, min(num_layers, workers) + 1):
        for cuts in itertools.combinations(range(1, num_layers), stages - 1):
            for replicas in itertools.product(range(1, workers + 1), repeat=stages):
                if sum(replicas) == workers:
                    yield [0, *cuts, num_layers], replicas


def brute_force(layers: list[Layer], workers: int, link: float, cost: str, limit: float) -> float:
    """Returns the time of the best plan of one level, with the formulas written anew."""
    best = math.inf
    for cuts, replicas in plans(len(layers), workers):
        slowest = 0.0
        for number, m in enumerate(replicas):
            own = layers[cuts[number] : cuts[number + 1]]
            compute = sum(item.forward_s + item.backward_s for item in own)
            w = sum(item.parameter_nbytes for item in own)
            a_in = layers[cuts[number] - 1].output_nbytes if number else 0
            a_out = own[-1].output_nbytes if number + 1 < len(replicas) else 0
            depth = (workers - 1 - sum(replicas[:number])) // m  # w_s; one version more.
            held = sum(item.held_nbytes for item in own)
            is_idle = not w and len(own) < len(layers)  # A stage without anything to train.
            others = w if m == 1 else (2 + (depth > 0)) * w  # Gradients, and the place of pulls.
            if is_idle or (depth + 1) * (w + held) + others > limit:
                slowest = math.inf
                break
            if cost == "ring":
                sync = 4 * (m - 1) * w / (link * m)
                seconds = max(compute + sync, 2 * a_in / link, 2 * a_out / link) / m
            else:
                sync = w / link if m > 1 else 0.0
                compute += sum(item.update_s for item in own) if m == 1 else 0.0
                busy = compute + 2 * sync if cost == "blocking" else compute
                seconds = max(busy, sync + (a_in + a_out) / link) / m
            slowest = max(slowest, seconds)
        best = min(best, slowest)
    return best


def cost_of(name: str, workers: int) -> Cost:
    return RingCost() if name == "ring" else ShardsCost(num_shards=workers, hides=name == "hidden")


NUMBERS = st.integers(0, 50)
LAYERS = st.lists(st.tuples(st.integers(1, 50), NUMBERS, NUMBERS), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    numbers=LAYERS,
    workers=st.integers(1, 4),
    link=st.sampled_from([0.2, 1.0, 10.0, 1e6]),
    cost=st.sampled_from(["ring", "hidden", "blocking"]),
    limit=st.sampled_from([math.inf, 200.0, 600.0]),
)
def test_no_plan_is_faster(
    numbers: list[tuple[int, int, int]], workers: int, link: float, cost: str, limit: float
) -> None:
    layers = [layer(i, c, a, w, w / 20) for i, (c, a, w) in enumerate(numbers)]
    found = Partitioner(layers, [Level(workers, link)], cost_of(cost, workers), MemoryLimit(limit))
    best = found.best()
    idle = with_idle(layers, [Level(workers, link)], cost_of(cost, workers), MemoryLimit(limit))
    fewer = [brute_force(layers, n + 1, link, cost, limit) for n in range(workers)]
    assert (math.inf if idle is None else idle.seconds) == pytest.approx(min(fewer))
    expected = fewer[-1]
    if best is None:
        assert math.isinf(expected)
        return
    assert best.seconds == pytest.approx(expected)
    assert sum(stage.replicas for stage in best.stages) == workers
    assert [stage.first for stage in best.stages[1:]] == [s.last + 1 for s in best.stages[:-1]]
    assert max(stage.memory_nbytes for stage in best.stages) <= limit
    # The plan itself takes that long, not only the cell of the table.
    assert max(
        cost_of(cost, workers).stage_s(found.load(stage)) for stage in best.stages
    ) == pytest.approx(expected)


def nested(
    layers: list[Layer], sizes: tuple[int, int], links: tuple[float, float], limit: float
) -> float:
    """Returns the best time of two levels: outer stages, and inner pipelines in each of them."""
    (inner_m, outer_m), (near, far) = sizes, links
    total = inner_m * outer_m

    def time_of(c: float, w: float, a: float, m: int, link: float) -> float:
        sync = w / link if m > 1 else 0.0
        return max(c + 2 * sync, sync + a / link) / m

    def inside(first: int, stop: int, copies: int, before: int) -> float:
        best = math.inf
        for cuts, replicas in plans(stop - first, inner_m):
            slowest, ahead = 0.0, before
            for n, m in enumerate(replicas):
                own = layers[first + cuts[n] : first + cuts[n + 1]]
                w = sum(item.parameter_nbytes for item in own)
                a = layers[first + cuts[n] - 1].output_nbytes if n else 0
                a += own[-1].output_nbytes if n + 1 < len(replicas) else 0
                depth = (total - 1 - ahead) // (m * copies) + 1
                is_idle = not w and len(own) < len(layers)
                others = w if m * copies == 1 else (2 + (depth > 1)) * w
                if is_idle or depth * (w + sum(item.held_nbytes for item in own)) + others > limit:
                    slowest = math.inf
                    break
                slowest = max(slowest, time_of(sum(i.compute_s for i in own), w, a, m, near))
                ahead += m * copies
            best = min(best, slowest)
        return best

    best = math.inf
    for cuts, replicas in plans(len(layers), outer_m):
        slowest, ahead = 0.0, 0
        for n, m in enumerate(replicas):
            own = layers[cuts[n] : cuts[n + 1]]
            a = layers[cuts[n] - 1].output_nbytes if n else 0
            a += own[-1].output_nbytes if n + 1 < len(replicas) else 0
            w = sum(item.parameter_nbytes for item in own)
            inner = inside(cuts[n], cuts[n + 1], m, ahead)
            slowest = max(slowest, time_of(inner, w, a, m, far))
            ahead += m * inner_m
        best = min(best, slowest)
    return best


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(1, 50), NUMBERS, NUMBERS), min_size=1, max_size=5),
    sizes=st.sampled_from([(2, 2), (1, 3), (3, 2), (2, 3)]),
    limit=st.sampled_from([math.inf, 300.0]),
)
def test_no_plan_of_two_levels_is_faster(
    numbers: list[tuple[int, int, int]], sizes: tuple[int, int], limit: float
) -> None:
    layers = [layer(i, c, a, w) for i, (c, a, w) in enumerate(numbers)]
    levels = [Level(sizes[0], 10.0), Level(sizes[1], 1.0)]
    cost = ShardsCost(num_shards=64, hides=False)
    best = Partitioner(layers, levels, cost, MemoryLimit(limit)).best()
    expected = nested(layers, sizes, (10.0, 1.0), limit)
    if best is None:
        assert math.isinf(expected)
        return
    assert best.seconds == pytest.approx(expected)
    assert sum(stage.replicas for stage in best.stages) == sizes[0] * sizes[1]
    assert max(stage.memory_nbytes for stage in best.stages) <= limit


# ----- PipeDream's plans


def best(model: str, workers: int, gbit: float, cost: Cost) -> Partition:
    found = Partitioner(profile(model).layers, [Level(workers, gbit * GBIT)], cost).best()
    assert found is not None
    return found


@pytest.mark.parametrize(("workers", "plan"), [(4, "3-1"), (8, "7-1"), (16, "15-1")])
def test_vgg16_at_25_gbit_gets_the_released_plans(workers: int, plan: str) -> None:
    assert best("vgg16", workers, 25, RingCost()).name == plan


def test_the_cut_of_vgg16_is_behind_the_third_pool() -> None:
    layers = profile("vgg16").layers
    assert layers[best("vgg16", 4, 25, RingCost()).stages[0].last].name == "pool3"


def test_the_profiles_are_those_of_the_models() -> None:
    vgg, resnet = profile("vgg16"), profile("resnet50")
    assert sum(item.parameter_nbytes for item in vgg.layers) == 4 * (138_357_544)
    assert sum(item.parameter_nbytes for item in resnet.layers) == 4 * 25_557_032
    # 690.5 ms with the loading of images, of 17.972 ms.
    assert sum(item.compute_s for item in vgg.layers) == pytest.approx(0.672535)


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("gbit", [2.5, 10, 25])
def test_resnet50_gets_data_parallelism(workers: int, gbit: float) -> None:
    found = compare(
        profile("resnet50"), [Level(workers, gbit * GBIT)], ShardsCost(num_shards=workers)
    )
    assert found.advised is not None
    assert found.advised.name == str(workers)
    assert not found.is_pipeline
    assert "not faster" in found.reason


@pytest.mark.parametrize("workers", [8, 16])
def test_resnet50_gains_less_than_a_tenth_in_the_released_cost(workers: int) -> None:
    assert not compare(profile("resnet50"), [Level(workers, 25 * GBIT)], RingCost()).is_pipeline


def test_hidden_traffic_leaves_a_pipeline_of_vgg16_no_gain_but_on_slow_links() -> None:
    fast, slow = (
        compare(profile("vgg16"), [Level(4, gbit * GBIT)], ShardsCost(num_shards=4))
        for gbit in (10, 1)
    )
    assert not fast.is_pipeline
    assert slow.is_pipeline
    assert slow.pipeline is not None
    assert slow.data_parallel_s / slow.pipeline.seconds > 4
    assert slow.moved_nbytes < 0.2 * slow.data_parallel_nbytes


def test_a_pipeline_that_is_no_faster_than_one_worker_is_not_advised() -> None:
    # At 100 Mbit/s all traffic costs more than it brings; the convolutions are 99 % of the time.
    found = compare(profile("vgg16"), [Level(4, GBIT / 10)], ShardsCost(num_shards=4, hides=False))
    assert found.pipeline is not None
    assert found.pipeline.workers == 2  # Two workers stay idle: four take 1-3, which is slower.
    assert found.advised is not None
    assert found.advised.name == "1"
    assert not found.is_pipeline
    assert "one worker alone takes 672.5 ms and moves nothing" in found.reason


# ----- by hand


def test_one_wide_layer_at_the_end_gets_a_worker_of_its_own() -> None:
    layers = [layer(n, 10, output=1, weights=1) for n in range(6)]
    layers.append(layer(6, 10, weights=1000))
    for workers in (2, 4, 7):
        found = Partitioner(layers, [Level(workers, 1.0)], ShardsCost(num_shards=workers)).best()
        assert found is not None
        assert found.stages[-1].replicas == 1
        assert len(found.stages) > 1


def test_a_uniform_chain_on_fast_links_is_one_stage() -> None:
    layers = [layer(n, 10, output=1, weights=1) for n in range(8)]
    found = Partitioner(layers, [Level(4, 1e12)], ShardsCost(num_shards=4)).best()
    assert found is not None
    assert found.name == "4"
    assert found.seconds == pytest.approx(20)


def test_layers_without_parameters_are_no_stage_of_their_own() -> None:
    # 10 s each: a stage of the middle one alone would make three stages of 10 s.
    layers = [
        layer(0, 10, output=1, weights=1000),
        layer(1, 10, output=1),
        layer(2, 10, weights=1000),
    ]
    found = Partitioner(layers, [Level(3, 1.0)], ShardsCost(num_shards=3)).best_pipeline()
    assert found is not None
    assert len(found.stages) == 2
    untrained = [layer(0, 10, output=1), layer(1, 10)]
    alone = Partitioner(untrained, [Level(2, 1.0)], ShardsCost(num_shards=2)).best()
    assert alone is not None
    assert alone.name == "2"


def test_the_versions_of_each_stage_are_those_of_the_schedule() -> None:
    # Without replicas S - s; in 3-1: ceil(4 / 3) = 2 of the first stage, one of the last.
    assert [in_flight(before, 1, 4) for before in range(4)] == [4, 3, 2, 1]
    assert [in_flight(0, 3, 4), in_flight(3, 1, 4)] == [2, 1]
    assert [in_flight(0, 15, 16), in_flight(15, 1, 16)] == [2, 1]


@pytest.mark.parametrize("limit", [math.inf, 8e9])
@pytest.mark.parametrize("inner", [(), (Level(2, 10 * GBIT),)])
def test_tables_of_many_workers_give_the_plans_of_few(
    limit: float, inner: tuple[Level, ...]
) -> None:
    layers, cost, memory = profile("vgg16").layers, cost_of("shards", 6), MemoryLimit(limit)
    many = Partitioner(layers, [*inner, Level(6, GBIT)], cost, memory)
    for units in (2, 5, 3, 6):
        few = Partitioner(layers, [*inner, Level(units, GBIT)], cost, memory)
        assert many.on(units).best() == few.best()
        assert many.on(units).best_pipeline() == few.best_pipeline()


def test_few_shards_are_a_limit_of_replicas() -> None:
    load = StageLoad(
        inner_s=1, parameter_nbytes=10, input_nbytes=0, output_nbytes=0, replicas=4, bandwidth=1
    )
    # Four replicas push 10 bytes each over one link of 1 byte/s: 40 s for four minibatches.
    assert ShardsCost(num_shards=1).stage_s(load) == 10
    assert ShardsCost(num_shards=4).stage_s(load) == 2.5
    assert ShardsCost(num_shards=4, hides=False).stage_s(load) == (1 + 10 + 10) / 4
    assert RingCost().stage_s(load) == (1 + 4 * 3 * 10 / 4) / 4


def test_a_model_that_fits_only_in_stages_is_cut() -> None:
    layers = [layer(n, 10, output=1, weights=100) for n in range(4)]
    whole = Profile(model="m", layers=tuple(layers), samples=1, device="cpu")
    found = compare(whole, [Level(2, 1e9)], ShardsCost(num_shards=2), MemoryLimit(700.0))
    assert found.is_pipeline
    assert "data parallelism needs 1.208 kB of 700 bytes" in found.reason
    none = compare(whole, [Level(2, 1e9)], ShardsCost(num_shards=2), MemoryLimit(300.0))
    assert not none.is_pipeline
    assert none.advised is None
    assert none.reason.startswith("nothing fits into 300 bytes")


def test_one_worker_and_one_layer_cannot_be_cut() -> None:
    whole = Profile(model="m", layers=(layer(0, 1),), samples=1, device="cpu")
    assert "cannot be cut" in compare(whole, [Level(4, 1e9)], RingCost()).reason


def test_the_optimizers_state_counts_where_it_lives() -> None:
    memory = MemoryLimit(num_state=2)
    # Two versions and activations, a gradient, and Adam's two arrays; on shards if replicated.
    assert memory.stage_nbytes(100, 10, versions=2, replicas=1) == 2 * 110 + 100 + 200
    assert memory.stage_nbytes(100, 10, versions=2, replicas=2) == 2 * 110 + 300
    assert memory.stage_nbytes(100, 10, versions=1, replicas=2) == 110 + 200


def test_a_profile_is_read_as_it_was_written() -> None:
    found = profile("vgg16")
    assert read_profile(found.as_json(), "again") == found


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"layers": [{"name": "a"}]}', '{"layers": [], "x": 1}']
)
def test_a_file_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.json is no profile of a model"):
        read_profile(text, "f.json")


def test_wrong_numbers_in_a_profile_are_refused_by_name() -> None:
    text = profile("vgg16").as_json().replace("0.022307", "-1.0")
    with pytest.raises(ConfigError, match=r"'conv1_1' .* has forward_s=-1\.0"):
        read_profile(text, "f.json")
    with pytest.raises(ConfigError, match="has no layers"):
        Profile(model="m", layers=(), samples=1, device="cpu")
