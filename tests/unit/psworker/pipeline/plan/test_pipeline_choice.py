"""The plan that a pipeline finds by itself."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from pscore.errors import ConfigError
from pscore.rules import SSGD
from psworker.pipeline.plan.choice import PlanLimits, find_plan, measured, num_state_of
from psworker.pipeline.plan.profile import Layer, Profile, read_profile
from psworker.pipeline.run.chain import chain_of

PROFILE = Path(__file__).parent / "profiles" / "vgg16.json"


@pytest.fixture(scope="module")
def vgg16() -> Profile:
    return read_profile(PROFILE.read_text(encoding="utf-8"), str(PROFILE))


def test_the_fastest_pipeline_is_taken_where_it_pays(
    vgg16: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        found = find_plan(vgg16, PlanLimits.parse("1gbit", None), 4, 4, 0, SSGD())
    assert [replicas for _, replicas in found] == [3, 1]
    assert vgg16.layers[found[0][0]].name == "pool5"
    assert found[1][0] == len(vgg16.layers) - 1
    (line,) = caplog.messages
    assert line.startswith("pipeline plan 3-1: pipeline: 3-1, cut after pool5, takes ")
    assert line.endswith("times as fast")


@pytest.mark.parametrize(
    ("link", "reason"), [("10gbit", "data parallelism takes "), ("10mbit", "one worker alone")]
)
def test_where_it_does_not_pay_one_stage_is_data_parallelism(
    vgg16: Profile, caplog: pytest.LogCaptureFixture, link: str, reason: str
) -> None:
    assert find_plan(vgg16, PlanLimits.parse(link, None), 4, 4, 0, SSGD()) == [
        (len(vgg16.layers) - 1, 4)
    ]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"plan 4: do not pipeline: {reason}" in record.getMessage()


def two_layers(seconds: float = 0.1) -> Profile:
    layers = tuple(
        Layer(
            name=name,
            forward_s=seconds,
            backward_s=seconds,
            output_nbytes=1000,
            held_nbytes=0,
            parameter_nbytes=10**6,
        )
        for name in ("a", "b")
    )
    return Profile(model="m", layers=layers, samples=1, device="cpu")


def test_workers_that_would_be_idle_are_refused() -> None:
    # Data parallelism needs 6 MB. On 1-1 no parameter crosses the slow link.
    with pytest.raises(ConfigError, match=r"1-1, has 2 workers, .* start 2 in place of 3"):
        find_plan(two_layers(), PlanLimits.parse("1mbit", "3200k"), 3, 1, 0, SSGD())
    assert find_plan(two_layers(), PlanLimits.parse("1mbit", "3200k"), 2, 1, 0, SSGD()) == [
        (0, 1),
        (1, 1),
    ]


def test_the_optimizers_state_is_part_of_the_memory() -> None:
    # The first stage has two versions, a gradient, and the state: 3 MB, and 5 MB with Adam.
    with pytest.raises(ConfigError, match=r"no plan for 2 workers: nothing fits into 3\.2 MB"):
        find_plan(two_layers(), PlanLimits.parse("1mbit", "3200k"), 2, 1, 2, SSGD())


def test_the_arrays_of_an_optimizers_state_are_counted() -> None:
    assert num_state_of(lambda p: torch.optim.SGD(p, lr=1.0)) == 0
    assert num_state_of(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)) == 1
    assert num_state_of(lambda p: torch.optim.Adam(p, lr=1.0)) == 2


def test_a_measured_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    example = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    profile = measured(chain_of(model, example), example)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("bandwidth", "memory", "message"),
    [
        (None, None, "plan='auto' needs bandwidth"),
        ("fast", None, "bandwidth is 'fast', must be as 1gbit"),
        ("1gbit,10gbit", None, "must be one link"),
        ("1gbit", "much", "memory is 'much', must be as 16g"),
    ],
)
def test_wrong_limits_are_refused(bandwidth: str | None, memory: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanLimits.parse(bandwidth, memory)
