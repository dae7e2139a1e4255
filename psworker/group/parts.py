"""Which process of a group pushes and pulls which slices."""

from __future__ import annotations

from collections.abc import Sequence


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Returns the local rank that owns each slice: each rank has a contiguous part.

    The parts are as equal as whole slices allow.

    Args:
        numels: Elements of each slice, in the order of the flat vector.
        size: Number of processes.
    """
    total, before, ranks = sum(numels), 0, []
    for numel in numels:
        middle = before + numel / 2  # The owner of a slice's middle has the slice.
        ranks.append(min(size - 1, int(middle * size / total)))
        before += numel
    return ranks
