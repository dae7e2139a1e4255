"""The benchmark of a GPU, run on the CPU, and the page made of its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, pages
from benchmarks.compressors import NAMES
from pscore.compressors import parse_compressor

COMMAND = (sys.executable, "-m", gpu.MODULE, "--device", "cpu", "--models", "tiny")


@pytest.mark.slow
def test_the_program_runs_on_the_cpu_and_the_page_shows_its_result(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    options = ("--modes", "diloco", "--processes", "2", "--rounds", "1", "--numel", "5000")
    command = [*COMMAND, *options, "--json", "--results", str(result)]
    # Without a compiler torch.compile is not measured: it takes a minute.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CXX": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=pages.ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == json.loads(result.read_text())
    kernels = {row["what"]: row for row in figures["kernels"]}
    encoded = [name for name in NAMES if not parse_compressor(name).is_raw]
    assert kernels.keys() >= {f"encode {name}" for name in encoded} | {"local glu", "local mirror"}
    assert all(row["best_ms"] > 0 and row["of_copy"] > 0 for row in kernels.values())
    made = [(row["model"], row["processes"], row["mode"]) for row in figures["steps"]]
    assert made == [("tiny", 2, "diloco")]
    assert all(row["step_ms"] > 0 and 0 <= row["not_hidden"] < 1 for row in figures["steps"])
    kernel = dict(zip(gpu.KERNEL_COLUMNS, ("encode 2bit", 0.1, 900.0, 1.1, 0.9), strict=True))
    left_out = {"model": "gpt", "processes": 4, "mode": "cd"}
    figures |= {"kernels": [kernel], "steps": [*figures["steps"], left_out]}
    result.write_text(json.dumps(figures))
    shown = pages.gpu(result)
    assert "| `encode 2bit` | 0.100 | 900 | 90 % |" in shown
    assert "| `gpt` | 4 | `cd` |  |  | no time was left |" in shown
    assert shown.count("`tiny`") == 1


def test_a_run_that_would_begin_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--minutes", "-1"])
    assert gpu.parse().deadline_s < time.monotonic()


def test_without_a_result_the_page_says_so(tmp_path: Path) -> None:
    assert pages.gpu(tmp_path / "none.json") == "No GPU has been measured yet."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "gpt"])
def test_inputs_and_classes_fit_the_model(name: str) -> None:
    model = gpu.MODELS[name]._replace(batch=1)
    with torch.device("meta"):
        module, inputs, classes = gpu.make(model, torch.device("meta"))
    assert module(inputs).flatten(0, -2).shape[:1] == classes.shape
    millions = {"resnet50": 25.6, "gpt": 124.4}[name]
    assert sum(one.numel() for one in module.parameters()) == pytest.approx(
        millions * 1e6, rel=0.01
    )
