"""Parts of a flat vector in checkpoints: each array is one float32 tensor a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from pscore.errors import ConfigError, RemoteProtocolError
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, FloatArray, SliceSpec
from psserver.archives.base import Archive, Part, Room, Tensors
from psserver.engine.residuals import is_residual

NAME_LENGTH_MAX = 256


class FlatRoom(Room):
    """Flat vectors, one for each array."""

    def __init__(self, spec: TableSpec, layout: Layout) -> None:
        self._spec, self._layout = spec, layout
        self._flats: dict[str, FloatArray] = {}

    def target(self, part: SliceSpec, array: str, nbytes: int) -> ByteArray:
        """Returns a part of a flat vector."""
        flat = self._flats.setdefault(array, np.zeros(self._layout.numel, dtype=np.float32))
        return flat[part.start : part.stop].view(np.uint8)

    def arrays(self) -> dict[str, Tensors]:
        """Returns the parts of each parameter."""
        return {
            _known_as(self._spec, array): {
                tensor.name: flat[offset : offset + tensor.numel].reshape(tensor.shape)
                for tensor, offset in zip(self._layout.tensors, self._layout.offsets, strict=True)
                if tensor.compress or not is_residual(array)
            }
            for array, flat in self._flats.items()
        }


class FlatArchive(Archive):
    """Weights, optimizer state, a mode's memory and residuals, each as long as the model."""

    name = "flat"

    def weights_only(self, arrays: Sequence[str]) -> list[str]:
        """Returns the weights."""
        return ["weights"]

    def room(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> Room:
        """Returns flat vectors."""
        return FlatRoom(spec, layout)

    def parts(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors], own: Sequence[int]
    ) -> Iterator[Part]:
        """Returns the slices of each array, and reads each tensor once."""
        for array, tensors in arrays.items():
            index, tensor = -1, np.zeros(0, dtype=np.float32)
            for part in [layout.slices[number] for number in own]:
                if is_residual(array) and not part.compress:
                    continue
                flat = np.zeros(part.numel, dtype=np.float32)
                for segment in part.segments:
                    if segment.tensor != index:
                        index = segment.tensor
                        tensor = tensors[layout.tensors[index].name].reshape(-1)
                    start = segment.tensor_start
                    stop = start + segment.stop - segment.start
                    flat[segment.start : segment.stop] = tensor[start:stop]
                yield part, _name_on_shards(spec, array), flat

    def about(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors]
    ) -> dict[str, Any]:
        """Returns the names of the arrays; their lengths are those of the slices."""
        return {"arrays": [_name_on_shards(spec, array) for array in arrays]}

    def staged(
        self, spec: TableSpec, parts: Sequence[SliceSpec], about: Mapping[str, Any]
    ) -> dict[int, dict[str, tuple[str, int]]]:
        """Returns arrays as long as the slices; one that is not compressed has no residuals.

        Raises:
            RemoteProtocolError: An array is missing, or is not one that a shard keeps.
        """
        names = frozenset(str(name) for name in about["arrays"])
        if spec.optimizer not in OPTIMIZERS:
            raise RemoteProtocolError(
                f"table {spec.name!r} of the checkpoint: optimizer {spec.optimizer!r}"
            )
        states = OPTIMIZERS[spec.optimizer].state_names
        wanted = {"weights", *(f"state.{number}" for number in range(len(states)))}
        for name in sorted(names ^ wanted):
            if name in wanted:
                raise RemoteProtocolError(f"table {spec.name!r} of the checkpoint lacks {name!r}")
            is_kept = name.startswith("memory.") or is_residual(name, spec.compressor)
            if not is_kept or len(name) > NAME_LENGTH_MAX:
                raise RemoteProtocolError(
                    f"array {name[:NAME_LENGTH_MAX]!r} of table {spec.name!r} of the checkpoint is "
                    "not one that a shard keeps"
                )
        return {
            part.index: {
                name: ("<f4", part.numel)
                for name in names
                if part.compress or not is_residual(name)
            }
            for part in parts
        }

    def exported(
        self, spec: TableSpec, arrays: Mapping[str, Tensors], tensor: str, since: Path | None = None
    ) -> tuple[Tensors, dict[str, str]]:
        """Returns the parameter under its name.

        Raises:
            ConfigError: Changes are wanted.
        """
        if since is not None:
            raise ConfigError(f"{tensor!r} is no row table; leave --since out: it changes whole")
        return {tensor: arrays["weights"][tensor]}, {}

    def require_file(self, file: Path, array: str, spec: TableSpec) -> None:
        """Raises ValueError for a file without the parameters of the table."""
        wanted = {
            tensor.name: list(tensor.shape)
            for tensor in spec.tensors
            if tensor.compress or not is_residual(array)
        }
        with safe_open(file, framework="numpy") as content:
            for name in wanted.keys() ^ set(content.keys()):
                raise ValueError(f"{file.name} and the declaration differ in tensor {name!r}")
            for name, shape in wanted.items():
                about = content.get_slice(name)
                if (about.get_shape(), about.get_dtype()) != (shape, "F32"):
                    raise ValueError(f"{name!r} in {file.name} is not of shape {shape} and float32")


def _known_as(spec: TableSpec, array: str) -> str:
    """Returns the name of an array in files: `state.0` is what torch calls it."""
    if is_residual(array):
        return array
    kind, _, name = array.partition(".")
    return OPTIMIZERS[spec.optimizer].state_names[int(name)] if kind == "state" else name or kind


def _name_on_shards(spec: TableSpec, array: str) -> str:
    """Returns what shards call an array in a file; `_known_as` the other way."""
    states = OPTIMIZERS[spec.optimizer].state_names
    if array == "weights" or is_residual(array):
        return array
    return f"state.{states.index(array)}" if array in states else f"memory.{array}"
