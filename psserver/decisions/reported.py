"""Checks the values that a worker reports of its training, before they are kept; no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pscore.types import REPORTED_ADDED, REPORTED_LENGTH_MAX, REPORTED_MAX


def accepted(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values that may be shown, in the order of their names.

    Left out are values that are not finite, names that are no identifiers in ASCII or too long, and
    any beyond the largest number of values: a worker that keeps the rules sends none of these.
    """
    good = {
        name: value
        for name, value in sorted(values.items())
        if math.isfinite(value)
        and len(name) <= REPORTED_LENGTH_MAX
        and name.isascii()
        and name.isidentifier()
    }
    return dict(list(good.items())[: REPORTED_MAX + REPORTED_ADDED])
