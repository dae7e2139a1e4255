"""Rows in checkpoints: for each row table its ids, ascending, and the rows in that order.

ids         uint64 (n,)
weights     float32 (n, dim), and each state array under its name: (n, dim) or (n, 1)
versions    int64 (n,), the update of each row

Where ids wait for their rows also `waiting_ids`, `waiting_versions` and `waiting_times`, float32
(n,): pushes with their gradient. Without such ids these arrays are empty.

Changes since an earlier copy have the same arrays of the rows that have changed, and `gone` and
`waiting_gone`, uint64 (n,): ids that are no longer there, or are there again.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pscore.errors import ConfigError, RemoteProtocolError
from pscore.json_text import count_of
from pscore.partition import Layout
from pscore.rows.optimizers import RowOptimizer
from pscore.rows.partition import slices_of
from pscore.rows.spec import ROW_TABLE, Rows
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, IntArray, SliceSpec
from psserver.archives.base import Archive, Part, Room, Tensors

KINDS = {"ids": "<u8", "rows": "<f4", "versions": "<i8"}  # Arrays of a slice, by row table.
WAITING = {"waiting_ids": "<u8", "waiting_times": "<f4", "waiting_versions": "<i8"}
GONE = "gone", "waiting_gone"  # In a copy of changes: the ids that are no longer there.
IDS, WEIGHTS, VERSIONS = "ids", "weights", "versions"
NOTHING = np.zeros(0, np.uint8)
FILE_DTYPES = {IDS: "U64", VERSIONS: "I64", "waiting_ids": "U64", "waiting_versions": "I64"}
# Others are F32.


class RowRoom(Room):
    """The arrays of each slice, put together at the end."""

    def __init__(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> None:
        self._spec, self._layout, self._base = spec, layout, base
        self._found: dict[str, dict[int, ByteArray]] = {}  # By array and slice.
        self._changes: Mapping[str, Tensors] | None = None

    def target(self, part: SliceSpec, array: str, nbytes: int) -> ByteArray:
        """Returns new memory."""
        found = np.zeros(nbytes, np.uint8)
        self._found.setdefault(array, {})[part.index] = found
        return found

    def arrays(self) -> Mapping[str, Tensors]:
        """Returns the rows of all slices in the order of their ids."""
        optimizer = _optimizer_of(self._spec)
        result: dict[str, dict[str, np.ndarray]] = {}
        for number, tensor in enumerate(self._spec.tensors):
            ids, rows, versions = (
                self._all(f"{kind}.{number}").view(dtype) for kind, dtype in KINDS.items()
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
        has_waiting = any(_waits(name) and not name.startswith(GONE[1]) for name in self._found)
        for number, tensor in enumerate(self._spec.tensors if has_waiting else ()):
            found = {
                kind: self._all(f"{kind}.{number}").view(dtype) for kind, dtype in WAITING.items()
            }
            order = np.argsort(found["waiting_ids"])
            for kind, array in found.items():
                result.setdefault(kind, {})[tensor.name] = array[order]
        if f"{GONE[0]}.0" not in self._found:
            return dict(result)
        for name, ids_of in zip(GONE, (IDS, "waiting_ids"), strict=True):
            if ids_of in result:
                result[name] = self._gone(name, ids_of)
        self._changes = result
        return Joined(self._base, result)

    @property
    def changes(self) -> Mapping[str, Tensors] | None:
        """The changes since the base; None: all slices have given all their rows."""
        return self._changes

    def _all(self, array: str) -> np.ndarray:
        """Returns an array of all slices, one behind the other, `(nbytes,) uint8`."""
        return np.concatenate([NOTHING, *self._found.get(array, {}).values()])

    def _gone(self, name: str, ids_of: str) -> dict[str, np.ndarray]:
        """Returns the ids that are no longer there: of slices with all rows, all of the base."""
        changed = self._found[f"{GONE[0]}.0"]
        whole = [part.index for part in self._layout.slices if part.index not in changed]
        content = self._spec.content
        gone: dict[str, np.ndarray] = {}
        assert isinstance(content, Rows)
        for number, (tensor, table) in enumerate(
            zip(self._spec.tensors, content.tables, strict=True)
        ):
            ids = self._all(f"{name}.{number}").view("<u8")
            if whole and ids_of in self._base:
                former = self._base[ids_of][tensor.name]
                owners = slices_of(former, table.seed, len(self._layout.slices))
                ids = np.concatenate([ids, former[np.isin(owners, whole)]])
            gone[tensor.name] = np.unique(ids)
        return gone


class Joined(Mapping[str, Tensors]):
    """The rows of an earlier copy and the changes since, put together when they are read."""

    def __init__(self, base: Mapping[str, Tensors], changes: Mapping[str, Tensors]) -> None:
        self._base, self._changes = base, changes
        self._orders: dict[tuple[str, str], tuple[np.ndarray, IntArray]] = {}

    def __getitem__(self, array: str) -> Tensors:
        """Returns an array of each row table."""
        if array not in self._changes or array in GONE:
            raise KeyError(array)
        return _Column(self, array, list(self._changes[array]))

    def __iter__(self) -> Iterator[str]:
        return (array for array in self._changes if array not in GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def read(self, array: str, tensor: str) -> np.ndarray:
        """Returns an array of one row table, in the order of its ids."""
        new = self._changes[array][tensor]
        if array not in self._base:
            return new
        is_kept, order = self._order("waiting_" if _waits(array) else "", tensor)
        return np.concatenate([self._base[array][tensor][is_kept], new])[order]

    def _order(self, prefix: str, tensor: str) -> tuple[np.ndarray, IntArray]:
        """Returns which ids of the base stay, and the order of these and the new ones."""
        if (prefix, tensor) not in self._orders:
            former, new = (of[prefix + IDS][tensor] for of in (self._base, self._changes))
            is_kept = np.ones(len(former), np.bool_)
            for ids in (new, self._changes[prefix + GONE[0]][tensor]) if len(former) else ():
                places = np.minimum(np.searchsorted(former, ids), len(former) - 1)
                is_kept[places[former[places] == ids]] = False
            order = np.argsort(np.concatenate([former[is_kept], new]), kind="stable")
            self._orders[prefix, tensor] = is_kept, order
        return self._orders[prefix, tensor]


class _Column(Mapping[str, np.ndarray]):
    """One array of joined rows, by row table."""

    def __init__(self, joined: Joined, array: str, tensors: Sequence[str]) -> None:
        self._joined, self._array, self._tensors = joined, array, tensors

    def __getitem__(self, tensor: str) -> np.ndarray:
        return self._joined.read(self._array, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _followed(first: Mapping[str, Tensors], second: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Returns the changes of two copies as those of one."""
    both: dict[str, Tensors] = {
        array: dict(tensors) for array, tensors in Joined(first, second).items()
    }
    for name in GONE:
        if name in second:
            former = first.get(name, {})
            both[name] = {
                tensor: np.union1d(ids, former[tensor]) if tensor in former else ids
                for tensor, ids in second[name].items()
            }
    return both


