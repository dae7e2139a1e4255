"""JSON as every parser reads it: a number that is not finite becomes null.

Python would write NaN and Infinity, which are no JSON: one such number, and a strict parser refuses
the whole text.
"""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns a value of numbers, texts, lists and dictionaries as JSON.

    Args:
        value: The value, in which numbers need not be finite.
        indent: Spaces for each level; None: all in one line.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Returns the value with None in the place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
