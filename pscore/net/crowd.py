"""The choice among connections of strangers when there are too many.

The oldest connections of the addresses that have most of them are closed. So a newcomer that speaks
at once is heard, however many connections others hold and say nothing on, and one address cannot
take the places of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

K = TypeVar("K")


def to_close(waiting: Sequence[tuple[K, str]], count: int = 1) -> list[K]:
    """Returns the connections to close, one after the other.

    Args:
        waiting: Connections with the addresses of their peers, the oldest first.
        count: Number of connections wanted; fewer are returned if there are fewer.
    """
    places: list[tuple[int, K]] = []
    younger: Counter[str] = Counter()
    for connection, address in reversed(waiting):
        younger[address] += 1
        places.append((younger[address], connection))
    places.reverse()
    places.sort(key=lambda place: -place[0])  # Equal ones stay in the order of arrival.
    return [connection for _, connection in places[:count]]
