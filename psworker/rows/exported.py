"""A row table that `psserver export` has written, as a module of torch with all of its rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pscore.errors import ConfigError
from pscore.rows.init import initial_rows
from pscore.rows.spec import ROW_TABLE


def load_embedding(
    path: str | Path, num_embeddings: int | None = None, *, padding_idx: int | None = None
) -> torch.nn.Embedding:
    """Returns a row table that was exported, with the bits that a lookup had at that moment.

    A row without an update has its first value, a function of the table's seed and its id. All
    rows are within the table's `max_norm`, which the module does not have.

    Args:
        path: The file that `psserver export FILE --table NAME` wrote.
        num_embeddings: Number of rows; needed if the table takes any int64 as an id.
        padding_idx: The id whose row is zero, as in the table; None: there is none.

    Raises:
        ConfigError: The file is not one of a row table, or has a row that is not among
            `num_embeddings`.
        OSError: The file cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[ROW_TABLE])
            ids, rows = file.get_tensor("ids"), file.get_tensor("rows")
    except (SafetensorError, LookupError, ValueError) as problem:
        raise ConfigError(
            f"{path} is not a row table; psserver export FILE --table NAME writes one"
        ) from problem
    count = num_embeddings or about["num_embeddings"]
    if not count:
        raise ConfigError(
            f"row table {about['name']!r} has no bound on its ids: pass num_embeddings"
        )
    beyond = ids[(ids < 0) | (ids >= count)]
    if len(beyond):
        raise ConfigError(
            f"row table {about['name']!r} has {len(beyond)} updated rows beyond num_embeddings "
            f"{count}, such as id {beyond[0]}; read ids and rows of {path} with safetensors instead"
        )
    every = np.arange(count, dtype=np.uint64)
    weight = initial_rows(about["init"], about["seed"], every, rows.shape[1], about["max_norm"])
    weight[ids] = rows
    if padding_idx is not None:
        weight[padding_idx] = 0.0
    return torch.nn.Embedding(count, weight.shape[1], padding_idx, _weight=torch.from_numpy(weight))
