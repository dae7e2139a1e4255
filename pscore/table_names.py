"""The names of tables that follow another one, or go beside it."""

from __future__ import annotations

from collections.abc import Container

GROWN = "+"  # In the name of a table that follows another: `model+1` after `model`.
BESIDE = "/"  # In the name of a table with the steps of another: `model/rows` of `model`.
TENSOR = "tensor."  # Begin of the name of a named tensor's table.
LEFT_FOR_GOOD = 1 << 30  # Number of an absence from a table for the one that follows it.


def next_name(name: str) -> str:
    """Returns the name of the table that follows `name`."""
    stem, _, number = name.partition(GROWN)
    return f"{stem}{GROWN}{int(number or 0) + 1}"


def newest(name: str, known: Container[str]) -> str:
    """Returns the last table that follows `name` among those known; `name` if none does."""
    while next_name(name) in known:
        name = next_name(name)
    return name
