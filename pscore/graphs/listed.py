"""Any undirected graph, as a list of edges: `0-1 1-2 2-0`, with Metropolis weights.

Lin Xiao and Stephen Boyd, "Fast Linear Iterations for Distributed Averaging", Systems and Control
Letters, 2004, section 4: W_ij = 1 / (1 + max(d_i, d_j)) with the degrees d, which is symmetric, so
its rows and columns sum to 1 on every graph. The neighbours of an absent worker are joined in a
ring, so that nobody is cut off.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from pscore.graphs.base import CACHED_MAX, Edge, Graph, among, as_edges, read_pairs


def parse(text: str) -> Graph:
    """Returns the graph with the edges of `text`: pairs of ranks, with blanks between.

    Raises:
        ConfigError: The text is not of that form, or an edge joins a worker with itself.
    """
    given = read_pairs(text, "-")
    pairs = frozenset([*given, *((other, one) for one, other in given)])

    @functools.lru_cache(CACHED_MAX)
    def present(members: tuple[int, ...]) -> set[tuple[int, int]]:
        return {(min(pair), max(pair)) for pair in among(pairs, members)}

    def edges(members: Sequence[int], step: int) -> list[Edge]:
        places = {rank: place for place, rank in enumerate(members)}
        found = [(places[a], places[b]) for a, b in present(tuple(members))]
        degrees = Counter(place for pair in found for place in pair)
        weights = {}
        for one, other in found:
            weight = 1 / (1 + max(degrees[one], degrees[other]))
            weights[one, other] = weights[other, one] = weight
        return as_edges(members, weights)

    return edges
