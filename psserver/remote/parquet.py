"""An exported row table as Parquet, columns `id` and `row`, by pyarrow if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pscore.errors import ConfigError

SUFFIX = ".parquet"
COLUMNS = {"ids", "rows"}


def save(tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes `id`, int64, and `row`, a list of float32 of fixed length; the schema has `metadata`.

    Args:
        tensors: `ids`, `(n,) int64`, and `rows`, `(n, dim) float32`.

    Raises:
        ConfigError: pyarrow is not installed, or the tensors are others.
        OSError: It cannot be written.
    """
    if set(tensors) != COLUMNS:
        raise ConfigError(
            f"a {SUFFIX} file has all rows of one row table: pass --table, and no --since; any "
            "other export is a .safetensors file"
        )
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as problem:
        raise ConfigError(
            f"a {SUFFIX} file needs pyarrow, which is not installed: pip install pyarrow, or write "
            "a .safetensors file"
        ) from problem
    ids, rows = tensors["ids"], np.ascontiguousarray(tensors["rows"])
    values = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.ravel()), rows.shape[1])
    table = arrow.table({"id": arrow.array(ids), "row": values})
    parquet.write_table(table.replace_schema_metadata(dict(metadata)), path)
