"""Any directed graph, as a list of edges: `0>1 1>2 2>0`, for push-sum alone.

A worker sends along its edges, and the weight of each is 1 / (1 + out-degree): columns sum to 1,
and rows need not, so that models alone would not come to their mean; push-sum (`sgp`) divides by a
weight that travels along (Kempe, Dobra and Gehrke, FOCS 2003). Edges of absent workers are left
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pscore.graphs.base import Edge, Graph, read_pairs


def parse(text: str) -> Graph:
    """Returns the graph with the edges of `text`: sender and receiver, with blanks between.

    Raises:
        ConfigError: The text is not of that form, or an edge joins a worker with itself.
    """
    pairs = set(read_pairs(text, ">"))

    def edges(members: Sequence[int], step: int) -> list[Edge]:
        there = set(members)
        present = sorted(pair for pair in pairs if there.issuperset(pair))
        degrees = Counter(giver for giver, _ in present)
        return sorted(Edge(to, giver, 1 / (1 + degrees[giver])) for giver, to in present)

    return edges
