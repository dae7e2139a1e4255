"""Long waits: reported in the shard's log, to workers, and in its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Key = tuple[str | int, ...]
SAY_AFTER_S = 5.0  # A wait is logged after this time, and then each time it has doubled.
TELL_AFTER_S = 2.0  # A wait is reported to workers, with their heartbeats, after this time.


@dataclass(slots=True)
class _Wait:
    text: str
    since_s: float
    age_s: float = 0.0
    say_s: float = SAY_AFTER_S


class Stalls:
    """The waits of one job on one shard. A state machine: time is an argument."""

    def __init__(self) -> None:
        self._waits: dict[Key, _Wait] = {}

    def look(self, standing: Mapping[Key, str], now_s: float) -> list[tuple[str, float]]:
        """Records the waits of this moment; called about once a second.

        Args:
            standing: The waits as text, each by a key that changes with every step forward.

        Returns:
            The waits to log, and how long each has lasted, in seconds.
        """
        found = {key: self._waits.get(key) or _Wait(text, now_s) for key, text in standing.items()}
        self._waits = found
        due: list[tuple[str, float]] = []
        for key, wait in found.items():
            wait.text, wait.age_s = standing[key], now_s - wait.since_s
            if wait.age_s >= wait.say_s:
                wait.say_s = 2 * wait.age_s
                due.append((wait.text, wait.age_s))
        return due

    @property
    def told(self) -> str:
        """The longest wait, as text; empty if none is long."""
        oldest = max(self._waits.values(), key=lambda wait: wait.age_s, default=None)
        return oldest.text if oldest is not None and oldest.age_s >= TELL_AFTER_S else ""
