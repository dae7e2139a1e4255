"""Stores by the content of their table (pscore/contents)."""

from __future__ import annotations

from psserver.stores.base import StoreKind
from psserver.stores.flat import FlatKind
from psserver.stores.rows import RowKind

KINDS: dict[str, StoreKind] = {kind.name: kind for kind in (FlatKind(), RowKind())}

__all__ = ["KINDS", "StoreKind", "kind_of"]


def kind_of(content: str) -> StoreKind:
    """Returns the kind of the stores of a table with that content."""
    return KINDS[content]
