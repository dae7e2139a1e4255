"""The bipartite exponential graph with one peer a step: 1, 3, 5, 9, ... places further on.

Mahmoud Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
arXiv:1811.10792, and its code, for AD-PSGD: at step t the one peer is 1 or 1 + 2^i places further
on. All distances are odd, so with an even number of workers each edge joins an odd place to an even
one. With an odd number some edges do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pscore.graphs.base import Edge, circulant, num_rounds


def edges(members: Sequence[int], step: int) -> list[Edge]:
    """Returns the edges among `members`, which are ranks in order, at 0-based `step`."""
    place = step % num_rounds(len(members))
    return circulant(members, (1 + (1 << place if place else 0),), 1 / 2)
