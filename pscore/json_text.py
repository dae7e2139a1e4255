"""JSON as every parser reads it: a number that is not finite becomes null.

Python would write NaN and Infinity, which are no JSON: one such number, and a strict parser refuses
the whole text.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pscore.errors import ConfigError

COUNT_MAX = 1 << 48  # Largest number of steps or pushes that a record may name.
SHOWN_MAX = 40  # Characters of a wrong value in a message.


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


def count_of(value: object, what: str, *, least: int = 0, most: int = COUNT_MAX) -> int:
    """Returns a number that a record gives, if it is an integer in a range.

    Args:
        what: Its name in the message.

    Raises:
        ConfigError: It is not.
    """
    if type(value) is not int or not least <= value <= most:
        shown = repr(value)[:SHOWN_MAX]
        raise ConfigError(f"{what} is {shown}, must be an integer in {least}..{most}")
    return value


def _finite(value: Any) -> Any:
    """Returns the value with None in the place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
