"""A grid of a rows and b columns whose borders are joined: each of four neighbours has weight 1/5.

As in BlueFog (repository Bluefog-Lib/bluefog, 2021), whose mesh grid has open borders. a is the
largest divisor of n that is at most its root. A neighbour that is the same in both senses of a
direction counts double; in a grid of one row (n is prime) two of the four are the worker itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from pscore.graphs.base import Edge, as_edges

SENSES = (-1, 1)


def edges(members: Sequence[int], step: int) -> list[Edge]:
    """Returns the edges among `members`, which are ranks in order; the same at every `step`."""
    num = len(members)
    rows = max((a for a in range(1, math.isqrt(num) + 1) if num % a == 0), default=1)
    columns = num // rows
    weights: defaultdict[tuple[int, int], float] = defaultdict(float)
    for place in range(num):
        row, column = divmod(place, columns)
        for sense in SENSES:
            weights[place, (row + sense) % rows * columns + column] += 1 / 5
            weights[place, row * columns + (column + sense) % columns] += 1 / 5
    return as_edges(members, weights)
