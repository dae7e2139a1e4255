"""Properties of every rule by name, and the meaning of a learning rate in each mode."""

import inspect
import math
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.compressors import parse_compressor
from pscore.compressors.two_bit import TwoBit
from pscore.errors import ConfigError
from pscore.graphs import GRAPHS
from pscore.optimizers import OPTIMIZERS
from pscore.rules import (
    ASGD,
    CD,
    DCASGD,
    OD,
    RULES,
    SSD,
    SSGD,
    SSP,
    DiLoCo,
    LocalSGD,
    Rule,
    SlowMo,
    Staleness,
    make_rule,
    parse_mode,
)
from pscore.rules.allreduce import AllReduce
from pscore.rules.base import UNBOUNDED
from pscore.types import Role
from tests.harness import NUMEL, Cluster
from tests.paper.inner import Inner

GROUP = {"lr": 0.5, "momentum": 0.0}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_defaults_and_reads_what_it_writes(name: str) -> None:
    rule = RULES[name]()
    assert parse_mode(str(rule)) == rule
    assert parse_mode(name) == rule
    assert make_rule(name, rule.arguments()) == rule
    assert parse_mode(rule) is rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_a_value(name: str) -> None:
    rule = RULES[name]()
    assert hash(rule) == hash(RULES[name]())
    with pytest.raises(FrozenInstanceError):
        rule.steps = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RULES)
def test_every_argument_is_documented_and_the_source_is_named(name: str) -> None:
    rule = RULES[name]
    texts = [inspect.getdoc(base) or "" for base in rule.__mro__ if is_dataclass(base)]
    documented = [
        line.split(":")[0].strip()
        for text in texts
        for line in text.partition("Attributes:")[2].split("\n")
    ]
    assert [item.name for item in fields(rule) if item.name not in documented] == []
    assert rule.source


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_exported_and_listed(name: str) -> None:
    assert RULES[name].__name__ in dir(psworker)
    assert getattr(psworker, RULES[name].__name__) is RULES[name]
    assert psworker.modes()[name] == RULES[name]().arguments()


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"no mode 'sgd'; there are adpsgd, allreduce, asgd, cd"):
        parse_mode("sgd")


def test_a_wrong_argument_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"'ssgd' has no argument 'backups'; it has backup"):
        parse_mode("ssgd(backups=1)")
    with pytest.raises(ConfigError, match=r"'asgd' has no argument 'lr'; it has no arguments"):
        parse_mode("asgd(lr=1)")
    with pytest.raises(ConfigError, match=r"ssp.bound is 'x', must be of type int"):
        parse_mode("ssp(bound=x)")


@pytest.mark.parametrize("name", RULES)
def test_a_plan_makes_sense_at_every_step(name: str) -> None:
    rule = RULES[name]()
    for step in [*range(1100), 1_000_000]:
        plan = rule.plan(step)
        assert plan.push in (None, Role.GRADIENT, Role.DELTA, Role.MODEL)
        assert plan.inner == bool(rule.outer_optimizer)
        assert (plan.push in (Role.DELTA, Role.MODEL)) <= plan.inner
        assert not (plan.inner and plan.local)
        assert plan.pull <= (plan.push is not None)  # A pull is for the update of a push.
        assert plan.block <= plan.pull
        assert plan.flush <= (not plan.compress)
        assert plan.local <= (rule.local_update() is not None)


@pytest.mark.parametrize("name", RULES)
def test_a_mode_by_step_has_a_bound_and_asks_for_its_own_update(name: str) -> None:
    rule = RULES[name]()
    if rule.by_step:
        assert rule.steps_open() < UNBOUNDED
        assert [rule.min_version(step) for step in (0, 7)] == [1, 8]
        assert rule.fan_in(3, 4) == 3
    else:
        assert rule.steps_open() == UNBOUNDED
        assert rule.min_version(7) == 0


@pytest.mark.parametrize("name", RULES)
def test_the_outer_optimizer_is_one_of_the_shards(name: str) -> None:
    rule = RULES[name]()
    group = {"lr": 0.25, "anything": "of the user's own optimizer"}
    if not rule.outer_optimizer:
        assert rule.outer_group(3, group, 2) is group
        return
    optimizer = OPTIMIZERS[rule.outer_optimizer]
    for step in (0, 3):
        row = optimizer.hyper_from_torch(rule.outer_group(step, group, 2))
        assert len(row) == len(optimizer.hyper_names)
        assert all(math.isfinite(value) for value in row)


