"""The choice among connections of strangers when there are too many.

The oldest connection of the address that has most of them is closed. So a newcomer that speaks at
once is heard, however many connections others hold and say nothing on, and one address cannot take
the places of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

K = TypeVar("K")


def to_close(waiting: Sequence[tuple[K, str]]) -> K:
    """Returns the connection to close.

    Args:
        waiting: At least one connection with the address of its peer, the oldest first.
    """
    ((address, _),) = Counter(address for _, address in waiting).most_common(1)
    return next(connection for connection, of in waiting if of == address)
