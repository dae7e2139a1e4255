"""Rows in checkpoints: for each row table its ids, ascending, and the rows in that order.

ids         uint64 (n,)
weights     float32 (n, dim), and each state array under its name: (n, dim) or (n, 1)
versions    int64 (n,), the update of each row

Where ids wait for their rows also `waiting_ids`, `waiting_versions` and `waiting_times`, float32
(n,): pushes with their gradient. Without such ids these arrays are empty.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import safe_open

from pscore.errors import RemoteProtocolError
from pscore.partition import Layout
from pscore.rows.optimizers import RowOptimizer
from pscore.rows.partition import slices_of
from pscore.rows.spec import ROW_TABLE, Rows
from pscore.table_spec import TableSpec, count_of
from pscore.types import ByteArray, IntArray, SliceSpec
from psserver.archives.base import Archive, Part, Room, Tensors

KINDS = {"ids": "<u8", "rows": "<f4", "versions": "<i8"}  # Arrays of a slice, by row table.
WAITING = {"waiting_ids": "<u8", "waiting_times": "<f4", "waiting_versions": "<i8"}
GONE = "gone", "waiting_gone"  # In a copy of changes: the ids that are no longer there.
IDS, WEIGHTS, VERSIONS = "ids", "weights", "versions"
FILE_DTYPES = {IDS: "U64", VERSIONS: "I64", "waiting_ids": "U64", "waiting_versions": "I64"}
# Others are F32.


class RowRoom(Room):
    """The arrays of each slice, put together at the end."""

    def __init__(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> None:
        """Starts without arrays."""
        self._spec, self._layout, self._base = spec, layout, base
        self._found: dict[str, dict[int, ByteArray]] = {}  # By array and slice.

    def target(self, part: SliceSpec, array: str, nbytes: int) -> ByteArray:
        """Returns new memory."""
        found = np.zeros(nbytes, np.uint8)
        self._found.setdefault(array, {})[part.index] = found
        return found

    def arrays(self) -> dict[str, Tensors]:
        """Returns the rows of all slices in the order of their ids."""
        optimizer = _optimizer_of(self._spec)
        self._merge()
        result: dict[str, dict[str, np.ndarray]] = {}
        for number, tensor in enumerate(self._spec.tensors):
            ids, rows, versions = (
                np.concatenate(list(self._found[f"{kind}.{number}"].values())).view(dtype)
                for kind, dtype in KINDS.items()
            )
            order = np.argsort(ids)
            columns = _columns(optimizer, tensor.shape[1])
            whole = rows.reshape(len(ids), columns[-1][2])[order]
            result.setdefault(IDS, {})[tensor.name] = ids[order]
            result.setdefault(VERSIONS, {})[tensor.name] = versions[order]
            for name, start, stop in columns:
                result.setdefault(name, {})[tensor.name] = np.ascontiguousarray(
                    whole[:, start:stop]
                )
        for number, tensor in enumerate(
            self._spec.tensors if any(map(_waits, self._found)) else ()
        ):
            nothing = {-1: np.zeros(0, np.uint8)}
            found = {
                kind: np.concatenate(
                    list(self._found.get(f"{kind}.{number}", nothing).values())
                ).view(dtype)
                for kind, dtype in WAITING.items()
            }
            order = np.argsort(found["waiting_ids"])
            for kind, array in found.items():
                result.setdefault(kind, {})[tensor.name] = array[order]
        return dict(result)

    def _merge(self) -> None:
        """Adds the rows of the base that have not changed, in slices of which changes have come."""
        changed = sorted(self._found.get("gone.0", {}))
        if not changed:
            return
        parts = RowArchive().parts(self._spec, self._layout, self._base, changed)
        former = {(part.index, array): values for part, array, values in parts}
        for number, kinds in itertools.product(range(len(self._spec.tensors)), (KINDS, WAITING)):
            ids_of, gone_of = f"{next(iter(kinds))}.{number}", f"{GONE[kinds is WAITING]}.{number}"
            for index in changed if ids_of in self._found else ():
                ids = former[index, ids_of]
                new = [self._found[name][index].view("<u8") for name in (ids_of, gone_of)]
                is_kept = ~np.isin(ids, np.concatenate(new))
                for kind in kinds if len(ids) else ():
                    name = f"{kind}.{number}"
                    kept = former[index, name].reshape(len(ids), -1)[is_kept].reshape(-1)
                    found = self._found[name]
                    found[index] = np.concatenate([kept.view(np.uint8), found[index]])


class RowArchive(Archive):
    """Rows by id: a checkpoint fits any number of shards."""

    name: ClassVar[str] = "rows"

    def weights_only(self, arrays: Sequence[str]) -> list[str]:
        """Returns the rows: a row and its state are one."""
        return [array for array in arrays if not _waits(array)]

    def room(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> Room:
        """Returns memory for the rows of all slices."""
        return RowRoom(spec, layout, base)

    def parts(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors], own: Sequence[int]
    ) -> Iterator[Part]:
        """Returns the rows that each slice owns."""
        content, optimizer = spec.content, _optimizer_of(spec)
        assert isinstance(content, Rows)
        for number, (tensor, table) in enumerate(zip(spec.tensors, content.tables, strict=True)):
            chosen = _divide(spec, layout, number, arrays)
            ids = arrays[IDS][tensor.name]
            names = [name for name, _, _ in _columns(optimizer, tensor.shape[1])]
            whole = np.concatenate([arrays[name][tensor.name] for name in names], axis=1)
            versions = arrays[VERSIONS][tensor.name]
            for index in own:
                rows, part = chosen[index], layout.slices[index]
                yield part, f"ids.{number}", ids[rows]
                yield part, f"rows.{number}", whole[rows].reshape(-1)
                yield part, f"versions.{number}", versions[rows]
            if WAITING.keys() <= arrays.keys() and table.min_count > 1:
                chosen = _divide(spec, layout, number, arrays, "waiting_")
                for index, kind in itertools.product(own, WAITING):
                    array = arrays[kind][tensor.name][chosen[index]]
                    yield layout.slices[index], f"{kind}.{number}", array

    def about(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors]
    ) -> dict[str, Any]:
        """Returns the number of rows in each slice, by row table, and of ids that wait."""
        numbers = range(len(spec.tensors))
        found = {"rows": [_count(_divide(spec, layout, n, arrays)) for n in numbers]}
        if WAITING.keys() <= arrays.keys():
            found["waiting"] = [
                _count(_divide(spec, layout, n, arrays, "waiting_")) for n in numbers
            ]
        return found

    def staged(
        self, spec: TableSpec, parts: Sequence[SliceSpec], about: Mapping[str, Any]
    ) -> dict[int, dict[str, tuple[str, int]]]:
        """Returns arrays for the announced numbers of rows.

        Raises:
            RemoteProtocolError: There are more than a slice may have.
        """
        content, optimizer = spec.content, _optimizer_of(spec)
        assert isinstance(content, Rows)
        found: dict[int, dict[str, tuple[str, int]]] = {part.index: {} for part in parts}
        for number, tensor in enumerate(spec.tensors):
            width = {"rows": optimizer.width(tensor.shape[1])}
            for part in parts:
                what = f"the rows of {tensor.name!r} in slice {part.index}"
                kinds = {"rows": (KINDS, content.rows_max(number, tensor, part))}
                if content.tables[number].min_count > 1:
                    kinds["waiting"] = WAITING, content.waiting_max(number, tensor, part)
                for name, (of_name, most) in kinds.items():
                    counts = about.get(name)
                    count = 0 if counts is None else count_of(counts[number][part.index], what)
                    if count > most:
                        raise RemoteProtocolError(f"{what} are {count}, more than it has room for")
                    for kind, dtype in of_name.items():
                        numel = count * width.get(kind, 1)
                        found[part.index][f"{kind}.{number}"] = dtype, numel
        return found

    def exported(
        self, spec: TableSpec, arrays: Mapping[str, Tensors], tensor: str
    ) -> tuple[Tensors, dict[str, str]]:
        """Returns `ids`, int64 as in torch, and `rows`; other rows follow from the metadata."""
        content = spec.content
        assert isinstance(content, Rows)
        (number,) = [n for n, each in enumerate(spec.tensors) if each.name == tensor]
        table, shape = content.tables[number], spec.tensors[number].shape
        about = {
            "name": tensor,
            "num_embeddings": shape[0],
            "init": table.init,
            "seed": table.seed,
            "max_norm": table.max_norm,
        }
        ids, rows = (arrays[array][tensor] for array in (IDS, WEIGHTS))
        return {"ids": ids.view(np.int64), "rows": rows}, {ROW_TABLE: json.dumps(about)}

    def require_file(self, file: Path, array: str, spec: TableSpec) -> None:
        """Refuses a file without the row tables.

        Raises:
            ValueError: One is missing, or of another shape.
        """
        optimizer = _optimizer_of(spec)
        with safe_open(file, framework="numpy") as content:
            for name in {tensor.name for tensor in spec.tensors} ^ set(content.keys()):
                raise ValueError(f"{file.name} and the declaration differ in tensor {name!r}")
            for tensor in spec.tensors:
                columns = _columns(optimizer, tensor.shape[1])
                widths = {name: [stop - start] for name, start, stop in columns}
                about = content.get_slice(tensor.name)
                wanted = widths.get(array, []), FILE_DTYPES.get(array, "F32")
                if (about.get_shape()[1:], about.get_dtype()) != wanted:
                    raise ValueError(f"{tensor.name!r} in {file.name} is not of its row table")


def _waits(array: str) -> bool:
    """Returns whether an array of a slice is of ids that wait."""
    return array.startswith("waiting_")


def _count(chosen: Sequence[IntArray]) -> list[int]:
    return [len(places) for places in chosen]


def _divide(
    spec: TableSpec,
    layout: Layout,
    number: int,
    arrays: Mapping[str, Tensors],
    prefix: str = "",
) -> list[IntArray]:
    """Returns the places of the rows of each slice, or of the ids that wait there."""
    content, tensor = spec.content, spec.tensors[number]
    assert isinstance(content, Rows)
    ids = arrays[prefix + IDS][tensor.name]
    owners = slices_of(ids, content.tables[number].seed, len(layout.slices))
    return [np.flatnonzero(owners == part.index) for part in layout.slices]


def _optimizer_of(spec: TableSpec) -> RowOptimizer:
    optimizer = spec.content.optimizer(spec.optimizer)
    assert isinstance(optimizer, RowOptimizer)
    return optimizer


def _columns(optimizer: RowOptimizer, dim: int) -> list[tuple[str, int, int]]:
    """Returns the arrays that a row with its state has: name, first column, last one and 1."""
    found, start = [(WEIGHTS, 0, dim)], dim
    for name, width in zip(optimizer.state_names, optimizer.state_widths(dim), strict=True):
        found.append((name, start, start + width))
        start += width
    return found
