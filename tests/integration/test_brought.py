"""A rule, a compressor and an optimizer of another package (examples/plugin), on real shards."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from pscore.errors import ConfigError
from tests.integration.cluster import ROOT, Shards, Station
from tests.integration.models import backward, batch, make_model, weights_of

STEPS = 20
INSTALL = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which pip has installed the example."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # pip builds in it.
    done = subprocess.run(
        [sys.executable, *INSTALL, "--target", str(folder / "site"), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "site"


def path_with(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


def train(me: Station, mode: str, compression: str, is_ours: bool) -> list[float]:
    """Returns the trained weights, by Paceline or by torch alone."""

    model = make_model()
    lion = importlib.import_module("paceline_example.torch_lion")  # Only where it is installed.
    optimizer = lion.Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    if is_ours:
        psworker.init()
        optimizer = psworker.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            mode=mode,
            compression=compression,
            compress_min_nbytes=0,
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    arrays = weights_of(model).values()
    return [value for array in arrays for value in array.flatten().tolist()]


def declare(me: Station, mode: str) -> str:
    """Returns the refusal of a table with a mode."""
    psworker.init()
    model = make_model()
    try:
        psworker.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), mode=mode
        )
    except ConfigError as problem:
        return str(problem)
    return ""


@pytest.mark.slow
def test_a_package_brings_a_rule_a_compressor_and_an_optimizer(installed: Path) -> None:
    env = path_with(installed)
    with Shards(env=env) as shards:
        options: dict[str, Any] = {"num_workers": 1, "env": env}
        (ours,) = shards.run(train, "gap_aware", "none", True, **options)
        (plain,) = shards.run(train, "", "", False, **options)
        (smaller,) = shards.run(train, "gap_aware(decay=0.5)", "int16", True, **options)
    assert torch.allclose(torch.tensor(ours), torch.tensor(plain), atol=2e-6)
    # A sign may differ where a gradient is almost zero: a step of 1e-3 in each direction.
    assert torch.tensor(smaller).sub(torch.tensor(plain)).abs().mean() < 1e-3


@pytest.mark.slow
def test_a_shard_without_the_package_says_so_in_one_sentence(installed: Path) -> None:
    with Shards() as shards:
        (told,) = shards.run(declare, "gap_aware", num_workers=1, env=path_with(installed))
    assert told.startswith("the shard has no mode 'gap_aware', which the worker has from ")
    assert "paceline-example 0.1.0, sha256 " in told
    assert told.endswith("; install that package where the shards run, and restart them")


@pytest.mark.slow
def test_another_text_of_the_module_is_another_plugin(installed: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(installed, tmp_path / "other"))
    with (other / "paceline_example" / "gap_aware.py").open("a") as module:
        module.write("# Another formula.\n")
    with Shards(env=path_with(other)) as shards:
        (told,) = shards.run(declare, "gap_aware", num_workers=1, env=path_with(installed))
    assert told.startswith("mode 'gap_aware' is that of paceline-example 0.1.0, sha256 ")
    assert told.endswith("install the same version on both, and restart the shards")


@pytest.mark.slow
def test_a_worker_without_the_package_lists_the_modes(installed: Path) -> None:
    with Shards(env=path_with(installed)) as shards:
        (told,) = shards.run(declare, "gap_aware", num_workers=1)
    assert told.startswith("no mode 'gap_aware'; there are adpsgd, allreduce, asgd, ")
