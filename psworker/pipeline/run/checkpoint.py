"""A pipeline's checkpoint: the whole model at one minibatch, by the names of the unsplit model.

    DIR/minibatch-00000040/model.safetensors       parameters and buffers
    DIR/minibatch-00000040/optimizer.safetensors   NAME/KEY: the optimizer's state of parameter NAME
    DIR/minibatch-00000040/pipeline.json           minibatches behind it, and the SHA-256 of both

A folder gets its name when all of it is on the disk, so there is never half a checkpoint under it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from pscore.errors import ConfigError

Tensors = dict[str, torch.Tensor]
FORMAT = 1
MODEL, OPTIMIZER, ABOUT = "model.safetensors", "optimizer.safetensors", "pipeline.json"
PREFIX = "minibatch-"


@dataclass(frozen=True, slots=True)
class StageCheckpoint:
    """The model after some minibatches."""

    minibatches: int  # Minibatches behind it.
    weights: Tensors  # Parameters and buffers, by name.
    optimizer: Tensors  # State of the optimizers, by parameter's name, a slash and the key.

    def write(self, folder: Path, keep: int) -> Path:
        """Writes it; returns its own folder in `folder`.

        Args:
            folder: Holds the checkpoints of a pipeline.
            keep: Newest checkpoints that stay there, 1 or more.

        Raises:
            OSError: The disk is full; former checkpoints are still there.
        """
        path = folder / f"{PREFIX}{self.minibatches:08d}"
        draft = folder / f".{path.name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir(parents=True)
            files = {MODEL: save(self.weights), OPTIMIZER: save(self.optimizer)}
            about = {
                "format": FORMAT,
                "minibatches": self.minibatches,
                "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
            }
            files[ABOUT] = f"{json.dumps(about, indent=1)}\n".encode()
            for name, data in files.items():
                _write(draft / name, data)
            shutil.rmtree(path, ignore_errors=True)  # By a run that began before it.
            os.replace(draft, path)
            _sync(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for older in sorted(folder.glob(f"{PREFIX}*"), reverse=True)[keep:]:
            shutil.rmtree(older, ignore_errors=True)
        return path

    @classmethod
    def read(cls, path: Path) -> StageCheckpoint:
        """Returns the checkpoint in a folder of its own.

        Raises:
            ConfigError: It is damaged, or of another format.
        """
        try:
            about = json.loads((path / ABOUT).read_bytes())
            if about["format"] != FORMAT:
                raise ConfigError(f"{path} has format {about['format']}, must be {FORMAT}")
            files = {name: (path / name).read_bytes() for name in (MODEL, OPTIMIZER)}
            for name, data in files.items():
                if hashlib.sha256(data).hexdigest() != about["sha256"][name]:
                    raise ConfigError(f"{path / name} is damaged: its hash is another")
            return cls(int(about["minibatches"]), load(files[MODEL]), load(files[OPTIMIZER]))
        except (OSError, TypeError, KeyError, RecursionError, SafetensorError) as problem:
            raise ConfigError(f"{path} is not a pipeline's checkpoint: {problem!r}") from problem
        except ValueError as problem:
            raise ConfigError(f"{path} cannot be read: {problem}") from problem

    @classmethod
    def newest(cls, folder: Path) -> tuple[StageCheckpoint | None, list[str]]:
        """Returns the newest good checkpoint of a folder, and the problems of newer ones."""
        problems: list[str] = []
        for path in sorted(folder.glob(f"{PREFIX}*"), reverse=True):
            try:
                return cls.read(path), problems
            except ConfigError as problem:
                problems.append(str(problem))
        return None, problems

    def load_weights(self, model: nn.Module) -> None:
        """Copies the weights into a model; raises ConfigError if it has other tensors."""
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as problem:
            raise ConfigError(f"the checkpoint is of another model: {problem}") from problem

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Copies the state of an optimizer's parameters into it.

        Args:
            optimizer: Optimizer of a stage; its hyperparameters stay.
            names: Name in the whole model of each parameter, by `id`.
        """
        whole = optimizer.state_dict()
        state: dict[int, dict[str, torch.Tensor]] = {}
        for number, name in _numbered(optimizer, names):
            entry = {
                key.rpartition("/")[2]: value
                for key, value in self.optimizer.items()
                if key.rpartition("/")[0] == name
            }
            if entry:
                state[number] = entry
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Tensors:
    """Returns the state of an optimizer's parameters, as a checkpoint has it.

    Args:
        names: Name in the whole model of each parameter, by `id`.

    Raises:
        ConfigError: Its state is not one of tensors and numbers.
    """
    state = optimizer.state_dict()["state"]
    arrays = {}
    for number, name in _numbered(optimizer, names):
        for key, value in state.get(number, {}).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor | int | float):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} in {key}, must be "
                    "a tensor or a number"
                )
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
            arrays[f"{name}/{key}"] = tensor.detach().contiguous().clone()
    return arrays


def to_numbers(weights: Tensors, optimizer: Tensors) -> torch.Tensor:
    """Returns a stage's part of a checkpoint as one vector, `(n,) float32`, to send it."""
    parts = {f"w/{name}": value for name, value in weights.items()}
    data = save(parts | {f"o/{name}": value for name, value in optimizer.items()})
    data = len(data).to_bytes(8, "little") + data
    # Two bytes in each number: every whole number below 2^16 is exact in float32, and none is NaN.
    pairs = np.frombuffer(data + b"\0" * (len(data) % 2), np.uint16)
    return torch.from_numpy(pairs.astype(np.float32))


def from_numbers(numbers: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Returns weights and optimizer state from a vector of `to_numbers`."""
    data = numbers.numpy().astype(np.uint16).tobytes()
    tensors = load(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return (
        {name[2:]: value for name, value in tensors.items() if name.startswith("w/")},
        {name[2:]: value for name, value in tensors.items() if name.startswith("o/")},
    )


def _numbered(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Yields the number of each parameter in torch's state dict, and its name."""
    listed: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(listed):
        yield number, names[id(parameter)]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
