"""Each worker takes from the one before it and the one behind it: W_ij = 1/3.

The ring of Xiangru Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
arXiv:1705.09056. The distance to the mean shrinks by 1 - (2/3) (1 - cos(2 pi / n)) a step. With two
workers both neighbours are the same one, which counts double.
"""

from __future__ import annotations

from collections.abc import Sequence

from pscore.graphs.base import Edge, circulant


def edges(members: Sequence[int], step: int) -> list[Edge]:
    """Returns the edges among `members`, which are ranks in order; the same at every `step`."""
    return circulant(members, (-1, 1), 1 / 3)
