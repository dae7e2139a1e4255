"""The static exponential graph: each worker takes from those 1, 2, 4, ... places further on.

Bicheng Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
arXiv:2110.13363: ceil(log2 n) models a step and worker, all of weight 1 / (1 + ceil(log2 n)). The
distance to the mean shrinks by 1 - 2 / (1 + log2 n) a step where n is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

from pscore.graphs.base import Edge, circulant


def edges(members: Sequence[int], step: int) -> list[Edge]:
    """Returns the edges among `members`, which are ranks in order; the same at every `step`."""
    offsets = [1 << power for power in range((len(members) - 1).bit_length())]
    return circulant(members, offsets, 1 / (1 + len(offsets)))
