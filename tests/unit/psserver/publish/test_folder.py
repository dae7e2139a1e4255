"""Folders of published weights: complete or not there, the newest few, readable by others."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from pscore.errors import ConfigError
from pscore.partition import make_layout
from pscore.publish.codec import round_to_bf16
from pscore.subscription.assembly import WeightsVersion
from pscore.subscription.weights import PublishedWeights, named
from pscore.types import TensorSpec
from psserver.durability import records
from psserver.publish.folder import VersionsFolder

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "b": (2, 2, 2)}
TENSORS = tuple(
    TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()
)


def make_weights(number: int, dtype: str = "bf16", lineage: int = 7) -> PublishedWeights:
    layout = make_layout(TENSORS, num_shards=1)
    values = np.random.default_rng(number).standard_normal(layout.numel).astype(np.float32)
    bits = round_to_bf16(values)
    return PublishedWeights(
        version=WeightsVersion(lineage, number),
        step=4 * number,
        exact=True,
        arrays=named(layout, bits, dtype, None),
        bits=bits,
        layout=layout,
    )


@pytest.mark.parametrize("nbytes_max", [1 << 30, 20])
@pytest.mark.parametrize(
    ("dtype", "torchs"),
    [("bf16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_others_read_the_tensors_that_were_published(
    tmp_path: Path, nbytes_max: int, dtype: str, torchs: torch.dtype
) -> None:
    weights = make_weights(3, dtype)
    path = VersionsFolder(tmp_path, keep=2, nbytes_max=nbytes_max).write(weights, "night")
    files = sorted(path.glob("*.safetensors"))
    found = {k: v for file in files for k, v in safetensors.torch.load_file(file).items()}
    assert found.keys() == weights.arrays.keys()
    for name, array in weights.arrays.items():
        expected = torch.from_numpy(array.copy())
        expected = expected.view(torch.bfloat16) if dtype == "bf16" else expected
        assert found[name].dtype == torchs
        assert torch.equal(found[name], expected)
    about = json.loads((path / "publication.json").read_text())
    assert (about["job"], about["lineage"], about["number"], about["step"]) == ("night", 7, 3, 12)
    assert {*about["sha256"]} >= {file.name for file in files}
    if nbytes_max == 20:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert {*index["weight_map"].values()} == {file.name for file in files}
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in weights.arrays.values())
    else:
        assert [file.name for file in files] == ["model.safetensors"]


def test_the_newest_few_stay_and_latest_is_the_newest(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()  # Not ours: it stays.
    folder = VersionsFolder(tmp_path, keep=2, nbytes_max=1 << 30)
    assert folder.newest() is None
    for lineage, number in ((7, 9), (7, 10), (8, 1), (8, 2)):
        folder.write(make_weights(number, lineage=lineage), "night")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "notes", "v8-000000000001", "v8-000000000002"]
    assert (tmp_path / "latest").resolve().name == "v8-000000000002"
    assert VersionsFolder(tmp_path, keep=2, nbytes_max=1 << 30).newest() == (8, 2)


def test_a_version_that_does_not_fit_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30)
    folder.write(make_weights(1), "night")

    def full(path: Path) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "sha256_of", full)
        with pytest.raises(OSError, match="No space"):
            folder.write(make_weights(2), "night")
    names = ["latest", "v7-000000000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    (tmp_path / ".writing-of-a-killed-process").mkdir()
    (tmp_path / ".writing-link").symlink_to("v7-000000000001")
    assert VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30).newest() == (7, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_each_version_gets_the_other_files_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (model / name).write_text("{}")
    folder = VersionsFolder(tmp_path / "to", keep=1, nbytes_max=1 << 30, model=model)
    path = folder.write(make_weights(1), "night")
    assert sorted(each.name for each in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "publication.json",
        "tokenizer.json",
    ]
    assert (path / "model.safetensors").stat().st_size > 2
    with pytest.raises(ConfigError, match="is no folder"):
        VersionsFolder(tmp_path / "to", keep=1, nbytes_max=1, model=tmp_path / "missing")


def test_an_array_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    weights = make_weights(1)
    wide = {name: array.astype(np.float64) for name, array in weights.arrays.items()}
    folder = VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30)
    with pytest.raises(ConfigError, match="is float64: --map has to return uint16"):
        folder.write(replace(weights, arrays=wide), "night")
    assert not list(tmp_path.iterdir())


def test_arrays_of_a_map_may_be_of_any_kind(tmp_path: Path) -> None:
    weights = make_weights(1)
    given: dict[str, Any] = {"a": torch.ones(2, 3), "b": np.float32(4.0)}
    folder = VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30)
    path = folder.write(replace(weights, arrays=given), "night")
    found = safetensors.torch.load_file(path / "model.safetensors")
    assert torch.equal(found["a"], torch.ones(2, 3))
    assert found["b"] == 4.0
    given["c"] = [1.0]
    with pytest.raises(ConfigError, match="'c' is float64: --map has to return"):
        folder.write(replace(make_weights(2), arrays=given), "night")


def test_a_latest_that_is_no_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """As in a copy of the folder by a program that follows links."""
    folder = VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30)
    (tmp_path / "latest").mkdir()
    for refused in (
        lambda: folder.write(make_weights(1), "night"),
        lambda: VersionsFolder(tmp_path, keep=1, nbytes_max=1 << 30),
    ):
        with pytest.raises(ConfigError, match="latest is no link to a version"):
            refused()
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_the_first_version_makes_the_folder_and_the_next_one_again(tmp_path: Path) -> None:
    to = tmp_path / "a" / "b"
    folder = VersionsFolder(to, keep=1, nbytes_max=1 << 30)
    assert folder.newest() is None
    assert not list(tmp_path.iterdir()), "no version has come"
    for number in (1, 2):
        folder.write(make_weights(number), "night")
        assert (to / "latest" / "model.safetensors").is_file()
        shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        VersionsFolder(to, keep=1, nbytes_max=1 << 30)
