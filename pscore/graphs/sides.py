"""The two sides of a graph, so that each exchange joins a worker of one to a worker of the other.

Xiangru Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
arXiv:1710.06952, section 4: where workers of one side alone begin exchanges, and those of the other
only answer, no workers wait for each other in a circle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from pscore.graphs.base import Graph, num_rounds


class Sides(NamedTuple):
    """The members of a graph in two sides, by their distances from the lowest rank."""

    active: frozenset[int]  # Ranks at odd distances.
    is_bipartite: bool  # Whether every edge joins one side to the other.


def sides_of(graph: Graph, members: Sequence[int]) -> Sides:
    """Returns the two sides of a graph, over all its steps, among `members`: ranks in order.

    In a graph that is not bipartite some edges stay within a side. The other edges still join all
    members that the graph joins, as they hold a path of fewest edges from the lowest rank to each.
    """
    neighbours: defaultdict[int, set[int]] = defaultdict(set)
    for step in range(num_rounds(len(members))):  # No graph has a longer period.
        for edge in graph(members, step):
            neighbours[edge.taker].add(edge.giver)
            neighbours[edge.giver].add(edge.taker)
    distances: dict[int, int] = {}
    for first in members:
        if first in distances:
            continue
        distances[first] = 0
        queue = deque([first])
        while queue:
            rank = queue.popleft()
            for other in sorted(neighbours[rank] - distances.keys()):
                distances[other] = distances[rank] + 1
                queue.append(other)
    active = frozenset(rank for rank, distance in distances.items() if distance % 2)
    is_bipartite = all(
        (rank in active) != (other in active) for rank in members for other in neighbours[rank]
    )
    return Sides(active, is_bipartite)
