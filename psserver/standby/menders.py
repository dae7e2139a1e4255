"""Processes that restore lost jobs, and must know of a standby before it may have the shard.

Such a process takes an empty one at a shard's address for the loss of all that the shard had,
unless it knows where the standby is. One that has not asked for `LEASE_S` counts as gone: if it
asks again, it takes no change of that time for a loss (mending/mender.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEASE_S = 20.0


@dataclass(slots=True)
class Menders:
    """The knowledge of these processes about one shard."""

    _known: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, name: str, next_address: str, now_s: float) -> None:
        """Notes a question of a process, and the next address of the shard that it has."""
        self._known[name] = now_s, next_address

    def know(self, next_address: str, now_s: float) -> bool:
        """Returns whether all of them have this address."""
        recent = {name: it for name, it in self._known.items() if now_s - it[0] < LEASE_S}
        self._known = recent
        return all(known == next_address for _, known in recent.values())
