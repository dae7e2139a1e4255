"""Log lines about errors of peers: one of a kind and peer in a while, the others are counted.

A peer may be refused as often as it connects; without this each refusal would be a line. A state
machine: time is an argument (`setup.py` drives it).
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY_S = 10.0
KINDS_MAX = 1024  # Beyond that many peers, those of one kind of line share one entry.

Kind = tuple[str, str]  # The event and the peer.


@dataclass(slots=True)
class _Said:
    since_s: float
    untold: int = 0


class Floods:
    """Records the lines that were written lately, and counts those that were left out."""

    def __init__(self) -> None:
        self._said: dict[Kind, _Said] = {}

    def admit(self, event: str, peer: str, now_s: float) -> int | None:
        """Returns how many such lines were left out before this one; None: leave it out too."""
        kind = (event, peer)
        if kind not in self._said and len(self._said) >= KINDS_MAX:
            kind = (event, "")
        said = self._said.get(kind)
        if said is not None and now_s - said.since_s < EVERY_S:
            said.untold += 1
            return None
        self._said[kind] = _Said(now_s)
        return 0 if said is None else said.untold

    def settle(self, now_s: float) -> list[tuple[Kind, int]]:
        """Forgets old lines; returns the kinds of which lines were left out since."""
        over = {k: said for k, said in self._said.items() if now_s - said.since_s >= EVERY_S}
        for kind in over:
            del self._said[kind]
        return [(kind, said.untold) for kind, said in over.items() if said.untold]
