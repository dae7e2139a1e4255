"""A model as a chain of blocks, its measured profile, and `psworker plan --pipeline`."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pscore.errors import ConfigError
from psworker.commands import cli, models
from psworker.pipeline.plan.measure import measure
from psworker.pipeline.plan.units import parse_bandwidths, parse_memory
from psworker.pipeline.run.chain import chain_of, join_blocks, names_of

PROFILE = Path(__file__).parent / "profiles" / "vgg16.json"
torch.manual_seed(0)


class Branches(nn.Module):
    """Two residual layers whose forward asserts about a shape, which fx cannot follow."""

    def __init__(self, *, ties: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(16, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 16
        found = self.embed(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            found = found + torch.relu(layer(found))
        result: torch.Tensor = self.head(self.norm(found))
        return result


TINY = {
    "lenet": lambda: (models.make_model("lenet"), torch.randn(2, 1, 28, 28)),
    "vgg16": lambda: (
        models.Convolutional(
            [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)],
            2,
            [nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)],
        ),
        torch.randn(2, 3, 16, 16),
    ),
    "resnet50": lambda: (models.make_model("resnet50").eval(), torch.randn(1, 3, 32, 32)),
    "gpt2": lambda: (models.gpt2(8, 2, 2, is_tied=False), torch.randint(100, (2, 5))),
    "exported": lambda: (Branches(), torch.randint(11, (2, 5))),
}


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    # resnet50: four layers before the blocks, two for each of 16 blocks (behind the sum of the
    # shortcut, and behind its ReLU), pooling, and the last layer with the flattening before it.
    [("lenet", 12), ("vgg16", 7), ("resnet50", 38), ("gpt2", 7), ("exported", 6)],
)
def test_the_blocks_one_after_the_other_are_the_forward(name: str, num_blocks: int) -> None:
    make: Callable[[], tuple[nn.Module, torch.Tensor]] = TINY[name]
    model, example = make()
    blocks = chain_of(model, example)
    assert len(blocks) == num_blocks
    assert len({block.name for block in blocks}) == num_blocks
    torch.testing.assert_close(join_blocks(blocks)(example), model(example), rtol=0, atol=0)
    # They hold the model's own parameters, each once, under names that lead back.
    names = [names_of(model, block.module) for block in blocks]
    found = [name for mapped in names for name in mapped.values()]
    assert sorted(found) == sorted(
        {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    )


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: Branches(ties=True), r"'embed\.weight' is used by blocks 0 \(.*\) and 5"),
        (lambda: nn.LSTM(3, 3), "forward returns several values|cannot be followed"),
        (lambda: nn.Bilinear(3, 3, 3), "forward has 2 inputs"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(make: Callable[[], nn.Module], pattern: str) -> None:
    example = torch.randint(11, (2, 3)) if make().__class__ is Branches else torch.randn(2, 3)
    with pytest.raises(ConfigError, match=pattern):
        chain_of(make(), example)


def test_bytes_of_a_profile_are_those_of_the_tensors() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(inplace=True), nn.Linear(20, 5, bias=False))
    found = measure("m", chain_of(model, torch.randn(4, 10)), torch.randn(4, 10), budget_s=0)
    first, relu, last = found.layers
    assert [item.output_nbytes for item in found.layers] == [4 * 4 * 20, 4 * 4 * 20, 4 * 4 * 5]
    assert [item.parameter_nbytes for item in found.layers] == [4 * 220, 0, 4 * 100]
    # The input of the first; the result of the ReLU, which is also the input of the last.
    assert [item.held_nbytes for item in found.layers] == [4 * 40, 4 * 80, 0]
    assert found.samples == 4
    assert min(first.forward_s, first.backward_s, relu.forward_s, last.backward_s) > 0


def test_the_first_block_makes_no_gradient_of_its_input() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    relu, linear = measure("m", chain_of(model, torch.randn(2, 3)), torch.randn(2, 3), 0).layers
    assert relu.backward_s == 0
    assert linear.backward_s > 0


# ----- flags


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1gbit", [125e6]), ("2.5Gbit/s,100m", [312.5e6, 12.5e6]), ("8000", [1000.0])],
)
def test_bandwidths_are_bits_per_second(text: str, expected: list[float]) -> None:
    assert parse_bandwidths(text) == expected


@pytest.mark.parametrize("text", ["", "0gbit", "fast", "1gbit,", "-1gbit", "1 gbyte"])
def test_a_wrong_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be as 1gbit"):
        parse_bandwidths(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("16g", 16e9), ("1.5GiB", 1.5 * 2**30), ("512m", 512e6), ("99", 99)]
)
def test_memory_is_in_bytes(text: str, expected: float) -> None:
    assert parse_memory(text) == expected


def test_without_a_limit_memory_is_endless() -> None:
    assert math.isinf(parse_memory(None))


def plan_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Runs `psworker plan`; returns its exit code."""
    monkeypatch.setattr("sys.argv", ["psworker", "plan", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


VGG16 = (str(PROFILE), "--pipeline", "--workers", "4", "--bandwidth")


def test_the_command_prints_stages_and_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of(monkeypatch, *VGG16, "25gbit", "--sync", "ring") == 0
    text = capsys.readouterr().out
    assert "stage 0: 17 layers, conv1_1 to pool3, on 3 workers; 514.2 ms of computing" in text
    assert "stage 1: 22 layers, conv4_1 to fc8, on 1 worker; " in text
    assert "2 weight versions, 26.14 GB of memory" in text
    assert "pipeline 3-1: " in text
    assert "verdict: do not pipeline: " in text  # A ring behind computing is as fast.


@pytest.mark.parametrize(
    ("link", "mode", "verdict"),
    [
        ("10gbit", "ssgd", "do not pipeline"),
        ("10gbit", "ssd(steps=5)", "do not pipeline"),
        ("1gbit", "ssgd", "pipeline"),
    ],
)
def test_the_verdict_compares_with_traffic_behind_computing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    link: str,
    mode: str,
    verdict: str,
) -> None:
    assert plan_of(monkeypatch, *VGG16, link, "--mode", mode, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == verdict
    if link == "10gbit":  # Computing alone: 672.535 ms over 4 workers.
        assert found["hidden_ms"] == pytest.approx(672.535 / 4)
    assert sum(stage["replicas"] for stage in found["stages"]) == found["pipeline_workers"]
    assert (found["hidden_ms"] < found["data_parallel_ms"]) == (mode == "ssgd")
    # Pushed and pulled whole in ssgd; in ssd pulled every fifth step, with the momentum.
    per_parameter = 2 if mode == "ssgd" else 1 + 2 / 5
    assert found["data_parallel_nbytes"] == pytest.approx(per_parameter * 553430176, rel=1e-6)


def test_a_measured_profile_is_saved_and_read_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("psworker.pipeline.plan.measure.RUNS_MAX", 3)
    path = tmp_path / "lenet.json"
    cluster = ("--pipeline", "--workers", "4", "--machines", "2", "--json")
    links = ("--bandwidth", "10gbit,1gbit", "--memory", "1g", "--optimizer", "adam")
    saved = ("--save-profile", str(path), "--input", "2x1x28x28")
    assert plan_of(monkeypatch, "lenet", *cluster, *links, *saved) == 0
    first = capsys.readouterr().out
    assert plan_of(monkeypatch, str(path), *cluster, *links) == 0
    assert capsys.readouterr().out == first
    assert json.loads(first)["samples"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("lenet", "--memory", "1g"), "--memory has no effect without --pipeline"),
        (("lenet", "--input", "1x2"), "--input has no effect without --pipeline"),
        (("lenet", "--pipeline"), "--pipeline needs --bandwidth"),
        ((*VGG16, "1gbit,2gbit"), "--bandwidth names 2 links, must name 1: between the workers"),
        ((*VGG16, "1gbit", "--machines", "2"), "--bandwidth names 1 links, must name 2"),
        ((*VGG16, "1gbit", "--machines", "3"), "4 workers cannot be split evenly over 3 machines"),
        ((*VGG16, "1gbit", "--sync", "tree"), "--sync is 'tree', must be one of shards, ring"),
        ((*VGG16, "1gbit", "--mode", "dpsgd"), "has no shards between replicas"),
        ((*VGG16, "1gbit", "--memory", "much"), "--memory is 'much', must be as 16g"),
        ((*VGG16, "1gbit", "--workers", "65"), "--workers is 65, must be at most 64 here"),
        (("no.json", *VGG16[1:], "1gbit"), "profile no.json cannot be read"),
        (("torch.nn:ReLU", *VGG16[1:], "1gbit"), "name it by --input"),
        (("lenet", *VGG16[1:], "1gbit", "--input", "3by3"), "--input is '3by3', must be as"),
        (("lenet", *VGG16[1:], "1gbit", "--input", "2x3"), "does not run on an input of 2x3"),
        (("lenet", *VGG16[1:], "1gbit", "--device", "gpu"), "--device is 'gpu': Expected one of"),
        (("torch.nn:ReLU", *VGG16[1:], "1gbit", "--input", "3"), "has no parameters that are"),
    ],
)
def test_wrong_flags_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    assert plan_of(monkeypatch, *flags) == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
