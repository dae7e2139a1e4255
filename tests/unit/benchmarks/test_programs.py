"""The benchmarks as programs: their list, and that each run of a sweep can be made."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from benchmarks import pipeline, pipeline_learning, recovery, soak, straggler
from benchmarks.__main__ import find
from benchmarks.learning import runs, sweeps
from benchmarks.netlab import bits_per_s
from benchmarks.survival import injector
from pscore.compressors import parse_compressor
from pscore.rules import parse_mode
from pssim.training import Compute
from psworker.pipeline.plan.profile import Layer, Profile, read_profile
from psworker.pipeline.run.schedule import Place


def test_the_list_of_benchmarks_says_how_each_is_run() -> None:
    found = {item.name: item for item in find()}
    for name in ("accuracy", "convergence", "recovery", "scaling", "soak", "straggler"):
        assert any(name in command for command in found[name].commands)
    assert "runs" not in found


@pytest.mark.parametrize("sweep", sorted(sweeps.SWEEPS))
def test_every_run_of_a_sweep_is_one_and_has_a_name_of_its_own(sweep: str) -> None:
    settings = sweeps.SWEEPS[sweep]()
    for setting in settings:
        parse_mode(setting.mode)
        parse_compressor(setting.compression)
    assert len({setting.name for setting in settings}) == len(settings)


@pytest.mark.slow
def test_a_slow_worker_stops_the_synchronous_modes_and_not_the_asynchronous_ones() -> None:
    paces = {}
    for mode in ("ssgd", "ssgd(backup=1)", "asgd"):
        even, _ = straggler.rates(mode, Compute(mean_s=0.01), 0.4)
        slowed, _ = straggler.rates(mode, Compute(mean_s=0.01, slow={straggler.SLOW: 10.0}), 0.4)
        paces[mode] = slowed / even
    assert paces["ssgd"] < 0.2
    assert paces["ssgd(backup=1)"] > 0.9
    assert paces["asgd"] > 0.9


def test_every_pipeline_that_learns_sees_the_same_images_in_an_update() -> None:
    for setting in pipeline_learning.SETTINGS:
        stages = pipeline_learning.cut(pipeline_learning.Small(), len(setting.replicas))
        assert all(any(True for _ in stage.parameters()) for stage in stages)
        place = Place(0, 0, setting.replicas)
        versions = pipeline_learning.FORMS[setting.form](place, setting.parts)
        assert versions.updates_every * place.num_replicas == setting.parts
        assert pipeline_learning.BATCH % setting.parts == 0


def test_the_scaled_layers_of_a_pipeline_keep_their_share_of_computing_and_sending() -> None:
    profile = read_profile(pipeline.PROFILE.read_text("utf-8"), "vgg16")
    for link, mode in itertools.product(pipeline.LINKS, (pipeline.PIPELINE, pipeline.DDP)):
        scale = link.scale(mode)
        sent_s = bits_per_s(link.shaped(scale)) / 8 / pipeline.FLOAT_NBYTES  # Numbers in a second.
        made = pipeline.make_model(scale)
        for layer, child in zip(profile.layers, made, strict=True):
            assert isinstance(child, pipeline.SleepingLayer)
            assert sum(child.times) * scale.time == pytest.approx(layer.compute_s)
            numel = 0 if child.weight is None else child.weight.numel()
            for nbytes, own in (
                (layer.output_nbytes, child.numel),
                (layer.parameter_nbytes, numel),
            ):
                whole_s = nbytes / link.bytes_per_s
                assert own / sent_s * scale.time == pytest.approx(whole_s, rel=0.02, abs=1e-5)


def test_the_plans_of_that_benchmark_are_pipelines_and_say_where_they_do_not_pay() -> None:
    profile = read_profile(pipeline.PROFILE.read_text("utf-8"), "vgg16")
    for link in pipeline.LINKS:
        partition, verdict = pipeline.plan_for(profile, link)
        assert sum(stage.replicas for stage in partition.stages) <= pipeline.NUM_WORKERS
        assert len(partition.stages) > 1
        # At 100 Mbit/s one worker is as fast, at 10 Gbit/s traffic behind computing.
        pays = link.rate == "1gbit"
        assert verdict.startswith("pipeline: " if pays else "do not pipeline: ")


def test_torchs_pipeline_is_cut_where_its_slowest_stage_and_the_flush_cost_least() -> None:
    def layer(seconds: float, nbytes: int) -> Layer:
        return Layer(
            name="",
            forward_s=seconds,
            backward_s=0,
            output_nbytes=nbytes,
            held_nbytes=nbytes,
            parameter_nbytes=4,
        )

    link = pipeline.LINKS[1]
    narrow, wide = 1, int(link.bytes_per_s * 100)
    layers = [layer(1, narrow), layer(1, wide), layer(1, narrow), layer(1, narrow)]
    # A cut behind the second layer takes 100 s; two stages 3 s * 9/8, three stages 2 s * 10/8.
    profile = Profile(model="", layers=tuple(layers), samples=1, device="cpu")
    assert pipeline.torch_stages(profile, link) == [("0", 1), ("2", 1), ("3", 1)]


def make_run(name: str, seed: int, accuracy: float) -> runs.Run:
    return runs.Run(
        name=name,
        setting={"lr": 0.1, "momentum": 0.9, "optimizer": "sgd", "k": 0, "mode": "ssgd"},
        task="",
        seed=seed,
        steps=10,
        batch=32,
        accuracy=accuracy,
        loss=1.0,
        train_loss=1.0,
        sim_s=4.0,
        cpu_s=0.0,
        pushed_mb=0.0,
        pulled_mb=0.0,
        points=[(5, 2.0, 0.5), (10, 4.0, accuracy)],
    )


def test_seeds_are_averaged_and_accuracy_is_read_between_the_points_of_a_curve() -> None:
    rows = runs.collect([make_run("ssgd", 1, 0.7), make_run("ssgd", 2, 0.9)])
    assert rows["ssgd"].mean("accuracy") == pytest.approx(0.8)
    assert rows["ssgd"].spread == pytest.approx(0.1)
    assert rows["ssgd"].accuracy_at(3.0) == pytest.approx((0.6 + 0.7) / 2)
    assert json.loads(runs.as_json(rows))["ssgd"]["accuracy"] == pytest.approx(0.8)


def test_a_divergence_is_null_in_json() -> None:
    rows = runs.collect([make_run("glu k=32", 1, math.nan)])
    assert json.loads(runs.as_json(rows))["glu k=32"]["accuracy"] is None


def test_recoveries_are_summed_up_by_kind() -> None:
    times_s = (0.5, 0.1, 0.3)
    found = [injector.Fault(kind="shard", what="", at_s=0.0, recovery_s=t) for t in times_s]
    assert recovery.summary(found, "shard") == {"median": 0.3, "p99": 0.5, "count": 3}
    assert recovery.summary(found, "worker") == {"median": None, "p99": None, "count": 0}


def test_growth_is_the_last_count_less_the_one_after_a_quarter_of_the_time() -> None:
    def counts(values: list[float]) -> list[list[dict[str, float]]]:
        return [[dict.fromkeys(soak.COLUMNS, value)] for value in values]

    assert soak.NUM_COUNTS == 8
    assert soak.growth(counts([1, 2, 5, 9, 9, 9, 9, 9, 5])) == [dict.fromkeys(soak.COLUMNS, 0)]
    assert soak.growth(counts(list(range(9)))) == [dict.fromkeys(soak.COLUMNS, 6)]
