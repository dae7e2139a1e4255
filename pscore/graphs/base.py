"""The protocol of a graph: the models that each worker takes at a step, and their weights.

A graph is a pure function of the members and the step, so all workers draw the same one without a
message. An edge (i, j, w) means that worker i takes w times the model of worker j; the rest of a
worker's row, 1 minus its weights, is the weight of its own model. Rows and columns of this mixing
matrix sum to 1 for any members, so the mean of all models is kept.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pscore.errors import ConfigError

CACHED_MAX = 8  # Sets of members for which a graph that was given is remembered.


class Edge(NamedTuple):
    """One entry of the mixing matrix outside of its diagonal."""

    taker: int  # Rank.
    giver: int  # Rank.
    weight: float


# Takes the ranks of the members, in order, and the 0-based step.
Graph = Callable[[Sequence[int], int], list[Edge]]


def circulant(members: Sequence[int], offsets: Sequence[int], weight: float) -> list[Edge]:
    """Returns the edges of a graph in which each member takes from those at fixed distances.

    Args:
        members: Ranks, in order.
        offsets: Distances in places, either sign. Two that lead to the same place count double, and
            one that leads back to the member itself adds to its own weight.
    """
    num = len(members)
    weights: defaultdict[tuple[int, int], float] = defaultdict(float)
    for place in range(num):
        for offset in offsets:
            weights[place, (place + offset) % num] += weight
    return as_edges(members, weights)


def as_edges(members: Sequence[int], weights: dict[tuple[int, int], float]) -> list[Edge]:
    """Returns weights by places of taker and giver as edges between ranks, without the diagonal."""
    return [
        Edge(members[taker], members[giver], weight)
        for (taker, giver), weight in sorted(weights.items())
        if taker != giver
    ]


def num_rounds(num: int) -> int:
    """Returns the base-2 logarithm of a number of members, rounded up, and at least 1."""
    return max(1, (num - 1).bit_length())


def read_pairs(text: str, sign: str) -> list[tuple[int, int]]:
    """Returns the pairs of ranks in a text such as `0>1 1>2`, with blanks between them.

    Args:
        text: The pairs, as the user has written them.
        sign: The character between the two ranks of a pair.

    Raises:
        ConfigError: The text is not of that form, or a pair joins a worker with itself.
    """
    pairs = []
    for word in text.split():
        match = re.fullmatch(rf"(\d{{1,4}}){sign}(\d{{1,4}})", word)
        if match is None or int(match[1]) == int(match[2]):
            raise ConfigError(f"edge {word!r} of a graph must look like 0{sign}1, two unlike ranks")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def among(pairs: Iterable[tuple[int, int]], members: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the pairs of a directed graph whose workers are members, in order.

    A chain takes the place of each absent worker: those that send to it, one to the next, and the
    last of them to those that it sends to. So a path through it is still a path, and a graph that
    leads from each worker to each other one does so among the members too.

    Args:
        pairs: Sender and receiver of each edge.
    """
    there, found = set(members), set(pairs)
    for absent in sorted({rank for pair in found for rank in pair} - there):
        senders = sorted(one for one, other in found if other == absent)
        receivers = sorted(other for one, other in found if one == absent)
        found = {pair for pair in found if absent not in pair}
        chain = itertools.pairwise([*senders, *receivers]) if senders and receivers else ()
        found |= {(one, other) for one, other in chain if one != other}
    return sorted(found)


def is_joined(pairs: Collection[tuple[int, int]]) -> bool:
    """Returns whether a directed graph leads from each of its workers to each other one."""
    ranks = {rank for pair in pairs for rank in pair}

    def reach(edges: Collection[tuple[int, int]]) -> set[int]:
        found = {min(ranks)}
        while new := {other for one, other in edges if one in found} - found:
            found |= new
        return found

    return not ranks or reach(pairs) == reach([(b, a) for a, b in pairs]) == ranks
