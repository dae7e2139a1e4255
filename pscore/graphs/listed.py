"""Any undirected graph, as a list of edges: `0-1 1-2 2-0`, with Metropolis weights.

Lin Xiao and Stephen Boyd, "Fast Linear Iterations for Distributed Averaging", Systems and Control
Letters, 2004, section 4: W_ij = 1 / (1 + max(d_i, d_j)) with the degrees d, which is symmetric, so
its rows and columns sum to 1 on every graph. Edges of absent workers are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pscore.graphs.base import Edge, Graph, as_edges, read_pairs


def parse(text: str) -> Graph:
    """Returns the graph with the edges of `text`: pairs of ranks, with blanks between.

    Raises:
        ConfigError: The text is not of that form, or an edge joins a worker with itself.
    """
    pairs = {(min(pair), max(pair)) for pair in read_pairs(text, "-")}

    def edges(members: Sequence[int], step: int) -> list[Edge]:
        places = {rank: place for place, rank in enumerate(members)}
        present = [(places[a], places[b]) for a, b in pairs if a in places and b in places]
        degrees = Counter(place for pair in present for place in pair)
        weights = {}
        for one, other in present:
            weight = 1 / (1 + max(degrees[one], degrees[other]))
            weights[one, other] = weights[other, one] = weight
        return as_edges(members, weights)

    return edges
