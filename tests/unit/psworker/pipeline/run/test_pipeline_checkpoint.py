"""Checkpoints of a pipeline: whole or not there, and named when they are damaged."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from pscore.errors import ConfigError
from psworker.pipeline.run import checkpoint
from psworker.pipeline.run.checkpoint import (
    StageCheckpoint,
    from_numbers,
    optimizer_state,
    to_numbers,
)


def make(minibatches: int) -> StageCheckpoint:
    weights = {"a.weight": torch.full((2, 3), float(minibatches)), "a.seen": torch.tensor(7)}
    return StageCheckpoint(minibatches, weights, {"a.weight/exp_avg": torch.ones(2, 3)})


def test_the_newest_ones_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    for number in (4, 8, 100, 12):
        make(number).write(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "minibatch-00000012",
        "minibatch-00000100",
    ]
    found, problems = StageCheckpoint.newest(tmp_path)
    assert found is not None
    assert not problems
    assert found.minibatches == 100
    assert torch.equal(found.weights["a.weight"], torch.full((2, 3), 100.0))
    assert StageCheckpoint.newest(tmp_path / "none") == (None, [])


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.ABOUT])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_one_is_named_and_the_next_is_taken(
    tmp_path: Path, name: str, damage: str
) -> None:
    make(4).write(tmp_path, keep=3)
    path = make(8).write(tmp_path, keep=3) / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    found, (problem,) = StageCheckpoint.newest(tmp_path)
    assert found is not None
    assert found.minibatches == 4
    assert "minibatch-00000008" in problem


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = make(4).write(tmp_path, keep=1)
    about = (path / checkpoint.ABOUT).read_text()
    (path / checkpoint.ABOUT).write_text(about.replace('"format": 1', '"format": 9'))
    with pytest.raises(ConfigError, match="has format 9, must be 1"):
        StageCheckpoint.read(path)


def test_a_full_disk_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(4).write(tmp_path, keep=1)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make(8).write(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["minibatch-00000004"]
    found, problems = StageCheckpoint.newest(tmp_path)
    assert found is not None
    assert not problems


def test_a_part_travels_to_the_bit() -> None:
    first = {"w": torch.randn(5), "n": torch.tensor(3), "odd": torch.ones(3, dtype=torch.uint8)}
    first["strange"] = torch.tensor([float("nan"), float("inf"), -0.0])
    second = {"w/step": torch.tensor(4.0, dtype=torch.float64)}
    numbers = to_numbers(first, second)
    assert numbers.dtype == torch.float32
    assert bool(torch.isfinite(numbers).all())
    for given, found in zip((first, second), from_numbers(numbers), strict=True):
        assert found.keys() == given.keys()
        for name, value in given.items():
            assert found[name].dtype == value.dtype
            assert found[name].numpy().tobytes() == value.numpy().tobytes()


def test_state_that_is_no_tensor_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[model.weight]["old_dirs"] = [torch.ones(2)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match="LBFGS keeps a list in old_dirs"):
        optimizer_state(optimizer, names)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is of another model"):
        make(4).load_weights(nn.Linear(2, 2))