# ----- what a learning rate means: docs/rules/README.md, "What a learning rate means"


def moved(rule: Rule, **arguments: Any) -> float:
    """Returns how far one step of each of four workers moves W: lr 1/2, all gradients -1."""
    cluster = Cluster(
        rule,
        lambda *_: np.full(NUMEL, -1.0),
        num_workers=4,
        group=GROUP,
        inner=Inner(lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
        **{"steps": 1, **arguments},
    )
    # All gradients arrive before the first worker leaves: an update waits for those that are left.
    for rank in range(4):
        while not any(event.kind == "compute" and event.worker == rank for event in cluster.log):
            assert cluster.turn(rank)
    while any(cluster.turn(rank, "worker", "request") for rank in range(4)):
        pass
    cluster.train()
    assert len(set(cluster.flat_weights().tolist())) == 1
    return float(cluster.flat_weights()[0])


@pytest.mark.parametrize(
    "rule",
    [SSGD(), SSP(bound=0), OD(), SSD(), CD(), OD(warmup=0), SSD(warmup=0), CD(warmup=0)],
    ids=str,
)
def test_by_step_the_rate_is_of_the_mean_whatever_the_number_of_workers(rule: Rule) -> None:
    assert moved(rule) == 0.5


@pytest.mark.parametrize("rule", [ASGD(), SSP(bound=3), SSP(bound=-1)], ids=str)
def test_on_arrival_the_rate_is_of_each_gradient(rule: Rule) -> None:
    assert moved(rule) == 4 * 0.5


def test_softsync_divides_by_its_arrivals_and_by_the_staleness() -> None:
    assert moved(Staleness(splits=1)) == 0.5
    assert moved(Staleness(splits=2)) == 0.5 + 0.5 / 1  # tau = 0, and tau = 1 or 0.


def test_compensation_leaves_the_rate_of_asgd() -> None:
    assert moved(DCASGD(variance_control=0.0)) == 2.0


@pytest.mark.parametrize("rule", [LocalSGD(steps=2), SlowMo(steps=2)], ids=str)
def test_in_rounds_the_rate_is_the_inner_one_and_moves_add_up(rule: Rule) -> None:
    assert moved(rule, steps=2) == 2 * 0.5


def test_the_outer_rate_of_diloco_is_without_unit() -> None:
    assert moved(DiLoCo(steps=2, outer_lr=0.5, outer_momentum=0.0), steps=2) == 0.5 * 2 * 0.5


def test_the_local_rate_follows_the_schedule_of_the_global_one() -> None:
    """lr 1 at step 0 and 1/4 at step 1; lr_scale 1/2; one worker, no momentum."""
    cluster = Cluster(
        OD(warmup=0, local="sgd", lr_scale=0.5),
        lambda *_: np.full(NUMEL, -1.0),
        num_workers=1,
        steps=3,
        lr=lambda step: (1.0, 0.25, 0.25)[step],
    ).train()
    assert cluster.seen()[0, :, 0].tolist() == [0.0, 0.5, 1.0 + 0.125]


def test_a_residual_has_the_rate_of_the_step_that_sends_it() -> None:
    """It is a gradient that comes late, and is not rescaled: g = 3/4, t = 1/2, lr 1, then 1/4.

    Step 0 sends 1/2 and keeps 1/4; step 1 sends 1/2 of 1 at the new rate.
    """
    cluster = Cluster(
        SSD(warmup=5, local="none"),
        lambda *_: np.full(NUMEL, -0.75),
        num_workers=1,
        steps=2,
        lr=lambda step: (1.0, 0.25)[step],
        compressor=TwoBit(threshold=0.5),
    ).train()
    assert cluster.flat_weights().tolist() == [0.5 + 0.125] * NUMEL


@pytest.mark.parametrize("name", RULES)
def test_a_step_follows_from_the_pushes_that_lie_behind_it(name: str) -> None:
    """Counted along the plan: a push is the last act of its step."""
    texts = [name] if name not in ("local", "slowmo", "diloco") else [
        f"{name}(steps={steps}, warmup={warmup})" for steps in (1, 3, 4) for warmup in (0, 5)
    ]  # fmt: skip
    for rule in map(parse_mode, texts):
        for start in (0, 2, 4, 5, 6, 9):
            assert rule.step_after(start, 0) == start
            pushes = 0
            for step in range(start, start + 20):
                if rule.plan(step).push is not None:
                    pushes += 1
                    assert rule.step_after(start, pushes) == step + 1, (str(rule), start, pushes)


@pytest.mark.parametrize("name", ["1bit", "2bit", "topk", "randomk", "dgc", "sparseloco"])
def test_few_bits_with_error_feedback_and_momentum_over_rounds_are_cautioned(name: str) -> None:
    """Both count the same past twice: on quadratics that diverged."""
    compressor = parse_compressor(name)
    for rule in (DiLoCo(), SlowMo()):
        assert f"and compression {name}: most of a move waits" in rule.caution(compressor)
    without = DiLoCo(outer_momentum=0.0), SlowMo(slow_momentum=0.0), LocalSGD(), SSGD()
    assert not any(rule.caution(compressor) for rule in without)


def test_a_compressor_of_moves_is_cautioned_where_there_are_none() -> None:
    assert "for the moves of rounds" in SSGD().caution(parse_compressor("pulseloco"))


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8", "natural", "qsgd", "pulseloco"])
def test_more_bits_or_no_error_feedback_are_not(name: str) -> None:
    assert not DiLoCo().caution(parse_compressor(name))


def test_atomic_exchanges_need_an_even_number_and_a_bipartite_graph() -> None:
    rule = parse_mode("adpsgd(exchange=atomic)")
    assert rule.arguments()["graph"] == "exp_bipartite"
    for num in (1, 2, 4, 6, 30):
        rule.require_workers(num)
    with pytest.raises(ConfigError, match=r"an even number of workers, not 5: one more or one"):
        rule.require_workers(5)
    parse_mode("adpsgd(exchange=atomic, graph='0-2 2-1 1-3')").require_workers(4)
    for graph in ("complete", "torus", "exp_static", "0-1 1-2 2-0 2-3 3-4 4-5"):
        with pytest.raises(ConfigError, match="not bipartite with 6 workers"):
            parse_mode(f"adpsgd(exchange=atomic, graph='{graph}')").require_workers(6)
    with pytest.raises(ConfigError, match="max_behind is 2, must be 0 with exchange='atomic'"):
        parse_mode("adpsgd(exchange=atomic, max_behind=2)")
    with pytest.raises(ConfigError, match="must be one of atomic, differences"):
        parse_mode("adpsgd(exchange=locked)")


@pytest.mark.parametrize("mode", ["dpsgd", "adpsgd", "sgp"])
def test_edges_that_leave_workers_apart_are_refused(mode: str) -> None:
    parse_mode(f"{mode}(graph='0-1 1-2 7-2')").require_workers(3)
    with pytest.raises(ConfigError, match=r"leaves some of 4 .*: worker 3 has no edge"):
        parse_mode(f"{mode}(graph='0-1 1-2')").require_workers(4)
    with pytest.raises(ConfigError, match=r"apart.*: no edges join one part to another"):
        parse_mode(f"{mode}(graph='0-1 2-3')").require_workers(4)
    for graph in GRAPHS:
        parse_mode(f"{mode}(graph={graph})").require_workers(6)


def test_a_global_average_joins_parts_that_no_edge_joins() -> None:
    parse_mode("dpsgd(graph='0-1 2-3', global_every=50)").require_workers(4)


def test_dropped_momenta_need_a_global_average() -> None:
    assert parse_mode("dpsgd(global_every=8, momenta=drop)").arguments()["momenta"] == "drop"
    with pytest.raises(ConfigError, match=r"dpsgd.momenta is 'drop', which has no effect without"):
        parse_mode("dpsgd(momenta=drop)")
    with pytest.raises(ConfigError, match=r"dpsgd.momenta"):
        parse_mode("dpsgd(global_every=8, momenta=mean)")


def test_allreduce_takes_a_backend_with_its_own_order_alone() -> None:
    for text, exchange in (("backend=gloo", "collective"), ("order=ranks", "ring")):
        rule = parse_mode(f"allreduce({text})")
        assert isinstance(rule, AllReduce)
        assert rule.exchange_name == exchange
    with pytest.raises(ConfigError, match="leave out order='ranks'"):
        parse_mode("allreduce(backend=gloo, order=ranks)")
    with pytest.raises(ConfigError, match=r"allreduce.backend"):
        parse_mode("allreduce(backend=mpi)")