class RowArchive(Archive):
    """Rows by id: a checkpoint fits any number of shards."""

    name = "rows"

    def weights_only(self, arrays: Sequence[str]) -> list[str]:
        """Returns the rows: a row and its state are one."""
        return [array for array in arrays if not _waits(array)]

    def room(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> Room:
        """Returns memory for the rows of all slices."""
        return RowRoom(spec, layout, base)

    def joined(
        self, base: Mapping[str, Tensors], changes: Sequence[Mapping[str, Tensors]]
    ) -> Mapping[str, Tensors]:
        """Returns the rows of a copy with the changes that followed it."""
        return Joined(base, functools.reduce(_followed, changes)) if changes else base

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
                        raise RemoteProtocolError(
                            f"{what} are {count}, and it has room for {most}; give the table more "
                            f"with `psserver restore --max-rows {tensor.name}=N`"
                        )
                    for kind, dtype in of_name.items():
                        numel = count * width.get(kind, 1)
                        found[part.index][f"{kind}.{number}"] = dtype, numel
        return found

    def exported(
        self, spec: TableSpec, arrays: Mapping[str, Tensors], tensor: str, since: Path | None = None
    ) -> tuple[Tensors, dict[str, str]]:
        """Returns `ids`, int64 as in torch, and `rows`; other rows follow from the metadata.

        With `since` they are those that differ from that file, and `gone` has the ids of its rows
        that are no longer there.
        """
        content = spec.content
        assert isinstance(content, Rows)
        (number,) = [n for n, each in enumerate(spec.tensors) if each.name == tensor]
        table, shape = content.tables[number], spec.tensors[number].shape
        ids, rows = (arrays[array][tensor] for array in (IDS, WEIGHTS))
        about = {
            "name": tensor,
            "num_embeddings": shape[0],
            "init": table.init,
            "seed": table.seed,
            "max_norm": table.max_norm,
            "padding_idx": table.padding_idx,
        }
        digest = hashlib.sha256(np.ascontiguousarray(ids).data)
        digest.update(np.ascontiguousarray(rows).data)
        found: Tensors = {"ids": ids.view(np.int64), "rows": rows}
        more = {"digest": digest.hexdigest()}
        if since is not None:
            former, more["since"] = _read_export(since, about)
            found = _changed(former, found)
        return found, {ROW_TABLE: json.dumps(about | more)}

    def require_file(self, file: Path, array: str, spec: TableSpec) -> None:
        """Raises ValueError for a file without the row tables."""
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


def _read_export(path: Path, about: Mapping[str, Any]) -> tuple[Tensors, str]:
    """Returns ids and rows of an exported table, and their digest.

    Args:
        about: The declaration that the table must have.

    Raises:
        ConfigError: It is not one, or of another table.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            theirs = json.loads((file.metadata() or {})[ROW_TABLE])
            found = {name: file.get_tensor(name) for name in ("ids", "rows")}
    except (SafetensorError, LookupError, ValueError, OSError) as problem:
        raise ConfigError(
            f"{path} is not a row table; psserver export FILE --table NAME writes one"
        ) from problem
    if "since" in theirs or not about.items() <= theirs.items():
        raise ConfigError(f"{path} does not have the whole of row table {about['name']!r}")
    return found, theirs["digest"]


def _changed(former: Tensors, now: Tensors) -> dict[str, np.ndarray]:
    """Returns the rows of an exported table that differ from an earlier one, and the ids gone."""
    old, new = (each["ids"].view(np.uint64) for each in (former, now))
    places: dict[str, np.ndarray] = {}
    for name, some, others in (("new", new, old), ("old", old, new)):
        at = np.minimum(np.searchsorted(others, some), max(len(others) - 1, 0))
        is_there = others[at] == some if len(others) else np.zeros(len(some), np.bool_)
        places[name] = np.where(is_there, at, -1)
    is_same = places["new"] >= 0
    is_same[is_same] = (now["rows"][is_same] == former["rows"][places["new"][is_same]]).all(axis=1)
    return {
        "ids": now["ids"][~is_same],
        "rows": now["rows"][~is_same],
        "gone": former["ids"][places["old"] < 0],
    }


def _waits(array: str) -> bool:
    """Returns whether an array of a slice is of ids that wait."""
    return array.startswith("waiting_")


def _count(chosen: Sequence[IntArray]) -> list[int]:
    return [len(places) for places in chosen]


def _divide(
    spec: TableSpec, layout: Layout, number: int, arrays: Mapping[str, Tensors], prefix: str = ""
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
