"""The choice among connections of strangers when there are too many.

The oldest connections of the addresses that have most of them are closed. So a newcomer that speaks
at once is heard, however many connections others hold and say nothing on, and one address cannot
take the places of all. Once the first message of a peer has come whole (`OpenExchanges`), nobody
takes its place for a while.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SAFE_TICKS = 2  # A peer that speaks keeps its place for one tick at least, and for two at most.


class ExchangeStage(enum.IntEnum):
    """How far an exchange of one request and its answer has come."""

    SILENT = 0  # No message of the peer has come whole.
    BEGUN = 1  # The first one has, and it is not the request: the handshake of TLS.
    ASKED = 2  # The request has come; all time is that of this side.
    ANSWERED = 3  # The peer takes the answer.


@dataclass(slots=True)
class _Exchange:
    address: str
    stage: ExchangeStage = ExchangeStage.SILENT
    ticks: int = 0  # Those that the peer has let pass.


class OpenExchanges(Generic[K]):
    """Exchanges that are open, and which of them goes.

    Time is counted in ticks of the caller's loop, so a loop that stands still for long, on a busy
    machine, takes one tick of each peer's time and no more.
    """

    def __init__(self, ticks_max: float) -> None:
        """Gives a peer `ticks_max` ticks for its request, and as many to take the answer."""
        self._ticks_max = ticks_max
        self._held: dict[K, _Exchange] = {}  # In order of arrival.

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, exchange: K) -> bool:
        return exchange in self._held

    def enter(self, exchange: K, address: str) -> None:
        """Adds an exchange with a peer at `address`."""
        self._held[exchange] = _Exchange(address)

    def advance(self, exchange: K, stage: ExchangeStage) -> None:
        """Notes that an exchange, which may have left, has come so far."""
        place = self._held.get(exchange)
        if place is not None and stage > place.stage:
            place.stage = stage
            if stage is ExchangeStage.ANSWERED:
                place.ticks = 0

    def leave(self, exchange: K) -> None:
        """Removes an exchange, if it is there."""
        self._held.pop(exchange, None)

    def tick(self) -> list[K]:
        """Counts a tick, and returns the exchanges whose peers have no time left."""
        for place in self._held.values():
            place.ticks += place.stage is not ExchangeStage.ASKED
        return [it for it, place in self._held.items() if place.ticks > self._ticks_max]

    def choose(self, count: int = 1) -> list[K]:
        """Returns the exchanges that go for so many newcomers; fewer: others keep their places."""
        silent, slow = [], []
        for exchange, place in self._held.items():
            if place.stage is ExchangeStage.SILENT:
                silent.append((exchange, place.address))
            elif place.stage is not ExchangeStage.ASKED and place.ticks >= SAFE_TICKS:
                slow.append((exchange, place.address))
        chosen = to_close(silent, count)
        return chosen + to_close(slow, count - len(chosen))


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
