"""Overlaps of rounds by name. A new one is one file here and one line in `OVERLAPS`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pscore.overlaps.base import Overlap
from pscore.overlaps.blend import Blend
from pscore.overlaps.eager import Eager
from pscore.overlaps.late import Late
from pscore.overlaps.mirror import Mirror

OVERLAPS: dict[str, type[Overlap]] = {
    overlap.name: overlap for overlap in (Late, Blend, Eager, Mirror)
}
NONE = "none"  # Rounds whose end waits for the answer.

__all__ = ["NONE", "OVERLAPS", "Overlap", "make_overlap"]


def make_overlap(name: str, arguments: Mapping[str, Any]) -> Overlap | None:
    """Returns the overlap `name`, given those of a rule's `arguments` that it takes; or None.

    Args:
        name: One of `OVERLAPS`, or `none`.
    """
    if name == NONE:
        return None
    factory = OVERLAPS[name]
    taken = inspect.signature(factory).parameters
    return factory(**{key: value for key, value in arguments.items() if key in taken})
