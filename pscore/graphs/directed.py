"""Any directed graph, as a list of edges: `0>1 1>2 2>0`, for push-sum alone.

A worker sends along its edges, and the weight of each is 1 / (1 + out-degree): columns sum to 1,
and rows need not, so that models alone would not come to their mean; push-sum (`sgp`) divides by a
weight that travels along (Kempe, Dobra and Gehrke, FOCS 2003). There must be a way from each worker
to each other one: a worker that gives and gets nothing would run out of weight. Chains take the
place of absent workers, so that this stays true.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from pscore.errors import ConfigError
from pscore.graphs.base import CACHED_MAX, Edge, Graph, among, is_joined, read_pairs


def parse(text: str) -> Graph:
    """Returns the graph with the edges of `text`: sender and receiver, with blanks between.

    Raises:
        ConfigError: The text is not of that form, an edge joins a worker with itself, or there is
            no way from one worker to another.
    """
    pairs = frozenset(read_pairs(text, ">"))
    if not is_joined(pairs):
        raise ConfigError(
            f"graph {text!r} must lead from each of its workers to each other one: a worker that "
            "gives and gets nothing would run out of weight"
        )

    @functools.lru_cache(CACHED_MAX)
    def present(members: tuple[int, ...]) -> list[tuple[int, int]]:
        return among(pairs, members)

    def edges(members: Sequence[int], step: int) -> list[Edge]:
        found = present(tuple(members))
        degrees = Counter(giver for giver, _ in found)
        return sorted(Edge(to, giver, 1 / (1 + degrees[giver])) for giver, to in found)

    return edges
