"""A row table that `psserver export` has written, as a module of torch with all of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pscore.errors import ConfigError
from pscore.rows.init import initial_rows
from pscore.rows.spec import ROW_TABLE

DIGEST = "row_table_digest"  # Attribute of a module: the digest of the export that it equals.


def load_embedding(
    path: str | Path, num_embeddings: int | None = None, *, padding_idx: int | None = None
) -> torch.nn.Embedding:
    """Returns a row table that was exported, with the bits that a lookup had at that moment.

    A row without an update has its first value, a function of the table's seed and its id. All
    rows are within the table's `max_norm`, which the module does not have.

    Args:
        path: The file that `psserver export FILE --table NAME` wrote.
        num_embeddings: Number of rows; needed if the table takes any int64 as an id.
        padding_idx: The id whose row is zero; None: that of the table.

    Raises:
        ConfigError: The file is not one of a row table, or has a row that is not among
            `num_embeddings`.
        OSError: The file cannot be read.
    """
    about, found = _read(path)
    if "since" in about:
        raise ConfigError(f"{path} has changes only; pass it to update_embedding")
    ids, rows = found["ids"], found["rows"]
    count = num_embeddings or about["num_embeddings"]
    if not count:
        raise ConfigError(
            f"row table {about['name']!r} has no bound on its ids: pass num_embeddings"
        )
    _require_within(about["name"], ids, count, path)
    every = np.arange(count, dtype=np.uint64)
    weight = initial_rows(about["init"], about["seed"], every, rows.shape[1], about["max_norm"])
    weight[ids] = rows
    if padding_idx is None and about.get("padding_idx") in range(count):
        padding_idx = about["padding_idx"]
    if padding_idx is not None:
        weight[padding_idx] = 0.0
    weights = torch.from_numpy(weight)
    module = torch.nn.Embedding(count, weight.shape[1], padding_idx, _weight=weights)
    setattr(module, DIGEST, about["digest"])
    return module


def update_embedding(module: torch.nn.Embedding, path: str | Path) -> None:
    """Sets the rows that have changed since the export that a module was made of.

    Rows that have gone from the table are their first values again. The module then is that of an
    export made at the same moment, so the changes since that one may follow.

    Args:
        module: Made by `load_embedding`, on any device.
        path: The file that `psserver export FILE --table NAME --since OLD` wrote.

    Raises:
        ConfigError: The changes are not those since the module's export, or have a row that it
            has no place for; it is not changed.
        OSError: The file cannot be read.
    """
    about, found = _read(path)
    if "since" not in about:
        raise ConfigError(f"{path} has a whole table; pass it to load_embedding")
    if getattr(module, DIGEST, None) != about["since"]:
        raise ConfigError(
            f"{path} has the changes since another export of row table {about['name']!r}; "
            "update modules in the order of the exports, or load a whole one"
        )
    ids, rows, gone = found["ids"], found["rows"], found["gone"]
    _require_within(about["name"], np.concatenate([ids, gone]), module.num_embeddings, path)
    first = gone.view(np.uint64)
    again = initial_rows(about["init"], about["seed"], first, rows.shape[1], about["max_norm"])
    with torch.no_grad():
        for places, values in ((ids, rows), (gone, again)):
            module.weight[torch.from_numpy(places)] = torch.from_numpy(values).to(module.weight)
        if module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0
    setattr(module, DIGEST, about["digest"])


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the declaration of an exported table, and its arrays."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[ROW_TABLE])
            names = ["ids", "rows", *(["gone"] if "since" in about else [])]
            return about, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, LookupError, ValueError) as problem:
        raise ConfigError(
            f"{path} is not a row table; psserver export FILE --table NAME writes one"
        ) from problem


def _require_within(name: str, ids: np.ndarray, count: int, path: str | Path) -> None:
    """Refuses rows of a table that a module has no place for."""
    beyond = ids[(ids < 0) | (ids >= count)]
    if len(beyond):
        raise ConfigError(
            f"row table {name!r} has {len(beyond)} updated rows beyond num_embeddings "
            f"{count}, such as id {beyond[0]}; read ids and rows of {path} with safetensors instead"
        )
