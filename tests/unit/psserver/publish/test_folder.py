"""Folders of published weights: complete or not there, the newest few, readable by others."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

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
from psserver.commands import publishing
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


def full(path: Path) -> str:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("nbytes_max", [1 << 30, 20])
@pytest.mark.parametrize(
    ("dtype", "torchs"),
    [("bf16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_others_read_the_tensors_that_were_published(
    tmp_path: Path, nbytes_max: int, dtype: str, torchs: torch.dtype
) -> None:
    weights = make_weights(3, dtype)
    path = VersionsFolder(tmp_path, job="night", keep=2, nbytes_max=nbytes_max).write(weights)
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
    folder = VersionsFolder(tmp_path, job="night", keep=2, nbytes_max=1 << 30)
    assert folder.newest() is None
    for lineage, number in ((7, 9), (7, 10), (8, 1), (8, 2)):
        folder.write(make_weights(number, lineage=lineage))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "lock", "notes", "v8-000000000001", "v8-000000000002"]
    assert (tmp_path / "latest").resolve().name == "v8-000000000002"
    assert folder.newest() == (8, 2)


def test_a_version_that_does_not_fit_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)
    folder.write(make_weights(1))

    with monkeypatch.context() as patch:
        patch.setattr(records, "sha256_of", full)
        with pytest.raises(OSError, match="No space"):
            folder.write(make_weights(2))
    names = ["latest", "lock", "v7-000000000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    del folder
    (tmp_path / ".writing-of-a-killed-process").mkdir()
    (tmp_path / ".writing-link").symlink_to("v7-000000000001")
    assert VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30).newest() == (7, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_each_version_gets_the_other_files_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (model / name).write_text("{}")
    folder = VersionsFolder(tmp_path / "to", job="night", keep=1, nbytes_max=1 << 30, model=model)
    path = folder.write(make_weights(1))
    assert sorted(each.name for each in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "publication.json",
        "tokenizer.json",
    ]
    assert (path / "model.safetensors").stat().st_size > 2
    with pytest.raises(ConfigError, match="is no folder"):
        VersionsFolder(
            tmp_path / "to", job="night", keep=1, nbytes_max=1, model=tmp_path / "missing"
        )


def test_an_array_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    weights = make_weights(1)
    wide = {name: array.astype(np.float64) for name, array in weights.arrays.items()}
    folder = VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)
    with pytest.raises(ConfigError, match="is float64: --map has to return uint16"):
        folder.write(replace(weights, arrays=wide))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_arrays_of_a_map_may_be_of_any_kind(tmp_path: Path) -> None:
    weights = make_weights(1)
    given: dict[str, Any] = {"a": torch.ones(2, 3), "b": np.float32(4.0)}
    folder = VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)
    path = folder.write(replace(weights, arrays=given))
    found = safetensors.torch.load_file(path / "model.safetensors")
    assert torch.equal(found["a"], torch.ones(2, 3))
    assert found["b"] == 4.0
    given["c"] = [1.0]
    with pytest.raises(ConfigError, match="'c' is float64: --map has to return"):
        folder.write(replace(make_weights(2), arrays=given))


def test_a_latest_that_is_no_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """As in a copy of the folder by a program that follows links."""
    folder = VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)
    (tmp_path / "latest").mkdir()
    for refused in (
        lambda: folder.write(make_weights(1)),
        lambda: VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30),
    ):
        with pytest.raises(ConfigError, match="latest is no link to a version"):
            refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "lock"]


def test_the_first_version_makes_the_folder_and_the_next_one_again(tmp_path: Path) -> None:
    to = tmp_path / "a" / "b"
    folder = VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30)
    assert folder.newest() is None
    assert not list(tmp_path.iterdir()), "no version has come"
    for number in (1, 2):
        folder.write(make_weights(number))
        assert (to / "latest" / "model.safetensors").is_file()
        shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30)


def test_a_second_process_does_not_delete_what_the_first_one_is_writing(tmp_path: Path) -> None:
    to = tmp_path / "to"
    first, second = (VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30) for _ in range(2))
    first.write(make_weights(1))
    (to / ".writing-of-the-first").mkdir()
    for refused in (
        lambda: second.write(make_weights(2)),
        lambda: VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30),
    ):
        with pytest.raises(BlockingIOError, match="another psserver publish writes into"):
            refused()
    assert (to / ".writing-of-the-first").is_dir()
    assert first.newest() == (7, 1)


def test_a_folder_that_is_made_again_is_kept_from_others_too(tmp_path: Path) -> None:
    """The lock was in the folder that is gone."""
    to = tmp_path / "to"
    first = VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30)
    first.write(make_weights(1))
    shutil.rmtree(to)
    first.write(make_weights(2))
    with pytest.raises(BlockingIOError, match="another psserver publish writes into"):
        VersionsFolder(to, job="night", keep=1, nbytes_max=1 << 30)


def test_latest_is_the_last_version_after_a_kill_or_an_error_before_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed at the one before until a newer one came, and each attempt failed."""
    folder = VersionsFolder(tmp_path, job="night", keep=2, nbytes_max=1 << 30)
    folder.write(make_weights(1))

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    for number in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            with pytest.raises(OSError, match="No space"):
                folder.write(make_weights(number))
        assert (tmp_path / "latest").resolve().name == f"v7-{number - 1:012d}"
        if number == 2:
            folder.write(make_weights(number))
        else:
            del folder
            VersionsFolder(tmp_path, job="night", keep=2, nbytes_max=1 << 30)
        assert (tmp_path / "latest").resolve().name == f"v7-{number:012d}"


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    """A job whose lineage is the older one would wait for ever, and `latest` be of either."""
    VersionsFolder(tmp_path, job="day", keep=1, nbytes_max=1 << 30).write(make_weights(1))
    with pytest.raises(ConfigError, match="has versions of job 'day': give another --to"):
        VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)


class Versions:
    """A reader that gets two versions; the second one is the last."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.weights = [make_weights(1), make_weights(2)]

    def wait(
        self, newer_than: WeightsVersion | None = None, timeout_s: float | None = None
    ) -> PublishedWeights:
        newer = [one for one in self.weights if newer_than is None or one.version > newer_than]
        if not newer:
            raise KeyboardInterrupt
        return newer[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_the_last_version_is_written_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = iter([records.sha256_of] + 2 * [full] + 9 * [records.sha256_of])
    monkeypatch.setattr(records, "sha256_of", lambda path: next(digests)(path))
    monkeypatch.setattr(publishing, "Reader", Versions)
    monkeypatch.setattr(publishing, "PAUSE_S", 0.0)
    folder = VersionsFolder(tmp_path, job="night", keep=1, nbytes_max=1 << 30)
    about: dict[str, Any] = {
        "job": "night",
        "table": "model",
        "dtype": "bf16",
        "names": None,
        "token_file": None,
    }
    with pytest.raises(KeyboardInterrupt):
        publishing.publish_versions(folder, [], **about, is_once=False)
    said = capsys.readouterr()
    assert said.out.split() == [
        *(str(tmp_path / "v7-000000000001"), "step", "4"),
        *(str(tmp_path / "v7-000000000002"), "step", "8"),
    ]
    assert said.err.count("No space left on device; the newest version is tried again") == 1
