"""The plan of a model: the numbers that a person reads before a run."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psworker.commands import cli
from psworker.commands.model_plan import (
    Report,
    Shapes,
    lines_of,
    make_report,
    parse_job,
    shapes_of,
)
from psworker.commands.models import make_model

SHAPES = [("large", (1024, 1024)), ("small", (64, 64)), ("bias", (1 << 20,))]
MIB = 1 << 20


def report_of(
    mode: str,
    compression: str = "none",
    optimizer: str = "sgd",
    pulls: str = "none",
    shapes: Shapes = SHAPES,
    **more: int,
) -> Report:
    job = parse_job(mode, compression, pulls, optimizer)
    return make_report(shapes, job, 2, **more)


def test_compressed_pulls_are_those_of_the_large_matrices_and_bring_no_state() -> None:
    report = report_of("ssgd", pulls="int8")
    rest = 4 * (report.num_elements - MIB)
    assert report.pushed_nbytes == 4 * report.num_elements
    assert report.pulled_nbytes == pytest.approx(MIB + rest, rel=0.01)
    with_state = "ssd(steps=4, warmup=3, local=mirror)"
    assert report_of(with_state, pulls="int8").pulled_nbytes == report_of(with_state).pulled_nbytes


def test_slices_and_shards_hold_every_element_once() -> None:
    report = report_of("ssgd")
    assert report.num_elements == 2 * MIB + 4096
    assert sum(shard["nbytes"] for shard in report.shards) == 4 * report.num_elements
    assert sum(shard["num_slices"] for shard in report.shards) == report.num_slices
    assert report.slice_nbytes_max <= 4 * MIB


@pytest.mark.parametrize(
    ("mode", "pulled"),
    [
        ("ssgd", 1.0),
        ("ssd(steps=4, warmup=3, local=sgd)", 1 / 4),
        ("ssd(steps=4, warmup=3, local=mirror)", 2 / 4),  # The momentum comes along.
        ("ssd(steps=4, warmup=3, local=mirror, spread=4)", 2 / 4),
    ],
)
def test_bytes_pulled_are_those_of_the_mode(mode: str, pulled: float) -> None:
    report = report_of(mode)
    nbytes = 4 * report.num_elements
    assert report.pushed_nbytes == nbytes
    assert report.pulled_nbytes == pytest.approx(pulled * nbytes)


def test_adam_brings_two_state_arrays() -> None:
    report = report_of("ssd(steps=4, warmup=0, local=mirror)", optimizer="adam")
    assert report.pulled_nbytes == 4 * report.num_elements * 3 / 4


def test_only_large_matrices_are_compressed() -> None:
    report = report_of("ssgd", "fp16")
    assert report.uncompressed == ["small", "bias"]
    assert report.pushed_nbytes == 2 * MIB + 4 * (MIB + 4096)


def test_every_kth_push_of_cd_is_whole() -> None:
    report = report_of("cd(steps=5, warmup=2)", "fp16")
    packed, whole = 2 * MIB + 4 * (MIB + 4096), 4 * report.num_elements
    assert report.period_steps == 5
    assert report.pushed_nbytes == (4 * packed + whole) / 5


def test_resnet_50_has_161_tensors_of_25557032_elements() -> None:
    shapes = shapes_of("resnet50")
    assert len({name for name, _ in shapes}) == len(shapes) == 161
    report = report_of("ssgd", shapes=shapes)
    assert report.num_elements == 25_557_032


def test_the_table_that_the_head_of_gpt2_shares_is_counted_once() -> None:
    shapes = shapes_of("gpt2")
    assert sum(math.prod(shape) for _, shape in shapes) == 124_439_808
    stages = make_model("gpt2", "meta", for_stages=True)
    assert sum(weight.numel() for weight in stages.parameters()) == 163_037_184


def test_a_factory_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_of_the_test.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(3, 2)\ndef none():\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert shapes_of("nets_of_the_test:net") == [("weight", (2, 3)), ("bias", (2,))]
    with pytest.raises(ConfigError, match="must return a torch module"):
        shapes_of("nets_of_the_test:none")
    with pytest.raises(ConfigError, match="has no function or class 'more'"):
        shapes_of("nets_of_the_test:more")


@pytest.mark.parametrize("model", ["alexnet2", "no_such_module:net"])
def test_a_model_that_there_is_not_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=model):
        shapes_of(model)


def test_the_command_prints_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["psworker", "plan", "lenet", "--shards", "2", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["num_tensors"], shown["num_elements"]) == (10, 61_706)


def test_a_mode_that_the_shards_would_refuse_for_this_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"diloco.fragments is 400, and the model has \d+ slices"):
        report_of("diloco(steps=500, fragments=400)")


def test_the_lines_name_what_stays_uncompressed() -> None:
    assert lines_of(report_of("ssgd", "fp16"))[-1] == "always uncompressed: 2 tensors: small, bias"


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("1/0", "mine:make", "cannot be made without arguments: ZeroDivisionError: division"),
        ("def (", "mine:make", "cannot be made without arguments: SyntaxError: "),
        ("def make(n): ...", "mine:make", "cannot be made without arguments: TypeError: make() "),
        ("make = 3", "mine:make", "module 'mine' has no function or class 'make'"),
        ("make = dict", "mine:make", "'mine:make' returns {}, must return a torch module"),
        ("import torch; make = torch.nn.ReLU", "mine:make", "'mine:make' has no parameters"),
        ("import torch; make = lambda: torch.nn.Linear", "mine:make", "must return a torch mod"),
        ("import torch; make = lambda: torch.nn.LazyLinear(3)", "mine:make", "cannot be made"),
        ("", "nonesuch:make", "ModuleNotFoundError: No module named 'nonesuch'"),
        ("", ":make", "cannot be made without arguments: ValueError: "),
        ("", ".mine:make", "cannot be made without arguments: TypeError: "),
    ],
)
def test_a_wrong_model_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        shapes_of(model)


def test_bytes_of_a_round_are_compressed_and_stand_beside_those_of_ddp() -> None:
    """H = 100 and 4 workers: DDP's ring moves 2 * 3/4 of the gradients each way in every step."""
    mode = "diloco(steps=100, outer_momentum=0.0, overlap=mirror)"
    report = report_of(mode, "fp16", num_workers=4, tokens=1000)
    nbytes = 4 * report.num_elements
    assert report.ddp_nbytes == 1.5 * nbytes
    assert report.pulled_nbytes == nbytes / 100
    assert report.pushed_nbytes == (nbytes - 2 * MIB) / 100
    up, down = report.pushed_nbytes / report.ddp_nbytes, 1 / 150
    text = "\n".join(lines_of(report))
    assert f"of that {up:.2%} are pushed, {down:.2%} pulled" in text
    assert f"{nbytes / 1e5:.4g} pulled; DDP {1.5 * nbytes / 1000:.4g} each way" in text


def test_one_worker_of_ddp_sends_nothing() -> None:
    report = report_of("ssgd", num_workers=1)
    assert report.ddp_nbytes == 0
    assert "of that" not in "\n".join(lines_of(report))
